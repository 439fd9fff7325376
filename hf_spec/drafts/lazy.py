"""A drafter that is made, and told what became text, only when somebody wants guesses: ordinary steps ask no draft."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..counting import numbers_of
from ..proposal import Proposal
from .base import AcceptedTokens, Drafter, ask
from .foresight import DRAFTED, Foresight


class LazyDrafter(Drafter):
    """Put off the drafter that ``start`` makes, and what it has to read, until the next proposal of any depth.

    With ``foresight`` that says which steps are worth asking the drafter.
    """

    def __init__(self, start: Callable[[], Drafter], foresight: Foresight | None = None) -> None:
        self._foresight = foresight
        self._start = start
        self._drafter: Drafter | None = None
        self._rows: Tensor | None = None  # of those it will start with, which are still there; None: all of them
        self._unread: list[AcceptedTokens] = []

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Guess what follows ``accepted``, or keep it for later where ``limit`` is 0."""
        self._unread.append(accepted)
        late = self._drafter is None or len(self._unread) > 1
        if self._foresight is not None:
            self._foresight.became_text(accepted.emitted)
            limit = self._foresight.limit(len(accepted.tokens), limit)
        if limit == 0:
            self.caught_up = False
            return Proposal.nothing(accepted.root)
        unread, self._unread = AcceptedTokens.joined(self._unread), []
        drafter = self._begun()
        proposal = ask(drafter, unread, limit)
        self.kind, self.caught_up = drafter.kind, late or drafter.caught_up
        if self._foresight is not None:
            self.kind = DRAFTED
            self._foresight.proposed(proposal.tokens[:, 1:].tolist())
        return proposal

    def _begun(self) -> Drafter:
        if self._drafter is None:
            self._drafter = self._start()
            if self._rows is not None:
                self._drafter.keep_rows(self._rows)
        return self._drafter

    def join(self, other: Drafter) -> bool:
        """Let both drafters read what they have put off, and join them if they can be."""
        assert isinstance(other, LazyDrafter)
        if self._foresight is not None or other._foresight is not None:  # each knows the guesses of its own rows
            return False
        return self._up_to_date().join(other._up_to_date())

    def _up_to_date(self) -> Drafter:
        drafter = self._begun()
        if self._unread:
            drafter.propose(AcceptedTokens.joined(self._unread), 0)
            self._unread = []
        return drafter

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        if self._foresight is not None:
            self._foresight.keep_rows(numbers_of(rows))
        self._unread = [accepted.of(rows) for accepted in self._unread]
        if self._drafter is not None:
            self._drafter.keep_rows(rows)
        else:
            self._rows = rows if self._rows is None else self._rows[rows]
