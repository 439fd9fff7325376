"""What was found of a target and a draft in earlier calls: what steps took, and which guesses were accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from ..drafts.base import Speculator, network_of
from ..drafts.trust import TrackRecord
from ..settings import SpeculationConfig

DEEPEST = 16
SAMPLES = 32  # latest steps of a depth, whose median is what it takes; others use the machine for less long
FADE = 0.97  # what a step's acceptance weighs after one more step
CARRIED = 2.0  # steps that the acceptance of earlier calls weighs at most
GUESSED = 0.8  # how often a guess is accepted behind an accepted one, as long as nothing is known
APART = 0.04  # how much less guesses are worth each time that rows double, where fewer rows take as long as all
STRAIGHT = 4.0  # steps of a depth that the line through all depths weighs as much as
LOOK_AGAIN = 24  # steps until another depth is tried, at least
UNKNOWN = 64  # tokens that the target is given at most, if more than two a row, before it is known what that takes
PLAIN_MARGIN = 1.03  # how much faster guesses must promise to be than ordinary steps, which are sure of theirs


class Experience:
    """Remember from call to call what steps with one target and draft took, and which guesses were accepted.

    ``seconds[size][depth]`` are those of the latest steps; batches of 1, 2, 3 to 4, 5 to 8, ... rows have one size.
    ``offered[j]`` counts the rows of steps that guessed more than j tokens deep, ``reached[j]`` those of them that
    accepted as many.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, dict[int, deque[float]]] = {}
        self._times: dict[int, dict[int, float]] = {}  # their medians, by depth, ascending
        self._curves: dict[int, list[float]] = {}  # seconds by depth, by size of the batch
        self.offered = [0.0] * DEEPEST
        self.reached = [0.0] * DEEPEST
        self.calls = 0  # that might have guessed in another shape
        self.best: dict[int, int] = {}  # depth, by size of the batch
        self.settled: dict[int, int] = {}  # depth of compiled steps, by size of the batch
        self.patience, self.steps = LOOK_AGAIN, 0  # until another depth is tried, and taken of them
        self.record = TrackRecord()  # of a draft whose chains end by ``Foresight``
        self.idle = 0.0  # seconds of other kinds of steps since one of this kind, see ``Worth``

    def carry_over(self, rows: int) -> None:
        """Begin another call, of ``rows`` rows: what was accepted in earlier ones is a hint, no more."""
        most = CARRIED * rows
        self._fade(most / max(most, self.offered[0]))

    def measured(self, rows: int, depth: int, seconds: float) -> None:
        """Note what a step took that guessed ``depth`` deep for ``rows`` rows. The first one of a kind warms up."""
        size = size_of(rows)
        samples, times = self.seconds.setdefault(size, {}), self._times.setdefault(size, {})
        self._curves.pop(size, None)
        if depth not in samples:
            samples[depth] = deque(maxlen=SAMPLES)
            return
        samples[depth].append(seconds)
        if depth in times:
            times[depth] = median(samples[depth])
        else:  # a dict of its own: another thread may be looking through the old one
            self._times[size] = dict(sorted({**times, depth: seconds}.items()))

    def accepted(self, offered: Sequence[int], reached: Sequence[int]) -> None:
        """Note how deep each row guessed in a step, and how many of its guesses were accepted.

        A row that guesses less than the deepest one counts as if it had been wrong: the step takes as long for it.
        """
        self._fade(FADE)
        for depth in range(min(max(offered), DEEPEST)):
            self.offered[depth] += len(offered)
            self.reached[depth] += sum(depth < count for count in reached)

    def _fade(self, share: float) -> None:
        self.offered = [share * count for count in self.offered]
        self.reached = [share * count for count in self.reached]

    def tokens(self) -> list[float]:
        """Return what a row's step is expected to emit at each depth from 0 on."""
        expected, survival = [1.0], 1.0
        for offered, reached in zip(self.offered, self.reached, strict=True):
            survival = min(survival, (reached + survival * GUESSED) / (offered + 1))
            expected.append(expected[-1] + survival)
        return expected

    def times(self, rows: int) -> dict[int, float]:
        """Return what steps of the measured depths take with batches like ``rows``, by depth, ascending."""
        return self._times.get(size_of(rows), {})

    def curve(self, rows: int, ordinary: float) -> list[float]:
        """Return what steps of each depth take up to the deepest, from all that were measured; nothing before one was.

        What few steps of a depth took is drawn to the straight line through all of them, which begins at an
        ``ordinary`` step as long as there is one depth only. Up to the second depth that was measured it lies no
        higher than between that step and these two, so that less deep guesses are tried.
        """
        size = size_of(rows)
        if (curve := self._curves.get(size)) is None:  # another thread may drop it at any moment
            times = self.times(rows)
            weights = {depth: len(self.seconds[size][depth]) for depth in times}
            curve = self._curves[size] = _smooth(times, weights, ordinary) if times else []
        return curve

    def deepest(self, rows: int) -> int:
        """Return the largest depth that was measured, 0 if there is none."""
        return max(self.times(rows), default=0)

    def unshared(self, rows: int) -> float:
        """Return which share of a step's time, 0 to 1, does not depend on the ``rows``; 0 while nothing is known."""
        whole, half = self.times(rows), self.times(1 << max(0, size_of(rows) - 1))
        shares = [2 * half[depth] / whole[depth] - 1 for depth in whole.keys() & half.keys()]
        return min(1.0, max(0.0, median(shares))) if shares else 0.0

    def apart(self, rows: int) -> float:
        """Return what guesses of ``rows`` rows that end together are worth, where some get ahead of the others.

        Less than 1, unless the fewer rows that are left take as much less time.
        """
        return 1 / (1 + APART * size_of(rows) * self.unshared(rows))

    def seen(self, rows: int) -> list[float]:
        """Return the tokens per second of a row at each of the measured depths."""
        tokens = self.tokens()
        return [tokens[min(depth, DEEPEST)] / seconds for depth, seconds in self.times(rows).items()]

    def speeds(self, rows: int, deepest: int) -> dict[int, float]:
        """Return the tokens per second of a row that each depth promises; nothing before two depths were measured."""
        times = self.times(rows)
        if len(times) < 2:
            return {}
        tokens = self.tokens()
        return {depth: tokens[min(depth, DEEPEST)] / on_line(times, depth) for depth in range(deepest + 1)}


_OfTarget: TypeAlias = WeakKeyDictionary[nn.Module, dict[Hashable, Experience]]
# By target; by the weights of the draft, or the target where there are none; then by shape of the guesses, and
# whatever else changes what steps take or what is accepted.
_experiences: WeakKeyDictionary[PreTrainedModel, _OfTarget] = WeakKeyDictionary()


def experience_of(
    target: PreTrainedModel, speculator: Speculator, config: SpeculationConfig, *way: Hashable
) -> Experience:
    """Return what was found of this ``target`` and draft, decoded the same ``way``."""
    weights = network_of(speculator)
    shape = str(config.tree), config.tree_top_k, config.tree_nodes, config.min_confidence
    rule = config.acceptance, config.accept_k, config.accept_tolerance
    of_target = _experiences.setdefault(target, WeakKeyDictionary())
    of_draft = of_target.setdefault(target if weights is None else weights, {})
    return of_draft.setdefault((type(speculator).__name__, *shape, *rule, *way), Experience())


def size_of(rows: int) -> int:
    """Name the size of a batch of ``rows`` rows: those of 1, 2, 3 to 4, 5 to 8, ... are alike."""
    return max(0, rows - 1).bit_length()


def on_line(times: dict[int, float], depth: int) -> float:
    """Return the seconds of ``depth`` from those of its measured neighbours, or of the nearest two on one side."""
    if depth in times:
        return times[depth]
    known = list(times)
    right = min(max(1, sum(one < depth for one in known)), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = max(0.0, (times[high] - times[low]) / (high - low))
    return max(times[low] + slope * (depth - low), min(times.values()))


def _smooth(times: dict[int, float], weights: dict[int, int], ordinary: float) -> list[float]:
    if len(times) == 1:
        times, weights = {0: ordinary} | times, {0: 1} | weights
    total = sum(weights.values())
    depth = sum(weight * at for at, weight in weights.items()) / total
    seconds = sum(weights[at] * taken for at, taken in times.items()) / total
    spread = sum(weight * (at - depth) ** 2 for at, weight in weights.items())
    slope = sum(weights[at] * (at - depth) * (taken - seconds) for at, taken in times.items()) / spread
    line = [seconds + max(0.0, slope) * (at - depth) for at in range(DEEPEST + 1)]
    for end in sorted(times)[:2] if ordinary else ():
        for at in range(1, end):
            line[at] = min(line[at], ordinary + (times[end] - ordinary) * at / end)
    for at in times.keys() & range(DEEPEST + 1):
        line[at] = (weights[at] * times[at] + STRAIGHT * line[at]) / (weights[at] + STRAIGHT)
    return line


def careful(rows: int) -> int:
    """Return how deep ``rows`` rows may guess before it is known what wide forwards take."""
    return max(1, UNKNOWN // rows - 1)
