"""How right guesses turned out: by how likely they were thought to be, and by how deep they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

LEVELS = 8  # of chances, each with its own record
LEVEL_FADE = 0.995  # what a guess weighs after one more of its level
LEVEL_CAUTION = 5.0  # guesses of a level that came true as often as was thought, before there was one
FADE, IDLE_FADE = 0.97, 0.99  # what a step weighs after one more, and after one that did not ask the draft
CAUTION = 2.0  # steps that what is believed without having seen any weighs
GUESSED = 0.6  # how often a draft's guess is believed to be right behind a right one


class Trust:
    """Correct chances by how often guesses that were thought as likely came true lately."""

    def __init__(self) -> None:
        self._expected = [0.0] * LEVELS
        self._right = [0.0] * LEVELS

    def learn(self, chance: float, is_right: bool) -> None:
        """Note whether a guess came true that had this ``chance``."""
        level = _level(chance)
        self._expected[level] = LEVEL_FADE * self._expected[level] + chance
        self._right[level] = LEVEL_FADE * self._right[level] + is_right

    def of(self, chance: float) -> float:
        """Return the chance of a guess as it turns out, 0 to 1."""
        level, prior = _level(chance), LEVEL_CAUTION * chance
        return min(1.0, chance * (self._right[level] + prior) / (self._expected[level] + prior))


def _level(chance: float) -> int:
    return min(LEVELS - 1, int(chance * LEVELS))


class TrackRecord:
    """Remember how far the chains of a draft were right lately, and how right it was where it was how sure.

    What was seen long ago fades, so that a draft that once failed is tried again.
    """

    def __init__(self) -> None:
        self.trust = Trust()
        self._offered: list[float] = []  # rows' steps that guessed more than j deep, the later the heavier
        self._reached: list[float] = []  # those of them that accepted as many

    def fade(self, asked: bool = True) -> None:
        """Begin another step behind one that ``asked`` the draft, or did not."""
        share = FADE if asked else IDLE_FADE
        self._offered, self._reached = ([share * one for one in counts] for counts in (self._offered, self._reached))

    def learn(self, depth: int, accepted: int, sure: Sequence[float] = ()) -> None:
        """Note that of a chain ``depth`` long ``accepted`` guesses became text.

        ``sure`` (at most ``depth``) are the draft's own probabilities of them, each behind those before it.
        """
        for counts, length in ((self._offered, depth), (self._reached, accepted)):
            counts.extend([0.0] * (depth - len(counts)))
            counts[:length] = [count + 1 for count in counts[:length]]
        for place, chance in enumerate(sure[: accepted + 1]):  # behind a wrong guess nothing is known
            self.trust.learn(chance, place < accepted)

    def of(self, depth: int) -> list[float]:
        """Return the chance of each guess of a chain to become text."""
        chances, survival = [], 1.0
        for place in range(depth):
            offered, reached = (
                counts[place] if place < len(counts) else 0.0 for counts in (self._offered, self._reached)
            )
            survival = min(survival, (reached + CAUTION * GUESSED * survival) / (offered + CAUTION))
            chances.append(survival)
        return chances


def mean_chances(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the chance of a guess of each depth to come true, on average over ``rows``; some guess less deep."""
    rows = list(rows)
    return [sum(column) / len(rows) for column in itertools.zip_longest(*rows, fillvalue=0.0)]


def agreeing(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the guesses that came true before one did not."""
    right = [guess == token for guess, token in zip(guesses, tokens, strict=False)]
    return [*right, False].index(False)
