"""``hf-spec generate --prompts FILE --out FILE``: answer a file of prompts, and resume a killed run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..untrusted import printable
from .common import asked_for, configured, sampling
from .history_file import keeping_history

if TYPE_CHECKING:
    from ..bench import Prompt
    from ..many.answers import AnswerFile, Question
    from ..many.prompts import Completion


def check_options(args: argparse.Namespace) -> None:
    """Raise a ValueError for an option that needs or excludes another one."""
    if (args.prompts is None) != (args.out is None):
        raise ValueError("--prompts FILE and --out FILE go together: answers to many prompts are written to a file")
    if args.prompts is not None and args.prompt is not None:
        raise ValueError("--prompt asks for one answer, --prompts for many: pass one of them")


def answer_file(args: argparse.Namespace) -> None:
    """Answer the prompts of ``args.prompts`` that have no answer in ``args.out`` yet."""
    if not sum(1 for _ in _questions(args)):  # reports a bad line before anything is loaded
        from ..bench.prompts import no_prompts

        raise no_prompts(args.prompts)
    from ..checkpoints.fingerprint import computing, fingerprint, generation_settings, tokenizer_digest
    from ..many.answers import AnswerFile
    from ..many.generate import generate_many
    from ..metrics import Counts
    from ..processes import Processes, launched
    from ..sampling import set_seed
    from .loading import load_models, pack_models, refuse_without_template

    state, device = launched(args.device)
    target, tokenizer, speculators = load_models(
        args.model, [args.speculator], args.dtype, device, lambda draft: [configured(draft, args, args.tree)]
    )
    if args.chat:
        refuse_without_template(tokenizer, args.model, "leave --chat out")
    speculator, processes = speculators[args.speculator], Processes(state)
    of_target = fingerprint(target)  # of packed weights it would copy the values
    pack_models(args, target, speculator)
    options = {"max_new_tokens": args.max_new_tokens, **sampling(args.temperature)}
    made_from = {**of_target, "tokenizer": tokenizer_digest(tokenizer), "chat": args.chat}
    made_from |= computing(target, args.no_pack)
    answers = AnswerFile(args.out, made_from | {"seed": args.seed} | generation_settings(target, options))
    processes.by_the_first(answers.prepare)
    count = answers.read(asked for asked, _ in _questions(args))
    rest = _Rest(args, target, tokenizer, answers, count - len(answers))
    if args.seed is not None:  # not the random numbers of earlier answers, or of another process
        set_seed(args.seed + len(answers), processes.number)
    counts = Counts()
    completions = generate_many(
        target,
        rest,
        speculator=speculator,
        speculation_config=asked_for(speculator, args, args.tree),
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        look_ahead=None if processes.count == 1 else 4 * args.batch_size,  # of each; then answers are gathered
        accelerator=state,
        **options,
    )
    with keeping_history(args, speculator, tokenizer, writes=processes.is_first):
        try:
            for one in completions:
                index, asked = rest.waiting.pop(one.index)
                if processes.is_first:
                    answers.write(index, asked, _answer(one, target.generation_config.eos_token_id))
                if one.speculation is not None:
                    counts.add(one.speculation.counts)
        except Exception as error:
            if hasattr(error, "__notes__") and any(place != index for place, (index, _) in rest.waiting.items()):
                error.add_note("where 0 is the first prompt that had no answer yet, and those left out do not count")
            raise
    if processes.is_first:
        _print(len(rest), len(answers), args.out, counts)


@dataclass
class _Rest:
    """An iterable of the token ids of prompts without an answer; ``waiting`` holds those that are being answered."""

    args: argparse.Namespace
    target: Any
    tokenizer: Any
    answers: AnswerFile
    count: int
    waiting: dict[int, tuple[int, Question]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        numbered = enumerate(_questions(self.args))
        open_ones = ((index, *question) for index, question in numbered if index not in self.answers)
        place = 0
        for index, asked, prompt in open_ones:
            try:
                ids = self._ids(prompt)
            except ValueError as error:
                print(f"prompt {index} is left out: {printable(error)}", file=sys.stderr)
                self.count -= 1
                continue
            self.waiting[place] = index, asked
            place += 1
            yield ids

    def _ids(self, prompt: Prompt) -> list[int]:
        """Render a prompt. Errors: a ValueError if the template fails, or the target has no room for an answer."""
        from ..decode.refusals import refuse_growing_rope
        from .loading import limited_length

        try:
            ids = prompt.render([], self.tokenizer)
        except Exception as error:  # templates may raise anything
            raise ValueError(f"the chat template fails: {error}") from error
        new = self.args.max_new_tokens
        if (room := limited_length(new, len(ids), self.target)) < new:
            raise ValueError(
                f"after its {len(ids)} tokens the target has positions for {room} new ones, not for "
                f"--max-new-tokens {new}; ask for fewer, or shorten it"
            )
        refuse_growing_rope(self.target, {}, len(ids), len(ids) + new)
        return ids


def _questions(args: argparse.Namespace) -> Iterator[tuple[Question, Prompt]]:
    """Yield for each line of the file what is written to the output, and the prompt to render."""
    from ..bench import Prompt, numbered_prompts

    for number, prompt in numbered_prompts(args.prompts):
        if len(prompt.turns) > 1:
            raise ValueError(
                f"{args.prompts}, line {number} has {len(prompt.turns)} turns, and one answer is written: put the "
                'earlier messages into {"messages": [...]}'
            )
        if not prompt.chat:
            yield {"prompt": prompt.turns[0]}, Prompt(prompt.turns, chat=args.chat)
        else:
            yield {"messages": [*prompt.history, {"role": "user", "content": prompt.turns[0]}]}, prompt


def _answer(one: Completion, ends: Any) -> dict[str, Any]:
    """Return the output line of an answer; ``cut``: it was cut off at the maximum length."""
    ends = ends if isinstance(ends, list) else [ends]
    counts = one.speculation and one.speculation.counts
    figures = {name: getattr(counts, name) for name in ("steps", "proposed", "accepted")} if counts else {}
    return {"text": one.text, "tokens": len(one.tokens), "cut": one.tokens[-1] not in ends, **figures}


def _print(new: int, before: int, path: Any, counts: Any) -> None:
    from ..progress import counted

    if before and not new:
        there = "the answer was" if before == 1 else f"all {before} answers were"
        print(f"{there} in {path} already", file=sys.stderr)
        return
    earlier = f", in addition to {before}" if before else ""
    summary = f"mean accepted length {counts.mean_accepted_length:.2f}, acceptance rate {counts.acceptance_rate:.1%}"
    were = f"{counted(new, 'answer')} {'was' if new == 1 else 'were'}"
    print(f"{were} written to {path}{earlier}: {summary}", file=sys.stderr)
