"""A neural draft and a memory together: what was written before is copied, what is new is guessed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ...counting import numbers_of, uploaded
from ...proposal import ABSENT, Proposal
from ...settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig, is_int
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator, network_of
from ..foresight import DRAFTED, Foresight
from ..lazy import LazyDrafter
from ..trust import TrackRecord, agreeing, mean_chances
from .recall import RECALLED, Guesses, Path, chances_of, judge, shortened
from .speculator import DEPTH, REMEMBERED, NgramSpeculator


class HybridSpeculator(Speculator):
    """Let a ``draft`` guess, and a ``memory`` wherever it knows better.

    In chains each row takes the guesses that are expected to be accepted further: the memory's, by their chances, or
    the draft's, by how far it came lately. A draft that no row wants is not asked. In trees the memory's likeliest
    guesses join the draft's as branches, on top of ``tree_nodes``. Every guess is verified as what it is, drawn or
    looked up: the text has the target's distribution.

    Args:
        draft: whatever ``generate`` takes as ``speculator``, but for ``"ngram"``.
        memory: a ``NgramSpeculator(remember=...)``; by default one of 100,000 tokens.
        draft_tokens: how many tokens deep the draft guesses at most, by default as deep as it does alone. Only
            ``num_speculative_tokens`` bounds the memory.

    Raises:
        ValueError, TypeError: for values outside these.
    """

    def __init__(self, draft: Any, memory: NgramSpeculator | None = None, draft_tokens: int | None = None) -> None:
        memory = NgramSpeculator(remember=REMEMBERED) if memory is None else memory
        if not isinstance(memory, NgramSpeculator) or memory.memory is None:
            raise TypeError(f"memory must be a NgramSpeculator(remember=...), got {memory!r:.80}")
        if isinstance(draft, NgramSpeculator | HybridSpeculator) or draft == "ngram":
            raise ValueError("a HybridSpeculator needs a draft with weights; what looks its guesses up works alone")
        if draft_tokens is not None and not (is_int(draft_tokens) and draft_tokens >= 1):
            raise ValueError(f"draft_tokens must be a whole number of at least 1, or None, got {draft_tokens!r}")
        self.draft, self.memory, self.draft_tokens = draft, memory, draft_tokens
        self.record = TrackRecord()

    def with_draft(self, draft: Speculator) -> HybridSpeculator:
        """Return one with another object for the same draft, that shares memory and experience."""
        if draft is self.draft:
            return self
        other = HybridSpeculator(draft, self.memory, self.draft_tokens)
        other.record = self.record
        return other

    def knows_chances(self, rows: int) -> bool:
        """Return True: the memory says how likely its guesses are."""
        return True

    @property
    def model(self) -> Any:
        """Return the weights of the draft."""
        return network_of(self.draft)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Say what the draft reads."""
        return self._draft.feature_layers(target)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError with cause and cure if draft or memory cannot serve ``target``."""
        self._draft.check(target, None if config is None else self._drafts_own(config))
        self.memory.check(target)

    def defaults(self) -> SpeculationConfig:
        """Return the draft's settings, with chains deep enough for a memory."""
        own = self._draft.defaults()
        return own if not isinstance(own.tree, str | None) else own.merge(num_speculative_tokens=DEPTH)

    def drafter(self, request: DraftContext) -> Drafter:
        """Index the prompts, and let the draft read them when it is first asked."""
        return HybridDrafter(self, request)

    def foresight(self, request: DraftContext) -> Foresight | None:
        """Make what ends the draft's chains where they are not worth their time, if somebody can tell."""
        if request.worth is None or not self._draft.heeds_foresight:
            return None
        return Foresight(request.worth, self.record, self.draft_depth)

    def start_draft(self, request: DraftContext, foresight: Foresight | None) -> LazyDrafter:
        """Make a drafter of the draft, which is told what became text when it is asked."""
        goes_on = None if foresight is None else foresight.goes_on
        own = replace(request, config=self._drafts_own(request.config), worth=None, goes_on=goes_on)
        return LazyDrafter(functools.partial(self._draft.drafter, own))

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Let both take in the texts of a finished call."""
        self._draft.learn(texts)
        self.memory.learn(texts)

    @property
    def draft_depth(self) -> int:
        """Say how deep the draft guesses at most."""
        own = self.draft_tokens or self._draft.defaults().num_speculative_tokens
        return own if isinstance(own, int) else DEFAULT_NUM_SPECULATIVE_TOKENS

    def _drafts_own(self, config: SpeculationConfig) -> SpeculationConfig:
        count = config.num_speculative_tokens
        if not isinstance(count, int) or not isinstance(config.tree, str | None):
            return config
        return config.merge(num_speculative_tokens=min(count, self.draft_depth))

    @property
    def _draft(self) -> Speculator:
        if not isinstance(self.draft, Speculator):
            raise TypeError("hf_spec.as_speculator(hybrid, target) reads the draft of a HybridSpeculator for a target")
        return self.draft


@dataclass(frozen=True)
class _Plan:
    """Which rows take the memory's chain, how deep at most, and how deep the draft guesses for the others."""

    taken: list[bool]
    depth: int
    draft_depth: int


@dataclass
class _Last:
    """What a step of a call guessed: the draft's chains, and per row the memory's, and whether it was ``taken``."""

    drafted: Proposal
    recalled: list[Guesses]
    taken: list[bool]

    def of(self, rows: Tensor) -> _Last:
        """Keep some rows."""
        tokens, parents = self.drafted.tokens[rows], self.drafted.parents[rows]
        some = numbers_of(rows)
        return _Last(
            replace(self.drafted, tokens=tokens, parents=parents, q=None),
            [self.recalled[row] for row in some],
            [self.taken[row] for row in some],
        )

    def beside(self, rows: int) -> _Last:
        """Put ``rows`` more below that guessed nothing."""
        more = (0, 0, 0, rows)
        tokens = functional.pad(self.drafted.tokens, more)
        parents = functional.pad(self.drafted.parents, more, value=ABSENT)
        nothing: list[Guesses] = [{} for _ in range(rows)]
        drafted = replace(self.drafted, tokens=tokens, parents=parents, q=None)
        return _Last(drafted, self.recalled + nothing, self.taken + [False] * rows)


class HybridDrafter(Drafter):
    """Ask the memory first, then the draft for the rows that want it."""

    def __init__(self, speculator: HybridSpeculator, request: DraftContext) -> None:
        self._rows = speculator.memory.texts(request).rows()
        self._foresight = speculator.foresight(request)
        self._draft, self._draft_depth = speculator.start_draft(request, self._foresight), speculator.draft_depth
        self._min_chance, self._trust = speculator.memory.min_chance, speculator.memory.trust
        self._worth, self._record = request.worth, speculator.record
        self._begun = False  # the draft has guessed
        self._is_chain = request.config.tree is None
        self._width = 1 if self._is_chain else request.config.tree_top_k
        self._last: _Last | None = None

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Take in ``accepted``, look up what may follow, and let the draft guess where that is not much."""
        for (texts, number), tokens in zip(self._rows, self._read(accepted), strict=True):
            texts.extend(number, tokens)
        self._last = None
        nodes = None if self._is_chain else limit
        found = [texts.guesses(number, limit, self._width, nodes, self._min_chance) for texts, number in self._rows]
        if self._is_chain:
            return self._chains(accepted, limit, found)
        proposal = self._draft.propose(accepted, min(limit, self._draft_depth))
        return with_branches(proposal, found)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self._rows = [self._rows[row] for row in numbers_of(rows)]
        self._draft.keep_rows(rows)
        self._last = None if self._last is None else self._last.of(rows)
        if self._foresight is not None:
            self._foresight.keep_rows(numbers_of(rows))

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, if the draft can; what those guessed last teaches nothing."""
        assert isinstance(other, HybridDrafter)
        if self._foresight is not None or other._foresight is not None:  # each knows the guesses of its own rows
            return False
        if not self._draft.join(other._draft):
            return False
        self._rows += other._rows
        self._last = None if self._last is None else self._last.beside(len(other._rows))
        return True

    def _chains(self, accepted: AcceptedTokens, limit: int, found: list[Guesses]) -> Proposal:
        # Decided before the draft is asked: what it draws must not decide whether it counts.
        plan = self._plan(limit, [chances_of(guesses, self._trust) for guesses in found])
        if self._foresight is not None:
            self._foresight.begin([not takes for takes in plan.taken], plan.draft_depth)
        drafted = self._draft.propose(accepted, plan.draft_depth)
        self.kind = DRAFTED if plan.draft_depth else RECALLED
        self.caught_up = plan.draft_depth > 0 and not self._begun
        self._begun |= plan.draft_depth > 0
        found = [
            shortened(paths, plan.depth) if takes else paths for paths, takes in zip(found, plan.taken, strict=True)
        ]
        self._last = _Last(drafted, found, plan.taken)
        chains = [max(guesses, key=len) if takes else None for guesses, takes in zip(found, plan.taken, strict=True)]
        return with_chains(drafted, chains)

    def _plan(self, limit: int, recalled: Sequence[Sequence[float]]) -> _Plan:
        """Decide who guesses, and how deep, from the chances of each row's ``recalled`` chain."""
        deepest = min(limit, self._draft_depth)
        drafted = self._record.of(deepest)
        taken = [sum(chances) >= sum(drafted) and bool(chances) for chances in recalled]
        if self._worth is None:
            return _Plan(taken, limit, 0 if all(taken) else deepest)
        rows = len(recalled)
        depth, speed = self._worth(rows, RECALLED, mean_chances(recalled))
        if not all(taken):
            together = [mine if takes else drafted for mine, takes in zip(recalled, taken, strict=True)]
            further, faster = self._worth(rows, DRAFTED, mean_chances(together))
            if faster > speed and further:
                return _Plan(taken, further, min(further, deepest) if self._foresight is None else deepest)
        return _Plan([depth > 0 and bool(chances) for chances in recalled], depth, 0)

    def _read(self, accepted: AcceptedTokens) -> list[list[int]]:
        """Bring what became text from its device, with the last guesses, in one transfer, and learn who was right."""
        last, width = self._last, 1 + accepted.tokens.shape[1]
        drafted = [] if last is None else [last.drafted.tokens[:, 1:], last.drafted.parents[:, 1:]]
        rows = torch.cat([accepted.counts[:, None], accepted.tokens, *drafted], dim=1).tolist()
        texts = [row[1 : 1 + row[0]] for row in rows]
        if last is not None:
            self._record.fade(asked=last.drafted.max_depth > 0)
            for row, (new, recalled, taken) in enumerate(zip(texts, last.recalled, last.taken, strict=True)):
                judge(self._trust, recalled, new, taken)
                if not taken:
                    self._learn(row, rows[row][width:], new)
        return texts

    def _learn(self, row: int, drafted: list[int], new: list[int]) -> None:
        """Compare what the draft said of a row, tokens and parents of its chain, with the ``new`` tokens."""
        guesses, parents = drafted[: len(drafted) // 2], drafted[len(drafted) // 2 :]
        depth = sum(parent != ABSENT for parent in parents)
        if depth:
            sure = [] if self._foresight is None else self._foresight.sure[row]
            self._record.learn(depth, agreeing(guesses[:depth], new[:-1]), sure)


def with_chains(proposal: Proposal, chains: Sequence[Path | None]) -> Proposal:
    """Put chosen ``chains`` in the place of what ``proposal``, of chains, guesses in those rows."""
    lengths = [0 if chain is None else len(chain) for chain in chains]
    if not any(lengths):
        return proposal
    width, before = max(proposal.max_depth, *lengths), proposal.tokens.shape[1] - 1
    rows = [[n, *(chain or ()), *[0] * (width - n)] for n, chain in zip(lengths, chains, strict=True)]
    table = uploaded(rows, proposal.tokens.device)  # (batch, 1 + width)
    taken, steps = table[:, :1] > 0, torch.arange(1 + width, device=table.device)
    parents = torch.where(steps > table[:, :1], ABSENT, steps - 1)
    guesses = torch.where(taken, table[:, 1:], functional.pad(proposal.tokens[:, 1:], (0, width - before)))
    parents = torch.where(taken, parents, functional.pad(proposal.parents, (0, width - before), value=ABSENT))
    tokens = torch.cat([proposal.root[:, None], guesses], dim=1)
    if proposal.q is None:
        return Proposal(tokens, parents, width, is_chain=True)
    q = functional.pad(proposal.q, (0, 0, 0, width - proposal.q.shape[1]))
    return Proposal(tokens, parents, width, q, is_chain=True, chosen=taken.expand_as(tokens))


def with_branches(proposal: Proposal, found: Sequence[Guesses]) -> Proposal:
    """Let the chosen paths in ``found`` join the trees of ``proposal``, behind what they share."""
    if not any(found):
        return proposal
    rows = torch.stack([proposal.tokens, proposal.parents], dim=1).tolist()
    trees = [_grown(tokens, parents, paths) for (tokens, parents), paths in zip(rows, found, strict=True)]
    nodes, before = max(len(tokens) for tokens, _ in trees), proposal.tokens.shape[1]
    table = [
        [[*tokens, *[0] * (nodes - len(tokens))], [*parents, *[ABSENT] * (nodes - len(parents))]]
        for tokens, parents in trees
    ]
    tokens, parents = uploaded(table, proposal.tokens.device).unbind(1)  # (batch, nodes)
    depth = max(proposal.max_depth, *(len(path) for paths in found for path in paths))
    if proposal.q is None:
        return Proposal(tokens, parents, depth)
    q = functional.pad(proposal.q, (0, 0, 0, nodes - proposal.q.shape[1]))
    chosen = (torch.arange(nodes, device=tokens.device) >= before).expand_as(tokens)
    return Proposal(tokens, parents, depth, q, chosen=chosen)


def _grown(tokens: list[int], parents: list[int], paths: Guesses) -> tuple[list[int], list[int]]:
    """Return the tokens and parents of a row's tree with the nodes of ``paths`` that it lacks behind its own."""
    tokens, parents = tokens[:], parents[:]
    known: dict[Path, int] = {(): 0}
    names: dict[int, Path] = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] in names:
            names[node] = (*names[parents[node]], tokens[node])
            known.setdefault(names[node], node)
    for path in paths:
        if path not in known:
            known[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(known[path[:-1]])
    return tokens, parents
