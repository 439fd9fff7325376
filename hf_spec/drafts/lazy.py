"""Lazy drafter: plain steps only buffer accepted tokens; the draft runs when draft tokens are needed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..policy.base import MAX_LENGTH, DraftLengthPolicy, DraftSource
from ..proposal import Proposal
from .base import AcceptedTokens, Drafter, ask


class LazyDrafter(Drafter):
    """A drafter that ``start`` makes when a step first needs draft tokens.

    ``policy`` is asked how many, once for as many plain steps as it says; ``source`` is what the step counts as there.
    """

    def __init__(
        self, start: Callable[[], Drafter], policy: DraftLengthPolicy, source: DraftSource = DraftSource.MODEL
    ) -> None:
        self._start: Callable[[], Drafter] | None = start
        self._policy, self._source = policy, source
        self._drafter: Drafter | None = None
        self._rows: Tensor | None = None  # of those it will start with, which are still there; None: all of them
        self._unread: list[AcceptedTokens] = []
        self._plain_steps = 0  # that are planned already, for the rows there are

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Draft what follows ``accepted``, or buffer it in a plain step."""
        self._unread.append(accepted)
        if self._plain_steps:
            self._plain_steps -= 1
            return Proposal.nothing(accepted.root)
        rows, longest = len(accepted.tokens), min(limit, self._policy.longest, MAX_LENGTH)
        plan = self._policy.plan(rows, [self._policy.acceptance.estimate(self._source, rows, longest)])
        limit = min(limit, plan.model_length)
        had_backlog = self._drafter is None or len(self._unread) > 1
        if limit == 0:
            self.had_backlog, self._plain_steps = False, plan.plain_steps - 1
            return Proposal.nothing(accepted.root)
        unread, self._unread = AcceptedTokens.joined(self._unread), []
        drafter = self._begun()
        proposal = ask(drafter, unread, limit)
        self.had_backlog = had_backlog or drafter.had_backlog
        return proposal

    def _begun(self) -> Drafter:
        if self._drafter is None:
            assert self._start is not None
            self._drafter, self._start = self._start(), None  # it holds the features of the prompt
            if self._rows is not None:
                self._drafter.keep_rows(self._rows)
        return self._drafter

    def join(self, other: Drafter) -> bool:
        """Let both drafters read what they have buffered, and join them if they can be."""
        assert isinstance(other, LazyDrafter)
        return self._up_to_date().join(other._up_to_date())

    def _up_to_date(self) -> Drafter:
        drafter = self._begun()
        if self._unread:
            drafter.propose(AcceptedTokens.joined(self._unread), 0)
            self._unread = []
        return drafter

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self._plain_steps = 0
        self._unread = [accepted.of(rows) for accepted in self._unread]
        if self._drafter is not None:
            self._drafter.keep_rows(rows)
        else:
            self._rows = rows if self._rows is None else self._rows[rows]
