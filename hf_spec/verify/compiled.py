"""Verification of sampled draft tokens as one graph, for targets that are compiled over a static cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_tensors import cached_arange
from ..proposal import Proposal
from ..sampling import uniform_noise
from ..scoring.graphs import Compiler, lasting
from ..scoring.rings import power_of_two
from .result import VerificationResult, result_table
from .rules import SampledRule


class CompiledVerifier:
    """A graph of ``rule`` for proposals of ``nodes`` nodes, the root included, that were sampled.

    Rows are filled up to a power of two, and the random numbers are drawn before, because a graph draws others.
    Deterministic draft tokens need some ten operators, fewer than it takes to start a graph.
    """

    def __init__(self, compiler: Compiler, nodes: int, rule: SampledRule) -> None:
        self.graphs = compiler.graphs
        self._compiler, self._nodes, self._rule = compiler, nodes, rule

    def takes(self, proposal: Proposal) -> bool:
        """Tell whether there is a graph for ``proposal``: of chains, for those of one length."""
        regular = proposal.is_unpadded or not proposal.is_chain
        return proposal.q is not None and regular and proposal.tokens.shape[1] == self._nodes

    def __call__(self, proposal: Proposal, logits: Tensor, scores: Tensor | None) -> tuple[VerificationResult, Tensor]:
        """Return the result, and its table.

        ``logits`` (batch, nodes, vocab) are the target's, ``scores`` float32 what processors made of them.
        """
        rows, rule = len(logits), self._rule
        noise = _fill_up(uniform_noise(proposal.tokens.shape, logits.device))
        processed = None if scores is None else _fill_up(scores)
        given = rule, proposal.map_tensors(_fill_up), _fill_up(logits), processed, noise
        result, table = self._compiler(_verify, rule, *given, keep=_lasting)
        path, tokens, counts = (part[:rows] for part in (result.path, result.tokens, result.counts))
        return VerificationResult(path, tokens, counts), table[:rows]


def _lasting(found: tuple[VerificationResult, Tensor]) -> tuple[VerificationResult, Tensor]:
    result, table = found
    return VerificationResult(*map(lasting, (result.path, result.tokens, result.counts))), lasting(table)


def _fill_up(states: Tensor) -> Tensor:
    """Fill ``states`` (rows, ...) up to 1, 2, 4, ... rows with the last one, laid out alike every time."""
    rows = len(states)
    if (size := power_of_two(rows)) > rows:
        return states.index_select(0, cached_arange(size, states.device).clamp(max=rows - 1))
    if states.is_contiguous() and states.dim() > 2:
        return states
    return states.clone(memory_format=torch.contiguous_format)  # a graph is made for each layout, of one row, too


def _verify(
    rule: SampledRule, proposal: Proposal, logits: Tensor, scores: Tensor | None, noise: Tensor
) -> tuple[VerificationResult, Tensor]:
    p = (logits.float() if scores is None else scores).softmax(-1)
    result = rule(proposal, p, noise)
    return result, result_table(proposal, result, logits.amax(-1) < torch.inf)
