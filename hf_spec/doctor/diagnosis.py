"""The likeliest cause of low acceptance, and the cure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.prompts import Prompt, check_positions
from ..checkpoints.known import hub_id, share_a_name
from ..checkpoints.resolve import MOST_IN_COMMON, as_speculator, common_tokens
from ..configuration import another_target
from ..drafts.base import Speculator
from ..drafts.modeling import DraftModel
from ..drafts.translated.speculator import TranslatedSpeculator
from ..drafts.vanilla.speculator import VanillaSpeculator
from ..progress import Progress, counted
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS
from .changes import Change, changes
from .evidence import Answer, answered, survival

MIN_GAIN = 0.05  # tokens per step that a change must gain to be named
MIN_STANDARD_ERRORS = 3.0  # standard errors, over the tokens of the answers, that the gain must reach
MIN_COVERAGE = 0.9  # share of the answers' tokens that must be in the draft vocabulary
GOOD_ACCEPTANCE = 0.5  # acceptance rate that needs no explanation
ENOUGH_PROMPTS = 8  # prompts; fewer prove little
ANOTHER = "another target"


@dataclass(frozen=True)
class Finding:
    """A ``cause``, its evidence and its cure; ``gain`` in tokens per step, 0 where it is not known."""

    cause: str
    evidence: str
    cure: str
    gain: float = 0.0

    @property
    def explains(self) -> bool:
        """Tell whether it may be the likeliest cause; another name of the target alone says little."""
        return self.cause != ANOTHER and self.gain >= MIN_GAIN


@dataclass(frozen=True)
class Diagnosis:
    """Measurements and findings, the likeliest cause first if there is one; ``str()`` is for people.

    ``measured`` and ``expected`` are the shares of steps that accept a draft token at each depth: in ``generate``, and
    with teacher forcing after the same tokens. ``changed`` is τ with each change that was tried.
    """

    prompts: int
    tokens: int
    measured: list[float]
    expected: list[float]
    findings: list[Finding]
    tau: float = 0.0
    changed: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        header = "depth          " + "".join(f"{depth:>7}" for depth in range(1, len(self.measured) + 1)) + "      τ"
        rows = [
            f"{name:15}" + "".join(f"{share:7.2f}" for share in shares) + f"{1 + sum(shares):7.2f}"
            for name, shares in (("measured", self.measured), ("teacher forcing", self.expected))
        ]
        lines = [
            f"{counted(self.prompts, 'prompt')}, {counted(self.tokens, 'token')} of the target's own answers",
            header,
            *rows,
            "",
        ]
        for place, one in enumerate(self.findings):
            title = "likeliest cause" if place == 0 else "also"
            lines += [f"{title}: {one.cause}", f"  seen by: {one.evidence}", f"  do: {one.cure}"]
        if not self.findings:
            accepted = f"{sum(self.measured):.2f} of {len(self.measured)} draft tokens are accepted"
            lines += [f"nothing to explain: {accepted}"]
        if self.changed:
            lines += ["", f"what was tried (τ after every token; {self.tau:.2f} as it is)"]
            lines += [f"  {tau:5.2f}  {what}" for what, tau in self.changed.items()]
        return "\n".join(lines)


def diagnose(
    target: PreTrainedModel,
    speculator: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,
    progress: bool = False,
) -> Diagnosis:
    """Examine why ``target`` rejects so many draft tokens of ``speculator``, on its greedy answers to ``prompts``.

    ``progress`` draws a bar for the answers, and one for the changes that are tried.

    Errors: a TypeError for other prompts than those of ``hf_spec.bench.read_prompts``, a ValueError for none of them,
    for one that leaves no positions for an answer, or for a draft that cannot be examined, and what ``generate``
    raises.
    """
    _check_prompts(prompts)
    found = as_speculator(speculator, target)
    refuse_draft(found)
    draft = found.model if isinstance(found, VanillaSpeculator) else found
    if isinstance(draft, DraftModel):
        draft.bind(target)
    asked = found.defaults().num_speculative_tokens
    depth = asked if isinstance(asked, int) else DEFAULT_NUM_SPECULATIVE_TOKENS
    asked_for = [prompt.render([], tokenizer) for prompt in prompts]
    check_positions(target, asked_for, max_new_tokens)
    with Progress("Answering", len(asked_for), "prompts", progress) as bar:
        answers = answered(target, found, asked_for, depth, max_new_tokens, bar.update)
    survived = [survival(target, draft, answer, depth) for answer in answers]
    depth = sum(map(bool, _proposed(answers)))  # Medusa heads end before that
    case = _Case(target, found, draft, tokenizer, prompts, answers, survived, depth)
    tried = list(case.tried(progress))
    findings = [finding for _, _, finding in tried if finding]
    findings = [*sorted(findings, key=lambda one: -one.gain)[:1], *case.hints()]
    measured, expected = case.measured(), case.expected()
    findings.sort(key=lambda one: -one.gain)
    if measured and not any(finding.explains for finding in findings):  # else no draft token was tried at all
        names, rest = ([one for one in findings if (one.cause == ANOTHER) == is_name] for is_name in (True, False))
        well = sum(measured) >= GOOD_ACCEPTANCE * len(measured)
        findings = [] if well else [*names, case.nothing_else(), *rest]
    return Diagnosis(
        len(answers),
        sum(len(answer.row.tokens) for answer in answers),
        measured,
        expected,
        findings,
        1 + case.mean(survived),
        {f"{change.name}: {change.now}": 1 + accepted for change, accepted, _ in tried},
    )


def refuse_draft(found: Speculator) -> None:
    """Raise a ValueError if a draft has no weights to examine, or another tokenizer than the target."""
    if isinstance(found, TranslatedSpeculator):
        raise ValueError(
            "the draft has another tokenizer than the target, and so other tokens, which are translated: that alone "
            "lowers acceptance. Pass a draft with the target's tokenizer; hf-spec bench measures this one"
        )
    if not isinstance(found, DraftModel | VanillaSpeculator):
        raise ValueError(
            f"{type(found).__name__} has no config and weights of its own to examine: pass a draft model or a "
            "language model. hf-spec bench measures what it accepts"
        )


def _check_prompts(prompts: Any) -> None:
    advice = "pass those of hf_spec.bench.read_prompts(FILE), or [hf_spec.bench.Prompt(...)]"
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        raise TypeError(f"prompts is a {type(prompts).__name__}, no list: {advice}")
    if not prompts:
        raise ValueError(f"prompts is empty, so there is no answer to examine: {advice}")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise TypeError(f"prompt {index} is {prompt!r:.80}, no hf_spec.bench.Prompt: {advice}")


def _proposed(answers: Sequence[Answer]) -> list[int]:
    widest = max((len(answer.row.proposed_at) for answer in answers), default=0)
    return [
        sum(answer.row.proposed_at[i] for answer in answers if i < len(answer.row.proposed_at)) for i in range(widest)
    ]


@dataclass(frozen=True)
class _Case:
    target: PreTrainedModel
    speculator: Any
    draft: Any
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    answers: list[Answer]
    survived: list[Tensor]
    depth: int

    def mean(self, survived: list[Tensor]) -> float:
        """Return how many draft tokens a step after any token would accept on average."""
        accepted = torch.cat(survived).float()  # (tokens, depth)
        return float(accepted.sum(1).mean())

    def measured(self) -> list[float]:
        accepted = [
            sum(a.row.accepted_at[i] for a in self.answers if i < len(a.row.accepted_at)) for i in range(self.depth)
        ]
        return [count / max(1, asked) for count, asked in zip(accepted, _proposed(self.answers), strict=False)]

    def expected(self) -> list[float]:
        """Return the shares that teacher forcing accepts after the tokens at which the steps of ``generate`` began."""
        right, proposed = torch.zeros(self.depth), torch.zeros(self.depth)
        for answer, survived in zip(self.answers, self.survived, strict=True):
            for root in answer.roots:
                length = min(self.depth, answer.max_draft_tokens(root))
                proposed[:length] += 1
                right[:length] += survived[root - answer.start + 1, :length]
        return [float(share) for share in right / proposed.clamp(min=1)]

    def tried(self, progress: bool) -> Iterator[tuple[Change, float, Finding | None]]:
        """Try one change at a time, and compute what teacher forcing would accept."""
        if not isinstance(self.draft, DraftModel):
            return
        ways = list(changes(self.draft, self.target))
        with Progress("Trying other settings of the draft", len(ways), "ways", progress) as bar:
            for change in ways:
                if (changed := change.apply(self.draft, self.target)) is not None:
                    survived = [
                        survival(self.target, changed, answer, self.survived[0].shape[1]) for answer in self.answers
                    ]
                    yield change, self.mean(survived), self._gained(change, survived)
                bar.update()

    def _gained(self, change: Change, survived: list[Tensor]) -> Finding | None:
        gains = torch.cat(survived).float().sum(1) - torch.cat(self.survived).float().sum(1)  # (tokens,)
        gain, spread = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        if gain < max(MIN_GAIN, MIN_STANDARD_ERRORS * spread):
            return None
        return Finding(
            change.name,
            f"with {change.now} instead of {change.was} τ would be {gain:.2f} ± {spread:.2f} higher on the same text",
            _cure(change),
            gain,
        )

    def hints(self) -> Iterator[Finding]:
        """List findings that need no change of the draft's config."""
        yield from self._drafter()
        yield from self._vocabulary()
        yield from self._names()
        yield from self._positions()
        yield from self._template()

    def _drafter(self) -> Iterator[Finding]:
        lost = sum(self.expected()) - sum(self.measured())
        if lost > MIN_GAIN:
            yield Finding(
                "generate",
                f"steps accept {lost:.2f} tokens fewer than teacher forcing does after the same tokens",
                "if draft and target run in float32 this is a mistake of hf_spec: please report it with this output; "
                "in bfloat16 and float16 try dtype=float32 first",
                lost,
            )

    def _vocabulary(self) -> Iterator[Finding]:
        ids = self.draft.target_ids if isinstance(self.draft, DraftModel) else None
        if ids is None:
            return
        said = torch.cat([answer.ids[0, answer.start :].cpu() for answer in self.answers])
        known = torch.isin(said, ids.cpu())  # (tokens,)
        right = torch.cat([survived[:, 0] for survived in self.survived])
        share = float(known.float().mean())
        if share < MIN_COVERAGE:
            yield Finding(
                "draft vocabulary",
                f"only {share:.0%} of the answers' tokens are among the {len(ids)} that the draft can propose",
                "train with a larger draft_vocab_size, or with token counts (count_tokens) of text like this",
                _lost_outside(known, right),
            )

    def _names(self) -> Iterator[Finding]:
        if isinstance(self.speculator, VanillaSpeculator):
            share = common_tokens(self.draft.name_or_path, self.target.name_or_path)
            if share < MOST_IN_COMMON:
                yield Finding(
                    "tokenizer",
                    f"only {share:.0%} of the tokens of draft and target are the same",
                    "take a draft with the target's own tokenizer",
                    1 - share,
                )
            return
        made_for, name = self.draft.config.made_for.get("name_or_path"), self.target.config.name_or_path
        evidence = another_target(self.draft.config.made_for, self.target.config)
        # Hub names only: a directory may have any name, and drafts to be published hold the Hub name of their target.
        if not evidence and made_for and (called := hub_id(name or "")) and not share_a_name(called, made_for):
            evidence = f"the draft says that it was made for {made_for}, and this is {name}"
        if evidence:
            yield Finding(
                ANOTHER,
                evidence,
                "take a draft for this target (hf_spec.known_drafts), or train this one on: hf-spec train with "
                "'draft: DIRECTORY' on the target's own answers",
            )

    def _positions(self) -> Iterator[Finding]:
        config = self.draft.config.get_text_config()
        most, longest = getattr(config, "max_position_embeddings", None), max(a.ids.shape[1] for a in self.answers)
        if not most or longest <= most:
            return
        places = [max(0, most - answer.start + 1) for answer in self.answers]
        before = torch.cat([one[:place, 0] for one, place in zip(self.survived, places, strict=True)]).float()
        after = torch.cat([one[place:, 0] for one, place in zip(self.survived, places, strict=True)]).float()
        evidence, lost = f"the texts are up to {longest} tokens long, the draft is made for {most}", 0.0
        if len(before) and len(after):  # no token is before it if prompts alone are longer
            shares = float(before.mean()), float(after.mean())
            lost = max(0.0, shares[0] - shares[1])
            evidence += (
                f": its first draft token is right at {shares[0]:.0%} of the tokens before that position and at "
                f"{shares[1]:.0%} of those after it"
            )
        cure = "shorten the texts, or train the draft on long ones (max_position_embeddings of its config)"
        yield Finding("position limit", evidence, cure, lost)

    def _template(self) -> Iterator[Finding]:
        """Answer raw prompts again as user messages, if the tokenizer has a chat template."""
        raw = [prompt for prompt in self.prompts if not prompt.chat]
        if not raw or self.tokenizer.chat_template is None:
            return
        asked = [replace(prompt, chat=True).render([], self.tokenizer) for prompt in raw]
        new = max(len(answer.row.tokens) for answer in self.answers)
        try:
            check_positions(self.target, asked, new)
        except ValueError:  # the template's own tokens take the positions of an answer
            return
        again = answered(self.target, self.speculator, asked, self.survived[0].shape[1], new)
        before = [answer for answer, prompt in zip(self.answers, self.prompts, strict=True) if not prompt.chat]
        was, now = _tau(before), _tau(again)
        if now - was > MIN_GAIN:
            yield Finding(
                "template",
                f"{len(raw)} prompts are raw text, but the tokenizer has a chat template: with it τ is {now:.2f} "
                f"instead of {was:.2f}",
                'write {"messages": [...]} or {"turns": [...]}, or apply_chat_template before generate',
                now - was,
            )

    def nothing_else(self) -> Finding:
        evidence = f"nothing in the config explains it, and {len(self.answers)} prompts were answered"
        return Finding(
            "training",
            evidence + (": use more of them for a safer answer" if len(self.answers) < ENOUGH_PROMPTS else ""),
            "compare with the τ of its card. If that is higher, the draft was trained on other text, for another "
            "version of the target, or too little: let the target answer prompts like these "
            "(hf-spec prepare --regenerate), and train on that",
        )


def _lost_outside(known: Tensor, right: Tensor) -> float:
    """Return how many tokens a step loses because of tokens outside of the draft vocabulary.

    ``known`` (tokens,) marks tokens inside of it, and ``right`` (tokens,) those where the first draft token is right.
    The draft would be right about tokens outside as often as about those inside. But if more than half of its errors
    are at tokens outside, each of these counts as lost.
    """
    outside = float((~known).float().mean())
    if 2 * int((~known).sum()) > int((~right).sum()):
        return outside
    return outside * float(right[known].float().mean())


def _tau(answers: Sequence[Answer]) -> float:
    return sum(a.row.emitted for a in answers) / max(1, sum(a.row.steps for a in answers))


def _cure(change: Change) -> str:
    if change.name == "dtype":
        return "load the draft with dtype=float32, or train it in the precision it is used in"
    where = "transformer_layer_config of config.json" if change.name == "rope" else "config.json"
    return f"set {json.dumps(change.fields)[1:-1]} in {where}, and tell whoever published it"
