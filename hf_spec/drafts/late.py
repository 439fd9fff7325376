"""A drafter that is made, and told what became text, only when somebody wants guesses: ordinary steps ask no draft."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..proposal import Proposal
from .base import Drafter, News


class LateDrafter(Drafter):
    """Put off the drafter that ``start`` makes, and what it has to read, until the next proposal of any depth.

    ``caught_up`` tells whether the last proposal had to make up for that, and so took longer than usual.
    """

    def __init__(self, start: Callable[[], Drafter]) -> None:
        self.caught_up = False
        self._start = start
        self._drafter: Drafter | None = None
        self._rows: Tensor | None = None  # of those it will start with, which are still there; None: all of them
        self._unread: list[News] = []

    def propose(self, news: News, limit: int) -> Proposal:
        """Guess what follows ``news``, or keep them for later where ``limit`` is 0."""
        self._unread.append(news)
        self.caught_up = limit > 0 and (self._drafter is None or len(self._unread) > 1)
        if limit == 0:
            return Proposal.nothing(news.root)
        if self._drafter is None:
            self._drafter = self._start()
            if self._rows is not None:
                self._drafter.keep_rows(self._rows)
        unread, self._unread = News.joined(self._unread), []
        return self._drafter.propose(unread, limit)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self._unread = [news.of(rows) for news in self._unread]
        if self._drafter is not None:
            self._drafter.keep_rows(rows)
        else:
            self._rows = rows if self._rows is None else self._rows[rows]
