"""The drafters of requests that come and go; those that can be joined draft together, as one batch."""

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
class Guess:
    """The proposal for one request: ``tokens`` and ``parents`` of the nodes, the root first.

    ``q`` (nodes with children, vocabulary) is the distribution that draft tokens were sampled from, as in a
    ``Proposal``. ``chosen`` marks the deterministic ones among them.
    """

    tokens: list[int]
    parents: list[int]
    is_chain: bool
    q: Tensor | None = None
    chosen: list[bool] | None = None

    @property
    def size(self) -> int:
        """Count the draft tokens."""
        return sum(parent >= 0 for parent in self.parents)

    @property
    def depth(self) -> int:
        """Return the length of the longest path."""
        if self.is_chain:
            return len(self.tokens) - 1
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return max(depths)

    def first(self, count: int) -> Guess:
        """Keep the first ``count`` nodes; they are a tree again, because parents come before their children."""
        chosen = None if self.chosen is None else self.chosen[:count]
        return Guess(self.tokens[:count], self.parents[:count], self.is_chain, self.q, chosen)


@dataclass(eq=False)
class Row:
    """The state of one request. ``request`` is the engine's own object; a request that restarts gets a new one.

    ``features`` are those of the part of the prompt that was read, (1, tokens, widths) each. ``unread`` tokens were
    emitted in ``steps`` steps, and no drafter was given them yet. ``guess`` is the proposal that is to be scored next.
    """

    name: str
    request: Any
    stats: SpeculationStats
    features: list[Tensor] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    unread_features: list[Tensor] = field(default_factory=list)  # (tokens, widths) each, of ``unread``
    steps: int = 0
    guess: Guess | None = None

    def tell(self, tokens: list[int], features: Tensor | None) -> None:
        """Keep the tokens that a step emitted for the next drafting; ``features`` are (tokens, widths)."""
        self.unread += tokens
        self.steps += 1
        if features is not None:
            self.unread_features.append(features)

    def asked(self, guess: Guess) -> None:
        """Note that the drafter has read all emitted tokens, and store what it proposes."""
        self.unread, self.unread_features, self.steps, self.guess = [], [], 0, guess


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
        """Draft at most ``limit`` deep for ``rows``, which all have unread tokens; tell whether one had a backlog.

        ``start`` makes the drafter of a row that has none, and ``ask`` lets a drafter propose. A drafter reads the new
        tokens of all its rows at once. If one of them was not in the last batch, for lack of space, it has no new
        tokens. Then the others wait for it and draft nothing this time.
        """
        known = set(self.rows)
        new = [row for row in rows if row not in known]
        for row in new:
            self._add(row, start)
        late = bool(new) or any(row.steps > 1 for row in rows)
        for drafter, together in self._groups:
            if all(row.unread for row in together):
                guesses = guesses_of(ask(drafter, together, accepted_of(together, self._device), limit))
                for row, guess in zip(together, guesses, strict=True):
                    row.asked(guess)
        return late

    def _add(self, row: Row, start: Callable[[Row], Drafter]) -> None:
        drafter = start(row)
        row.features = []
        for other, rows in self._groups:
            if other.join(drafter):
                rows.append(row)
                return
        self._groups.append((drafter, [row]))

    def keep(self, staying: Collection[Row]) -> None:
        """Drop all requests but ``staying`` from the drafters."""
        left = []
        for drafter, rows in self._groups:
            going_on = [i for i, row in enumerate(rows) if row in staying]
            if going_on and len(going_on) < len(rows):
                drafter.keep_rows(torch.tensor(going_on))
            if going_on:
                left.append((drafter, [rows[i] for i in going_on]))
        self._groups = left


def accepted_of(rows: Sequence[Row], device: torch.device) -> AcceptedTokens:
    """Batch the unread tokens of ``rows``, the shorter ones padded on the right."""
    unread = [row.unread for row in rows]
    counts = list(map(len, unread))
    counted = [[count, *new, *[0] * (max(counts) - count)] for count, new in zip(counts, unread, strict=True)]
    both = to_device(counted, device)  # (rows, 1 + tokens), in one transfer
    features = None
    if rows[0].unread_features:
        each = [torch.cat(row.unread_features) for row in rows]
        features = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)  # (rows, tokens, widths)
    return AcceptedTokens(both[:, 1:], both[:, 0], features, counts, unread)


def guesses_of(proposal: Proposal) -> list[Guess]:
    """Split a proposal into its rows; PAD_NODE nodes at the end are dropped."""
    both = torch.stack([proposal.tokens, proposal.parents], dim=1).tolist()  # in one transfer
    guesses = []
    for row, (tokens, parents) in enumerate(both):
        count = max(i for i, parent in enumerate(parents) if parent != PAD_NODE) + 1
        q = None if proposal.q is None else proposal.q[row]
        chosen = None if proposal.chosen is None else proposal.chosen[row, :count].tolist()
        guesses.append(Guess(tokens[:count], parents[:count], proposal.is_chain, q, chosen))
    return guesses


def proposal_of(guesses: Sequence[Guess], device: torch.device) -> Proposal:
    """Batch the proposals of single requests, the smaller ones padded with PAD_NODE nodes."""
    width = max(len(guess.tokens) for guess in guesses)
    both = torch.tensor(
        [
            [guess.tokens + [0] * (width - len(guess.tokens)) for guess in guesses],
            [guess.parents + [PAD_NODE] * (width - len(guess.parents)) for guess in guesses],
        ],
        device=device,
    )  # (2, rows, nodes)
    if width == 1:
        return Proposal.nothing(both[0, :, 0])
    is_chain = all(guess.is_chain for guess in guesses)
    depth = max(guess.depth for guess in guesses)
    return Proposal(
        both[0], both[1], depth, _stacked_q(guesses, width), is_chain, chosen=_stacked_chosen(guesses, width, device)
    )


def _stacked_chosen(guesses: Sequence[Guess], width: int, device: torch.device) -> Tensor | None:
    """Mark deterministic draft tokens among sampled ones, (rows, nodes) bool; ``None`` if there are none."""
    if all(guess.chosen is None for guess in guesses):
        return None
    rows = [guess.chosen or [False] * width for guess in guesses]
    return to_device([row + [False] * (width - len(row)) for row in rows], device)


def _stacked_q(guesses: Sequence[Guess], width: int) -> Tensor | None:
    """Return the distributions of all rows, (rows, nodes with children, vocabulary); zeros where none was sampled."""
    drawn = [guess.q for guess in guesses if guess.q is not None]
    if not drawn:
        return None
    nodes = min(width - 1, max(len(q) for q in drawn))
    stacked = drawn[0].new_zeros((len(guesses), nodes, drawn[0].shape[-1]))
    for row, guess in zip(stacked, guesses, strict=True):
        if guess.q is not None:
            count = min(nodes, len(guess.q))
            row[:count] = guess.q[:count]
    return stacked
