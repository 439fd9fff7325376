"""Processed scores after the nodes of a proposal, computed only where they are needed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..device_tensors import cached_arange, to_device
from ..proposal import Proposal
from ..sampling import largest, likeliest
from .prefixes import Prefixes
from .processors import Processors
from .stopping import StopChecker


class NodeScores:
    """The processed scores after the nodes of a proposal, computed only where they are needed.

    ``logits`` (batch, nodes, vocab) are the target's, raw. ``text`` (batch, capacity) ends with the root of each row
    at ``lengths[b] - 1``; stateless processors do not need it. ``rows`` are the positions of these rows in the batch
    that ``generate`` was called with. ``stops``: after a draft token that ends the sequence no processor is called.
    Not for a list in lockstep.

    Use ``best_tokens`` for greedy decoding and ``at_root`` for a plain step. Use ``at_all_nodes`` for rules that need
    every distribution, and ``at`` for those that go through the tree node by node.
    """

    def __init__(
        self,
        processors: Processors,
        logits: Tensor,
        proposal: Proposal,
        text: Tensor | None,
        lengths: list[int],
        rows: list[int],
        stops: StopChecker | None = None,
    ) -> None:
        self._processors = processors
        self.logits = logits
        self._proposal = proposal
        self._text = text
        self._lengths = lengths
        self._rows = rows
        self._stops = stops
        self._is_plain = proposal.max_depth == 0
        self.vectorized, self.are_raw = processors.vectorized, processors.is_empty

    def at(self, node: Tensor) -> Tensor:
        """Return the scores at one ``node`` (batch,) per row: (batch, vocab) float32."""
        row = cached_arange(len(node), node.device)
        if self._processors.vectorized and not self._processors.stateless:
            return self._scores_after_ends[row, node]
        return self._score(row, node)

    def at_root(self) -> Tensor:
        """Return the scores after the roots, (batch, vocab): float32, or the raw logits if there is no processor."""
        logits = self.logits[:, 0]
        if self._processors.is_empty:
            return logits
        if self._processors.stateless:
            return self._processors.warp(logits.float(), self._is_plain)
        if self._processors.vectorized:
            prefixes = self._prefixes(self._text_so_far, self._text_lengths, 0)
            return self._processors.at_once(logits.float(), prefixes, self._is_plain)
        return self.at(torch.zeros_like(self._proposal.root))

    def best_tokens(self) -> Tensor:
        """Return the token with the highest score at every node, (batch, nodes)."""
        if self._processors.is_empty:  # saves the float32 copy
            return self._largest[1]
        return likeliest(self._at_all_nodes if self._processors.vectorized else self.at_all_nodes())

    def are_finite(self) -> Tensor:
        """Tell at which nodes the logits hold no nan and no inf, (batch, nodes) bool.

        A draft token whose forward overflows spoils the other nodes: attention gives it no weight, but 0 * nan is nan.
        """
        known = vars(self).get("_largest")  # where the best tokens were asked for; else the maxima alone are quicker
        return (self.logits.amax(-1) if known is None else known[0]) < torch.inf

    @functools.cached_property
    def _largest(self) -> tuple[Tensor, Tensor]:
        return largest(self.logits)

    def at_all_nodes(self) -> Tensor:
        """Return the scores at all nodes: (batch, nodes, vocab) float32.

        Some nodes cannot be reached: PAD_NODE ones, and those with a token on their path that has probability zero or
        ends the sequence. They hold zeros or what processors make of them. A processor that is not built in never sees
        a prefix that the target could not have emitted and continued.
        """
        if self._processors.vectorized:
            return self._scores_after_ends
        present = self._proposal.present
        scores = torch.zeros_like(self.logits, dtype=torch.float32)  # (batch, nodes, vocab)
        reachable = torch.zeros_like(present)
        for end in sorted(set(self._ends[present].tolist())):  # parents first: their prefix is shorter
            batch, node = (present & (self._ends == end)).nonzero(as_tuple=True)
            possible = self._is_possible(scores, reachable, batch, node)
            batch, node = batch[possible], node[possible]
            reachable[batch, node] = True
            scores[batch, node] = self._score(batch, node)
        return scores

    @functools.cached_property
    def _at_all_nodes(self) -> Tensor:
        scores = self.logits.float()
        if not self._proposal.is_unpadded:
            scores = scores.masked_fill(~self._proposal.present[:, :, None], 0.0)
        flat = scores.flatten(0, 1)
        if self._processors.stateless:
            return self._processors.warp(flat, self._is_plain).view(scores.shape)
        nodes, depth = scores.shape[1], self._proposal.max_depth
        text, spill = self._text_so_far, max(self._lengths) + depth
        text = torch.nn.functional.pad(text, (0, spill + 1 - text.shape[1]))
        drafted = self._proposal.ancestors & (cached_arange(nodes, text.device) > 0)  # the root is in the text
        # Each node's copy of the text gets the node's ancestors; all other nodes are written to a spare column.
        column = torch.where(drafted, self._ends[:, None] - 1, spill)
        draft_tokens = self._proposal.tokens[:, None].expand(-1, nodes, -1)
        tokens = text[:, None].expand(-1, nodes, -1).scatter(2, column, draft_tokens)[:, :, :spill]
        prefixes = self._prefixes(tokens.flatten(0, 1), self._ends.flatten(), depth)
        return self._processors.at_once(flat, prefixes, self._is_plain).view(scores.shape)

    @functools.cached_property
    def _scores_after_ends(self) -> Tensor:
        """Return zeros after an end: processors may set all scores to -inf there, whose softmax is nan."""
        scores, stops = self._at_all_nodes, self._stops
        if stops is None or self._processors.stateless:
            return scores
        if stops.reads_text and bool((scores.amax(-1) == -torch.inf).any()):  # only then: reading the texts is slow
            return scores.masked_fill(self._ended[:, :, None], 0.0)
        return scores.masked_fill(self._after(self._are_last)[:, :, None], 0.0) if stops.last_tokens else scores

    def _prefixes(self, tokens: Tensor, lengths: Tensor, depth: int) -> Prefixes:
        """Build the prefixes of nodes that are at most ``depth`` deep from ``tokens`` (batch * nodes, n)."""
        shortest, longest, nodes = min(self._lengths), max(self._lengths) + depth, len(lengths) // len(self._rows)
        rows = self._rows_on_device.repeat_interleave(nodes)
        return Prefixes(tokens, lengths, rows, shortest, longest)

    @functools.cached_property
    def _rows_on_device(self) -> Tensor:
        if self._rows == list(range(len(self._rows))):
            return cached_arange(len(self._rows), self.logits.device)
        return to_device(self._rows, self.logits.device)

    @property
    def _text_so_far(self) -> Tensor:
        assert self._text is not None
        return self._text[:, : max(self._lengths)]

    @functools.cached_property
    def _text_lengths(self) -> Tensor:
        device = self.logits.device
        if len(set(self._lengths)) == 1:
            return cached_arange(1, device, self._lengths[0]).expand(len(self._lengths))
        return to_device(self._lengths, device)

    @functools.cached_property
    def _ends(self) -> Tensor:
        """Return the length of each node's prefix, the node included: (batch, nodes)."""
        return self._text_lengths[:, None] + self._proposal.depth

    @functools.cached_property
    def _ended(self) -> Tensor:
        """Tell which nodes are draft tokens that end their sequence, or come after one: (batch, nodes) bool."""
        ends, stops = self._are_last, self._stops
        if stops is not None and stops.reads_text:
            batch, node = (self._proposal.present & (self._proposal.depth > 0)).nonzero(as_tuple=True)
            complete = stops.completes_string(self._prefixes_at(batch, node), self._ends[batch, node].tolist())
            ends[batch, node] |= torch.tensor(complete, dtype=torch.bool, device=ends.device)
        return self._after(ends)

    @property
    def _are_last(self) -> Tensor:
        """Tell which draft tokens end their sequence: (batch, nodes) bool."""
        tokens = self._proposal.tokens
        if self._stops is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        ends = self._stops.are_last(tokens)
        ends[:, 0] = False  # the root is emitted already, and its sequence goes on
        return ends

    def _after(self, ends: Tensor) -> Tensor:
        return (self._proposal.ancestors & ends[:, None]).any(-1)

    def _is_possible(self, scores: Tensor, reachable: Tensor, batch: Tensor, node: Tensor) -> Tensor:
        """Tell which pairs (batch, node) have a reachable parent that gives them a probability: (pairs,) bool."""
        parent = self._proposal.parents[batch, node]
        distribution = scores[batch, parent]  # (pairs, vocab); a root's parent is -1: what is read there is not used
        own = distribution.gather(1, self._proposal.tokens[batch, node][:, None])[:, 0]
        # Scores that are all -inf give nan here, which is not 0: greedy decoding goes on with token 0 there.
        probability = torch.exp(own - distribution.amax(1))
        return (parent < 0) | (reachable[batch, parent] & (probability != 0))

    def _score(self, batch: Tensor, node: Tensor) -> Tensor:
        """Process the logits of the pairs (batch, node): (pairs, vocab)."""
        logits = self.logits[batch, node].float()
        if self._processors.stateless:
            return self._processors.warp(logits, self._is_plain)
        goes_on = ~self._ended[batch, node]
        scores = torch.zeros_like(logits)
        scores[goes_on] = self._with_prefix(logits[goes_on], batch[goes_on], node[goes_on])
        return scores

    def _with_prefix(self, logits: Tensor, batch: Tensor, node: Tensor) -> Tensor:
        """Process float32 ``logits`` (pairs, vocab) at the pairs (batch, node), each after its own prefix."""
        rows, tokens = [self._rows[b] for b in batch.tolist()], self._prefixes_at(batch, node)
        lengths = self._ends[batch, node].tolist()
        return self._processors.scores_at(logits, tokens, lengths, rows, self._is_plain)

    def _prefixes_at(self, batch: Tensor, node: Tensor) -> Tensor:
        """Return the prefixes of the pairs (batch, node), right-padded: (pairs, longest)."""
        assert self._text is not None
        proposal, longest = self._proposal, max(self._lengths)
        spill = longest + proposal.max_depth
        drafted = proposal.ancestors[batch, node]  # (pairs, nodes)
        drafted[:, 0] = False  # the root is in the text, or nowhere if the prompt is empty
        column = (self._ends[batch] - 1).masked_fill(~drafted, spill)
        tokens = self._text.new_zeros((len(batch), spill + 1))
        tokens[:, :longest] = self._text[batch, :longest]
        return tokens.scatter_(1, column, proposal.tokens[batch])
