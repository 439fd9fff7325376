"""How many guesses are worth their time, where a drafter can tell from the text how likely they are to come true.

``pace`` learns how often guesses of a depth are accepted, in whatever place of the text. A drafter that knows more,
such as how often the end of the text was written before, asks here in every step. Steps of another ``kind`` take
another time, and what was measured of each kind says which promises most tokens per second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from .experience import PLAIN_MARGIN, Experience, careful

PLAIN = ""  # the kind of steps without a guess
TRIES = 1 / 128  # of the time, that tries of each kind may cost


class Worth:
    """Weigh guesses by their chances against what steps took; ``experience_of`` a kind is shared by calls.

    ``waits``: the batch ends with its slowest row, see ``Pace``.
    """

    def __init__(self, experience_of: Callable[[str], Experience], waits: bool = True) -> None:
        self._experience_of, self._waits = experience_of, waits
        self._kinds = {PLAIN: experience_of(PLAIN)}

    def __call__(self, rows: int, kind: str, chances: Sequence[float]) -> tuple[int, float]:
        """Return how deep a step of this ``kind`` should guess, and how many tokens per second of a row that promises.

        ``chances`` are those of a guess of each depth to become text, on average over ``rows``. What has not been
        measured for long promises infinitely many: it is tried.
        """
        plain = self._kinds[PLAIN]
        own = self._kinds.setdefault(kind, self._experience_of(kind))
        ordinary, times = plain.times(rows).get(0), own.times(rows)
        if chances and not times:
            return min(len(chances), careful(rows)), math.inf
        if ordinary is None or plain.idle > ordinary / TRIES:
            return 0, math.inf
        speeds = [1 / ordinary]
        if chances:
            start, slope = own.line(rows, ordinary)
            apart = own.apart(rows) if self._waits else 1.0
            tokens = itertools.accumulate(chances, initial=1.0)
            speeds += [apart * count / (start + slope * depth) for depth, count in enumerate(tokens) if depth]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if best and speeds[best] < PLAIN_MARGIN * speeds[0]:
            best = 0
        deepest = max(times, default=0)
        if best == 0 and chances and own.idle > times[deepest] / TRIES:
            return max(1, min(len(chances), deepest)), math.inf
        return best, speeds[best]

    def stepped(self, rows: int, kind: str, depth: int, seconds: float | None) -> None:
        """Note that a step of this ``kind`` guessed ``depth`` deep, in so many ``seconds`` if they are usual ones."""
        if seconds is None:
            return
        taken = self._kinds.setdefault(kind, self._experience_of(kind)) if depth else self._kinds[PLAIN]
        taken.measured(rows, depth, seconds)
        for one in self._kinds.values():
            one.idle = 0.0 if one is taken else one.idle + seconds
