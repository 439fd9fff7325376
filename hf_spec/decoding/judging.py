"""Judge a proposal: which guesses become text, and all that the host has to know of it in one table.

Over a static cache that is one function of tensors of fixed shape, which torch.compile makes one graph of: the
``CompiledJudge`` fills rows up to seats and throws the coins beforehand.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..counting import numbers
from ..proposal import ABSENT, Proposal
from ..sampling import coins
from ..scoring.graphs import Compiler, lasting
from ..scoring.rings import power_of_two
from .verification import Verdict, Weigh


def table_of(proposal: Proposal, verdict: Verdict, sound: Tensor | None) -> Tensor:
    """Put what ``figures_of`` reads side by side, (batch, columns), so that the device is asked once.

    ``sound`` (batch, nodes) tells where the logits hold no nan and no inf; ``None`` where there is no guess to blame.
    """
    if sound is None:
        return verdict.tokens
    parts = [verdict.counts[:, None], verdict.tokens, sound]
    if not proposal.is_whole:
        parts.append(proposal.parents)
    if not proposal.is_chain:
        parts += [verdict.path, proposal.depth]
    return torch.cat(parts, dim=1)


class Figures(NamedTuple):
    """What the device says of the rows: the ``tokens`` of each, how many ``guesses`` and how deep they went.

    And of all rows together: whether the logits are sound, and whether the accepted nodes are 0, 1, 2, ...
    """

    tokens: list[list[int]]
    guesses: list[int]
    deepest: list[int]
    are_sound: bool
    in_place: bool


def figures_of(proposal: Proposal, verdict: Verdict, table: Tensor) -> Figures:
    """Ask the device for the ``table`` of a verdict, and read it."""
    if proposal.max_depth == 0:
        none = [0] * table.shape[0]
        return Figures(table.tolist(), none, none, are_sound=True, in_place=True)
    nodes, steps = proposal.tokens.shape[1], verdict.tokens.shape[1]
    widths = [1, steps, nodes] + [nodes] * (not proposal.is_whole) + [steps, nodes] * (not proposal.is_chain)
    ends = list(itertools.accumulate(widths))
    slices = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
    rows = [_figures_of_row(proposal, [row[part] for part in slices]) for row in table.tolist()]
    tokens, guesses, deepest, sound, in_place = map(list, zip(*rows, strict=True))
    return Figures(tokens, guesses, deepest, all(sound), all(in_place))


def _figures_of_row(proposal: Proposal, parts: list[list[int]]) -> tuple[list[int], int, int, bool, bool]:
    [count], tokens, sound, *parts = parts
    present = [parent != ABSENT for parent in parts.pop(0)] if not proposal.is_whole else [True] * len(sound)
    path, depth = (list(range(len(tokens))), list(range(len(sound)))) if proposal.is_chain else parts
    return (
        tokens[:count],
        sum(present) - 1,
        max(itertools.compress(depth, present)),
        all(itertools.compress(sound, present)),
        path[:count] == list(range(count)),
    )


class CompiledJudge:
    """Weigh guesses that were drawn, in whole proposals of ``nodes`` nodes with the root, by the rule ``weigh``.

    Guesses that are looked up need some ten operators, fewer than it takes to start a graph.
    """

    def __init__(self, compiler: Compiler, nodes: int, weigh: Weigh) -> None:
        self.graphs = compiler.graphs
        self._compiler, self._nodes, self._weigh = compiler, nodes, weigh

    def takes(self, proposal: Proposal) -> bool:
        """Tell whether ``proposal`` is one of those that there are graphs for: of chains, those of one length."""
        regular = proposal.is_whole or not proposal.is_chain
        return proposal.q is not None and regular and proposal.tokens.shape[1] == self._nodes

    def __call__(self, proposal: Proposal, logits: Tensor, scores: Tensor | None) -> tuple[Verdict, Tensor]:
        """Return the verdict, and its table.

        ``logits`` (batch, nodes, vocabulary) are the target's, ``scores`` float32 what processors made of them.
        """
        rows, weigh = len(logits), self._weigh
        coin = _in_seats(coins(proposal.tokens.shape, logits.device))
        processed = None if scores is None else _in_seats(scores)
        given = weigh, proposal.each(_in_seats), _in_seats(logits), processed, coin
        verdict, table = self._compiler(_judged, weigh, *given)
        path, tokens, counts = (lasting(part[:rows]) for part in (verdict.path, verdict.tokens, verdict.counts))
        return Verdict(path, tokens, counts), table[:rows]


def _in_seats(states: Tensor) -> Tensor:
    """Fill ``states`` (rows, ...) up to 1, 2, 4, ... rows with the last one, laid out alike every time."""
    rows = len(states)
    if (seats := power_of_two(rows)) > rows:
        return states.index_select(0, numbers(seats, states.device).clamp(max=rows - 1))
    if states.is_contiguous() and states.dim() > 2:
        return states
    return states.clone(memory_format=torch.contiguous_format)  # a graph is made for each layout, of one row, too


def _judged(
    weigh: Weigh, proposal: Proposal, logits: Tensor, scores: Tensor | None, coin: Tensor
) -> tuple[Verdict, Tensor]:
    p = (logits.float() if scores is None else scores).softmax(-1)
    verdict = weigh(proposal, p, coin)
    return verdict, table_of(proposal, verdict, logits.amax(-1) < torch.inf)
