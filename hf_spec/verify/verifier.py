"""The verifier: from a proposal and the target's scores to the tokens that each sequence emits.

``generate`` and continuous batching use the same one. It chooses the rule, refuses logits that are not finite, moves
the result to the host once, and cuts it where a sequence stops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..device_tensors import cached_full, to_device
from ..drafts.base import AcceptedTokens
from ..proposal import Proposal
from ..sampling import draw, likeliest
from ..scoring.graphs import Compiler
from ..settings import SpeculationConfig
from .compiled import CompiledVerifier
from .result import HostResult, VerificationResult, read_table, result_table
from .rules import rule_for, verify_against_tokens, verify_target_samples

_LAST: Callable[[list[int]], int] = operator.itemgetter(-1)
# Tells how many of the emitted tokens of each sequence are kept: those after its end are not.
Cut = Callable[[list[list[int]]], list[int]]


class Scores(Protocol):
    """What a verifier asks of the target: raw logits, and scores after the user's processors.

    ``vectorized``: all nodes are processed at once, at hardly more cost than one. ``are_raw``: no processor changes
    the logits.
    """

    logits: Tensor  # (batch, nodes, vocab)
    vectorized: bool
    are_raw: bool

    def at(self, node: Tensor) -> Tensor:
        """Return the scores after one ``node`` (batch,) of each sequence, (batch, vocab) float32."""

    def at_root(self) -> Tensor:
        """Return the scores after the roots, (batch, vocab)."""

    def at_all_nodes(self) -> Tensor:
        """Return the scores after all nodes, (batch, nodes, vocab) float32."""

    def best_tokens(self) -> Tensor:
        """Return the token with the highest score after each node, (batch, nodes)."""

    def are_finite(self) -> Tensor:
        """Tell after which nodes the logits hold no nan and no inf, (batch, nodes) bool."""


class WarpedScores:
    """Scores at all nodes by one function of the ``logits`` (batch, nodes, vocab)."""

    vectorized = True
    are_raw = False

    def __init__(self, logits: Tensor, warp: Callable[[Tensor], Tensor]) -> None:
        self.logits = logits
        self._scores = warp(logits.float())  # (batch, nodes, vocab)

    def at(self, node: Tensor) -> Tensor:
        """Return the scores after one ``node`` (batch,) of each sequence, (batch, vocab)."""
        index = node[:, None, None].expand(-1, 1, self._scores.shape[-1])
        return self._scores.gather(1, index)[:, 0]

    def at_root(self) -> Tensor:
        """Return the scores after the roots, (batch, vocab)."""
        return self._scores[:, 0]

    def at_all_nodes(self) -> Tensor:
        """Return the scores after all nodes, (batch, nodes, vocab)."""
        return self._scores

    def best_tokens(self) -> Tensor:
        """Return the token with the highest score after each node, (batch, nodes)."""
        return likeliest(self._scores)

    def are_finite(self) -> Tensor:
        """Tell after which nodes the logits hold no nan and no inf, (batch, nodes) bool."""
        return self.logits.amax(-1) < float("inf")


@dataclass(frozen=True)
class StepResult:
    """What a step emits: ``tokens`` (rows, m) after the nodes ``path`` (rows, m), of which ``kept[b]`` count.

    For each row, ``emitted`` are the kept tokens and ``nodes`` what they follow; ``accepted`` of them were draft
    tokens. ``proposed`` counts the draft tokens, ``deepest`` those of the longest path. ``in_place``: the nodes are
    0, 1, 2, ... in every row, so that no key has to move. ``counts`` (rows,) is ``kept`` on the device, if known.
    """

    path: Tensor
    tokens: Tensor
    kept: list[int]
    emitted: list[list[int]]
    accepted: list[int]
    proposed: list[int]
    deepest: list[int]
    in_place: bool = False
    counts: Tensor | None = None
    nodes: Sequence[Sequence[int]] = ()

    def accepted_tokens(self, features: Tensor | None, rows: list[int], index: Tensor | None = None) -> AcceptedTokens:
        """Tell the drafter about ``rows``: each emitted token with the features of the node before it.

        ``index`` is the same on the device, ``None`` if these are all rows.
        """
        amounts, emitted = self.kept, self.emitted
        # A plain step has to be cheap.
        if index is None and self.counts is not None and self.tokens.shape[1] == 1:
            return AcceptedTokens(self.tokens, self.counts, features, amounts, emitted)
        if index is not None:
            amounts, emitted = [amounts[row] for row in rows], [emitted[row] for row in rows]
        width, device = max(amounts), self.tokens.device
        counts = self.counts if index is None or self.counts is None else self.counts[index]
        if counts is None and len(set(amounts)) == 1:
            counts = cached_full(width, len(rows), device)
        if counts is None:
            counts = to_device(amounts, device)
        tokens, path = self.tokens[:, :width], self.path[:, :width]
        if index is not None:
            tokens, path = tokens[index], path[index]
            features = None if features is None else features[index.to(features.device)]
        if features is not None and self.in_place:
            features = features[:, :width]
        elif features is not None:
            wide = path[:, :, None].expand(-1, -1, features.shape[2])
            features = features.gather(1, wide.to(features.device))  # (rows, width, features)
        return AcceptedTokens(tokens, counts, features, amounts, emitted)


class Verifier:
    """The rule of one call or engine, applied to the proposals of its steps; ``sample``: tokens are sampled."""

    def __init__(self, config: SpeculationConfig, sample: bool) -> None:
        self.config, self.sample, self.rule = config, sample, rule_for(config)
        self.lossy = self.rule.lossy if sample or self.rule.when_greedy else None
        self.compiled: CompiledVerifier | None = None

    @property
    def takes_samples(self) -> bool:
        """Tell whether sampled draft tokens help: otherwise the best ones are accepted most often."""
        return self.sample and self.rule.sampled is not None

    def compile(self, compiler: Compiler, nodes: int) -> None:
        """Verify sampled proposals of ``nodes`` nodes in a graph from here on."""
        if self.takes_samples and self.rule.sampled is not None:
            self.compiled = CompiledVerifier(compiler, nodes, self.rule.sampled)

    def __call__(self, proposal: Proposal, scores: Scores, cut: Cut) -> StepResult | None:
        """Verify ``proposal`` and keep what ``cut`` leaves of it: at least one token per sequence.

        ``None``: logits are not finite, and a draft token may have spoilt them. Score the roots alone then.
        """
        if proposal.max_depth == 0 and self.lossy is None and self.compiled is None:
            return self._plain_step(proposal, scores, cut)
        result, host = self._verify(proposal, scores)
        if not host.are_finite:
            return None
        _refuse_missing(host.tokens)
        kept = cut(host.tokens)
        counts: Tensor | None = result.counts
        emitted, accepted = host.tokens, host.proposed
        if proposal.max_depth:
            accepted = [min(count, len(tokens) - 1) for tokens, count in zip(emitted, kept, strict=True)]
        if kept != list(map(len, emitted)):
            counts, emitted = None, [tokens[:count] for tokens, count in zip(emitted, kept, strict=True)]
        sizes = host.proposed, host.longest, host.in_place
        return StepResult(result.path, result.tokens, kept, emitted, accepted, *sizes, counts, host.path)

    def _verify(self, proposal: Proposal, scores: Scores) -> tuple[VerificationResult, HostResult]:
        if self.compiled is not None and self.compiled.takes(proposal):
            processed = None if scores.are_raw else scores.at_all_nodes()
            result, table = self.compiled(proposal, scores.logits, processed)
        else:
            result = self._apply_rule(proposal, scores)
            # A plain step has no draft token to blame, so nobody looks at its logits.
            table = result_table(proposal, result, scores.are_finite() if proposal.max_depth else None)
        return result, read_table(proposal, result, table)

    def _apply_rule(self, proposal: Proposal, scores: Scores) -> VerificationResult:
        if self.lossy is not None:
            return self.lossy(proposal, scores.at_all_nodes().softmax(-1), self.config, self.sample)
        if proposal.max_depth == 0:
            return self._root_token(proposal, scores)
        if self.sample and self.rule.sampled is not None and proposal.q is not None:
            return self.rule.sampled(proposal, scores.at_all_nodes().softmax(-1))
        if self.sample and proposal.is_chain and scores.vectorized:  # all samples that could be asked for, at once
            return verify_against_tokens(proposal, draw(scores.at_all_nodes().softmax(-1)))
        if self.sample:
            return verify_target_samples(proposal, lambda node: draw(scores.at(node).softmax(-1)))
        if not scores.vectorized:  # costly: ask only at the nodes on the way
            return verify_target_samples(proposal, lambda node: scores.at(node).argmax(-1))
        return verify_against_tokens(proposal, scores.best_tokens())

    def _root_token(self, proposal: Proposal, scores: Scores) -> VerificationResult:
        """Emit one token after every root, where there is no draft token."""
        rows, device = proposal.tokens.shape[0], proposal.tokens.device
        at_root = scores.at_root()  # (rows, vocab)
        token = draw(at_root.float().softmax(-1)) if self.sample else likeliest(at_root)
        return VerificationResult(cached_full(0, rows, device)[:, None], token[:, None], cached_full(1, rows, device))

    def _plain_step(self, proposal: Proposal, scores: Scores, cut: Cut) -> StepResult:
        """Do as a call with draft tokens does, in fewer instructions: nothing can be rejected or spoilt."""
        root = self._root_token(proposal, scores)
        emitted: list[list[int]] = root.tokens.tolist()
        _refuse_missing(emitted)
        kept, none, nodes = cut(emitted), [0] * len(emitted), [[0]] * len(emitted)
        return StepResult(root.path, root.tokens, kept, emitted, none, none, none, True, root.counts, nodes)


def _refuse_missing(emitted: list[list[int]]) -> None:
    if min(map(_LAST, emitted)) < 0:
        raise RuntimeError(
            "no token can be drawn (plain generate fails there, too): a row's scores are all -inf, or one is nan. "
            "Look for a logits processor that leaves no token, or for logits that overflow."
        )
