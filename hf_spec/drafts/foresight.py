"""Whether another guess is worth its time, decided guess by guess from how sure the draft is of its own.

How sure a draft is says much of how often it is right, token by token (EAGLE-2, arXiv 2406.16858, section 3.2). So a
chain goes on behind likely guesses and ends behind unlikely ones, and a step that promises nothing asks no draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .base import Worth
from .trust import GUESSED, TrackRecord, agreeing, mean_chances

DRAFTED = "drafted"  # the kind of steps in which a draft is asked


class Foresight:
    """Bound the chains of one call, and learn from what became of them.

    ``record`` is shared by the calls of a draft. ``first`` is how deep a chain goes while nothing was measured.
    """

    def __init__(self, worth: Worth, record: TrackRecord, first: int) -> None:
        self.record = record
        self._worth, self._first = worth, first
        self._limit = 0
        self._counts: list[bool] = []  # the rows that will take the draft's guesses
        self._chances: list[list[float]] = []  # of each guess so far, by row
        self.sure: list[list[float]] = []  # the draft's own probability of each, by row
        self._guesses: list[list[int]] = []  # by row

    def limit(self, rows: int, limit: int) -> int:
        """Return how deep ``rows`` rows should guess at most, 0 for not at all."""
        depth, speed = self._worth(rows, DRAFTED, self.record.of(limit))
        if depth:
            self.begin([True] * rows, min(limit, self._first) if math.isinf(speed) else limit)
        return self._limit if depth else 0

    def begin(self, counts: list[bool], limit: int) -> None:
        """Begin chains of at most ``limit`` guesses, of which some rows do not count."""
        self._counts, self._limit = counts, limit
        self._chances, self.sure = [[] for _ in counts], [[] for _ in counts]

    def goes_on(self, sure: Tensor) -> bool:
        """Tell whether another guess is worth its time behind those of which the draft is ``sure`` (rows,), 0 to 1.

        How sure it is of a guess must not depend on which one was drawn.
        """
        for chances, kept, own in zip(self._chances, self.sure, sure.tolist(), strict=True):
            chances.append((chances[-1] if chances else 1.0) * self.record.trust.of(own))
            kept.append(own)
        so_far = mean_chances(some if counts else () for some, counts in zip(self._chances, self._counts, strict=True))
        further = self._limit - len(so_far)
        rest = [so_far[-1] * GUESSED**more for more in range(1, 1 + further)]
        depth, _ = self._worth(len(self._counts), DRAFTED, so_far + rest)
        return depth > len(so_far)

    def proposed(self, guesses: list[list[int]]) -> None:
        """Note what each row guessed in the end."""
        self._guesses = guesses

    def became_text(self, texts: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens of each row that became text since."""
        self.record.fade(asked=bool(self._guesses))
        for row, (guesses, new) in enumerate(zip(self._guesses, texts, strict=bool(self._guesses))):
            if guesses:  # the last one of the new tokens was none of them
                self.record.learn(len(guesses), agreeing(guesses, new[:-1]), self.sure[row])
        self._guesses, self.sure = [], []

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with ``rows`` only."""
        self._guesses = [self._guesses[row] for row in rows] if self._guesses else []
        self.sure = [self.sure[row] for row in rows] if self.sure else []
