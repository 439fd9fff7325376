"""How right the chances of a memory's guesses are: what was thought likely is compared with what became text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from .recall import Path

Guesses = dict[Path, float]  # paths, each behind its beginnings, and their chances

RECALLED = "recalled"  # the kind of steps in which nobody guesses but the memory
LEVELS = 8  # of chances, each with its own record
FADE = 0.995  # what a guess weighs after one more of its level
CAUTION = 5.0  # guesses of a level that came true as often as was thought, before there was one


class Trust:
    """Correct chances by how often guesses that were thought as likely came true lately."""

    def __init__(self) -> None:
        self._expected = [0.0] * LEVELS
        self._right = [0.0] * LEVELS

    def learn(self, chances: Sequence[float], right: int) -> None:
        """Note that of guesses behind each other, which had these ``chances``, so many were ``right``."""
        for place, chance in enumerate(chances):
            level = _level(chance)
            self._expected[level] = FADE * self._expected[level] + chance
            self._right[level] = FADE * self._right[level] + (place < right)

    def judge(self, guesses: Guesses, new: Sequence[int], scored: bool) -> None:
        """Compare a chain with the ``new`` tokens: all of it if it was ``scored``, else as far as the text goes.

        A chain that was not scored is judged, too: a memory that was wrong once would never be believed again.
        """
        chain, chances = max(guesses, key=len, default=()), list(guesses.values())
        self.learn(chances if scored else chances[: len(new)], agreeing(chain, new))

    def of(self, chances: Iterable[float]) -> list[float]:
        """Return the chances of guesses behind each other, all in front of them included, as they turn out."""
        corrected, before = [], 1.0
        for chance in chances:
            level, prior = _level(chance), CAUTION * chance
            before = min(before, chance * (self._right[level] + prior) / (self._expected[level] + prior))
            corrected.append(before)
        return corrected


def _level(chance: float) -> int:
    return min(LEVELS - 1, int(chance * LEVELS))


def mean_chances(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the chance of a guess of each depth to come true, on average over ``rows``; some guess less deep."""
    return [sum(column) / len(rows) for column in itertools.zip_longest(*rows, fillvalue=0.0)]


def shortened(guesses: Guesses, depth: int) -> Guesses:
    """Leave out what is more than ``depth`` deep."""
    return {path: chance for path, chance in guesses.items() if len(path) <= depth}


def agreeing(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the guesses that came true before one did not."""
    right = [guess == token for guess, token in zip(guesses, tokens, strict=False)]
    return [*right, False].index(False)
