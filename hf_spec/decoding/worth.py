"""How many guesses are worth their time, where a drafter can tell from the text how likely they are to come true.

``pace`` learns how often guesses of a depth are accepted, in whatever place of the text. A drafter that knows more,
such as how often the end of the text was written before, asks here in every step. Steps of another ``kind`` take
another time, and what was measured of each kind says which promises most tokens per second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from .experience import DEEPEST, PLAIN_MARGIN, Experience, careful

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
        plain, own, chances = self._kinds[PLAIN], self._of(kind), chances[:DEEPEST]
        ordinary = plain.times(rows).get(0)
        seconds = own.curve(rows, ordinary or 0.0)
        if chances and not seconds:
            return min(len(chances), careful(rows)), math.inf
        if ordinary is None or plain.idle > ordinary / TRIES:
            return 0, math.inf
        best, fastest = 0, 1 / ordinary
        apart = own.apart(rows) if self._waits else 1.0
        for depth, tokens in enumerate(itertools.accumulate(chances, initial=1.0)):
            if depth and (speed := apart * tokens / seconds[depth]) > max(fastest, PLAIN_MARGIN / ordinary):
                best, fastest = depth, speed
        usual = min(len(chances), own.deepest(rows))
        if best == 0 and usual and own.idle > seconds[usual] / TRIES:
            return usual, math.inf
        return best, fastest

    def stepped(self, rows: int, kind: str, depth: int, seconds: float | None) -> None:
        """Note that a step of this ``kind`` guessed ``depth`` deep, in so many ``seconds`` if they are usual ones."""
        if seconds is None:
            return
        taken = self._of(kind if depth else PLAIN)
        taken.measured(rows, depth, seconds)
        for one in self._kinds.values():
            one.idle = 0.0 if one is taken else one.idle + seconds

    def _of(self, kind: str) -> Experience:
        if kind not in self._kinds:
            self._kinds[kind] = self._experience_of(kind)
        return self._kinds[kind]
