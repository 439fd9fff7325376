"""The drafters of the requests of an engine. Drafters that can be joined draft together, as one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..device_tensors import to_device
from ..drafts.base import AcceptedTokens, Drafter
from ..metrics import SpeculationStats
from ..proposal import PAD_NODE, Proposal


@dataclass(eq=False)
class RequestProposal:
    """The proposal for one request: ``tokens`` and ``parents`` of the nodes, the root first.

    ``q`` (nodes with children, vocabulary) is the distribution that draft tokens were sampled from, as in a
    ``Proposal``. ``deterministic`` marks the nodes that were not sampled, where both kinds occur.
    """

    tokens: list[int]
    parents: list[int]
    is_chain: bool
    q: Tensor | None = None
    deterministic: list[bool] | None = None

    @property
    def size(self) -> int:
        """Return the number of draft tokens."""
        return len(self.tokens) - 1 if self.is_chain else sum(parent >= 0 for parent in self.parents)

    @property
    def depth(self) -> int:
        """Return the length of the longest path."""
        if self.is_chain:
            return len(self.tokens) - 1
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return max(depths)

    def truncate(self, count: int) -> RequestProposal:
        """Keep the first ``count`` nodes; they are a tree again, because parents come before their children."""
        if count >= len(self.tokens):
            return self
        deterministic = None if self.deterministic is None else self.deterministic[:count]
        return RequestProposal(self.tokens[:count], self.parents[:count], self.is_chain, self.q, deterministic)


@dataclass(eq=False)
class Row:
    """The state of one request. ``request`` is the engine's own object; a request that restarts gets a new one.

    ``features`` belong to the part of the prompt that was read, (1, tokens, widths) each. Of its new tokens a drafter
    has ``read`` so many; the others were emitted in ``steps`` steps. ``proposal`` is what the next step scores.
    """

    name: str
    request: Any
    stats: SpeculationStats
    features: list[Tensor] = field(default_factory=list)
    read: int = 0
    unread_features: list[Tensor] = field(default_factory=list)  # (tokens, widths) each, of ``unread``
    steps: int = 0
    proposal: RequestProposal | None = None

    @property
    def unread(self) -> list[int]:
        """Return the new tokens that no drafter has read."""
        tokens: list[int] = self.request.generated_tokens
        return tokens[self.read :]

    def store_proposal(self, proposal: RequestProposal) -> None:
        """Store a new proposal; its drafter has read all emitted tokens."""
        self.read, self.steps = len(self.request.generated_tokens), 0
        self.unread_features, self.proposal = [], proposal


class Drafters:
    """The drafters of all requests, one for each or joined into one for several."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: list[tuple[Drafter, list[Row]]] = []

    @property
    def rows(self) -> list[Row]:
        """List the requests that a drafter holds state for."""
        return [row for _, rows in self._groups for row in rows]

    def propose(
        self,
        rows: Sequence[Row],
        limit: int,
        start: Callable[[Row], Drafter],
        ask: Callable[[Drafter, list[Row], AcceptedTokens, int], Proposal],
    ) -> bool:
        """Draft at most ``limit`` deep for ``rows``, which all have unread tokens; return whether one had a backlog.

        ``start`` makes the drafter of a row that has none, and ``ask`` lets a drafter propose. A drafter reads the new
        tokens of all its rows at once. A row that was not in the last batch, for lack of space, has none. Then the
        other rows of its drafter draft nothing in this step.
        """
        known = set(self.rows)
        new = [row for row in rows if row not in known]
        for row in new:
            self._add(row, start)
        had_backlog = bool(new) or any(row.steps > 1 for row in rows)
        for drafter, together in self._groups:
            # A joined drafter has one draft KV cache, whose rows must grow together.
            if all(row.steps for row in together):
                proposals = split_proposal(ask(drafter, together, accepted_of(together, self._device), limit))
                for row, proposal in zip(together, proposals, strict=True):
                    row.store_proposal(proposal)
        return had_backlog

    def _add(self, row: Row, start: Callable[[Row], Drafter]) -> None:
        drafter = start(row)
        row.features = []
        for other, rows in self._groups:
            if other.join(drafter):
                rows.append(row)
                return
        self._groups.append((drafter, [row]))

    def keep(self, staying: Collection[Row]) -> None:
        """Remove all requests but ``staying`` from the drafters."""
        left = []
        for drafter, rows in self._groups:
            continuing = [i for i, row in enumerate(rows) if row in staying]
            if continuing and len(continuing) < len(rows):
                drafter.keep_rows(torch.tensor(continuing))
            if continuing:
                left.append((drafter, [rows[i] for i in continuing]))
        self._groups = left


def accepted_of(rows: Sequence[Row], device: torch.device) -> AcceptedTokens:
    """Batch the unread tokens of ``rows``, the shorter ones padded on the right."""
    unread = [row.unread for row in rows]
    counts = list(map(len, unread))
    padded = [[count, *new, *[0] * (max(counts) - count)] for count, new in zip(counts, unread, strict=True)]
    both = to_device(padded, device)  # (rows, 1 + tokens), in one transfer
    features = None
    if rows[0].unread_features:
        each = [torch.cat(row.unread_features) for row in rows]
        features = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)  # (rows, tokens, widths)
    return AcceptedTokens(both[:, 1:], both[:, 0], features, counts, unread)


def split_proposal(proposal: Proposal) -> list[RequestProposal]:
    """Split a proposal into its rows, without the PAD_NODE nodes at the end."""
    both = torch.stack([proposal.tokens, proposal.parents], dim=1).tolist()  # in one transfer
    proposals = []
    for row, (tokens, parents) in enumerate(both):
        count = len(parents)
        while parents[count - 1] == PAD_NODE:
            count -= 1
        q = None if proposal.q is None else proposal.q[row]
        deterministic = None if proposal.deterministic is None else proposal.deterministic[row, :count].tolist()
        proposals.append(RequestProposal(tokens[:count], parents[:count], proposal.is_chain, q, deterministic))
    return proposals


def join_proposals(proposals: Sequence[RequestProposal], device: torch.device) -> Proposal:
    """Batch the proposals of single requests, the smaller ones padded with PAD_NODE nodes."""
    width = max(len(one.tokens) for one in proposals)
    both = torch.tensor(
        [
            [one.tokens + [0] * (width - len(one.tokens)) for one in proposals],
            [one.parents + [PAD_NODE] * (width - len(one.parents)) for one in proposals],
        ],
        device=device,
    )  # (2, rows, nodes)
    if width == 1:
        return Proposal.nothing(both[0, :, 0])
    is_chain = all(one.is_chain for one in proposals)
    depth = max(one.depth for one in proposals)
    return Proposal(
        both[0],
        both[1],
        depth,
        _stack_q(proposals, width),
        is_chain,
        deterministic=_stack_deterministic(proposals, width, device),
    )


def _stack_deterministic(proposals: Sequence[RequestProposal], width: int, device: torch.device) -> Tensor | None:
    """Mark deterministic draft tokens among sampled ones, (rows, nodes) bool; ``None`` if there are none."""
    if all(one.deterministic is None for one in proposals):
        return None
    rows = [one.deterministic or [False] * width for one in proposals]
    return to_device([row + [False] * (width - len(row)) for row in rows], device)


def _stack_q(proposals: Sequence[RequestProposal], width: int) -> Tensor | None:
    """Return the distributions of all rows, (rows, nodes with children, vocabulary); zeros where none was sampled."""
    sampled = [one.q for one in proposals if one.q is not None]
    if not sampled:
        return None
    nodes = min(width - 1, max(len(q) for q in sampled))
    stacked = sampled[0].new_zeros((len(proposals), nodes, sampled[0].shape[-1]))
    for row, one in zip(stacked, proposals, strict=True):
        if one.q is not None:
            count = min(nodes, len(one.q))
            row[:count] = one.q[:count]
    return stacked
