"""How deep to guess: as deep as gives most text per second, judged by what steps took and what they emitted.

A step that guesses k deep emits 1 + S(1) + ... + S(k) tokens of a row on average, where S(j) is how often its j-th
guess is accepted, and takes T(k) seconds from the drafter to the new text. The depth with the largest ratio of the two
is taken; 0 is one of them, an ordinary step that asks no draft. Nothing is assumed of T but that it lies on a line
between two depths that were measured (Leviathan et al., arXiv 2211.17192, section 3.4, take T(k) = T(0) + c k).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.base import Speculator
from ..proposal import tree_from_paths
from ..sampling import is_seeded
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig

DEEPEST = 16
SAMPLES = 32  # latest steps of a depth, whose median is what it takes; others use the machine for less long
FADE = 0.97  # what a step's acceptance weighs after one more step
CARRIED = 2.0  # steps that the acceptance of earlier calls weighs at most
GUESSED = 0.8  # how often a guess is accepted behind an accepted one, as long as nothing is known
UNKNOWN = 64  # tokens that the target is given at most, if more than two a row, before it is known what that takes
LOOK_AGAIN, LONGEST = 24, 1024  # steps until another depth is tried, at least and at most
TELLING = 7  # tries of one row that are accepted in a row, until that says enough; of two rows half as many, ...
TRIES = 1 / 64  # of the time, that tries may cost
LOOK_AT_SHAPES = 16  # calls until the other one of chain and tree is tried
APART = 0.04  # how much less guesses are worth each time that rows double, where fewer rows take as long as all
GUESS = 0.05  # what a guess takes, of an ordinary step, as long as that is not known
MARGIN = 1.02  # how much faster another depth must promise to be
PLAIN_MARGIN = 1.03  # how much faster guesses must promise to be than ordinary steps, which are sure of theirs


def paced(
    config: SpeculationConfig,
    asked: SpeculationConfig | None,
    speculator: Speculator,
    samples: bool,
    device: torch.device,
) -> tuple[SpeculationConfig, bool]:
    """Return the settings of a call and whether the clock chooses its depths.

    It does where ``config`` says so, or what was ``asked`` for holds no number. A step that draws takes as many random
    numbers as it is deep. So where a seed was set, and the draws are not those of plain ``generate``, the depth is
    fixed instead: the same seed gives the same text. A number that neither the user nor the draft gave is no bound of
    what the clock chooses: it is taken out of the settings.
    """
    if config.num_speculative_tokens == "auto":
        return config, True
    if asked is not None and asked.num_speculative_tokens is not None:
        return config, False
    adapts = may_adapt(config, samples, device)
    is_common = adapts and speculator.defaults().num_speculative_tokens is None
    return (config.merge(num_speculative_tokens=None) if is_common else config), adapts


def may_adapt(config: SpeculationConfig, samples: bool, device: torch.device) -> bool:
    """Tell whether guesses may depend on the clock although the same seed has to give the same text."""
    chosen_by_clock = config.num_speculative_tokens == "auto" or config.verification == "exact"
    return chosen_by_clock or not samples or not is_seeded(device)


class Experience:
    """Remember from call to call what steps with one target and draft took, and which guesses were accepted.

    ``seconds[size][depth]`` are those of the latest steps; batches of 1, 2, 3 to 4, 5 to 8, ... rows have one size.
    ``offered[j]`` counts the rows of steps that guessed more than j tokens deep, ``reached[j]`` those of them that
    accepted as many.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, dict[int, deque[float]]] = {}
        self.offered = [0.0] * DEEPEST
        self.reached = [0.0] * DEEPEST
        self.calls = 0  # that might have guessed in another shape
        self.best: dict[int, int] = {}  # depth, by size of the batch
        self.settled: dict[int, int] = {}  # depth of compiled steps, by size of the batch
        self.patience, self.steps = LOOK_AGAIN, 0  # until another depth is tried, and taken of them

    def carry_over(self, rows: int) -> None:
        """Begin another call, of ``rows`` rows: what was accepted in earlier ones is a hint, no more."""
        most = CARRIED * rows
        self._fade(most / max(most, self.offered[0]))

    def measured(self, rows: int, depth: int, seconds: float) -> None:
        """Note what a step took that guessed ``depth`` deep for ``rows`` rows. The first one of a kind warms up."""
        samples = self.seconds.setdefault(_size(rows), {})
        if depth in samples:
            samples[depth].append(seconds)
        else:
            samples[depth] = deque(maxlen=SAMPLES)

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
        samples = self.seconds.get(_size(rows), {})
        return {depth: median(seconds) for depth, seconds in sorted(samples.items()) if seconds}

    def unshared(self, rows: int) -> float:
        """Return which share of a step's time, 0 to 1, does not depend on the ``rows``; 0 while nothing is known."""
        whole, half = self.times(rows), self.times(1 << max(0, _size(rows) - 1))
        shares = [2 * half[depth] / whole[depth] - 1 for depth in whole.keys() & half.keys()]
        return min(1.0, max(0.0, median(shares))) if shares else 0.0

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
        return {depth: tokens[min(depth, DEEPEST)] / _on_line(times, depth) for depth in range(deepest + 1)}


# By target; then by draft, shape of the guesses, and whatever else changes what steps take or what is accepted.
_experiences: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Experience]] = WeakKeyDictionary()


def experience_of(
    target: PreTrainedModel, speculator: Speculator, config: SpeculationConfig, *way: Hashable
) -> Experience:
    """Return what was found of this ``target`` and draft, decoded the same ``way``."""
    weights = speculator if isinstance(speculator, nn.Module) else getattr(speculator, "model", None)
    draft = type(speculator).__name__, None if weights is None else id(weights)
    shape = str(config.tree), config.tree_top_k, config.tree_nodes, config.min_confidence
    rule = config.acceptance, config.accept_k, config.accept_tolerance
    return _experiences.setdefault(target, {}).setdefault((*draft, *shape, *rule, *way), Experience())


def faster(
    target: PreTrainedModel, speculator: Speculator, chain: SpeculationConfig, rows: int, *way: Hashable
) -> SpeculationConfig:
    """Choose between ``chain`` and a dynamic tree for a call of ``rows`` rows, by the speeds that each promises.

    What was not measured yet is tried first. From time to time the slower one is looked at again.
    """
    shapes = chain, chain.merge(tree="dynamic")
    known = [experience_of(target, speculator, shape, *way) for shape in shapes]
    best = [max(one.seen(rows), default=None) for one in known]
    known[0].calls += 1
    for shape, speed in zip(shapes, best, strict=True):
        if speed is None:
            return shape
    tree_is_faster = (best[1] or 0.0) > MARGIN * (best[0] or 0.0)
    looks_again = known[0].calls % LOOK_AT_SHAPES == 0
    return shapes[tree_is_faster != looks_again]


class Pace:
    """Choose the depth of each step of a call, or keep to ``first`` where ``adapts`` is not set.

    ``deepest`` bounds it. ``experience`` is shared by calls; a call begins with what the last ones found. ``compiled``
    steps are either ordinary or ``first`` deep: every further depth would cost a graph of the target for each number
    of rows and slots, tens of seconds, and a graph of the draft. ``waits``: the batch ends with its slowest row.
    Guesses get rows apart, by chance, and then there are steps for those alone that are behind.
    """

    def __init__(
        self,
        experience: Experience,
        first: int,
        deepest: int = DEEPEST,
        adapts: bool = True,
        compiled: bool = False,
        waits: bool = True,
    ) -> None:
        self.first = min(first, deepest) if adapts else first
        self.deepest, self.adapts, self._compiled = deepest, adapts, compiled
        self._waits = waits
        self._experience = experience
        self._chosen: Counter[int] = Counter()
        self._best: int | None = None
        self._speed = 0.0  # tokens per second of a row that the best depth promises
        self._tries = itertools.cycle(("deeper", "shallower", "none"))
        self._tried = self._trying = False  # in the last step, in the next one
        self._in_a_row = 0  # tries
        self._lost = 0.0  # seconds, to them

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        speculator: Speculator,
        config: SpeculationConfig,
        adapts: bool,
        *way: Hashable,
        compiled: bool = False,
        waits: bool = True,
    ) -> Pace:
        """Begin a call with what earlier ones of this ``target`` and draft found, decoded the same ``way``."""
        paths = [] if config.tree is None or isinstance(config.tree, str) else [len(path) for path in config.tree]
        asked, own = config.num_speculative_tokens, speculator.defaults().num_speculative_tokens
        usual = max(paths, default=own if isinstance(own, int) else DEFAULT_NUM_SPECULATIVE_TOKENS)
        first = asked if isinstance(asked, int) else usual
        way = (*way, "compiled") if compiled else way
        experience = experience_of(target, speculator, config, *way)
        return cls(experience, first, max(paths, default=DEEPEST), adapts, compiled, waits)

    def settle(self, rows: int, costs_of: Callable[[Sequence[int]], list[float] | None]) -> int:
        """Return how deep a call of ``rows`` rows guesses in compiled steps: as deep as earlier ones of its size.

        It is settled before there are graphs. ``costs_of`` says what forwards of so many tokens take, as multiples of
        the first one. Of depths that promise nearly as much the shallowest is taken: it loses least where guesses turn
        out worse than they promise.
        """
        known, size = self._experience.settled, _size(rows)
        if size not in known:
            costs = costs_of([rows * (1 + depth) for depth in range(1 + self.first)]) if rows > 1 else None
            tokens = self._experience.tokens()
            speeds = [tokens[depth] / (cost + GUESS * depth) for depth, cost in enumerate(costs or ())]
            enough = max(speeds[1:], default=0.0) / PLAIN_MARGIN
            near = (depth for depth, speed in enumerate(speeds) if depth and speed >= enough)
            known[size] = next(near, self.first)
        return min(self.first, known[size])

    def most_nodes(self, config: SpeculationConfig) -> int | None:
        """Count the nodes of a whole proposal, the root included; ``None`` where its size changes."""
        if self.adapts and not self._compiled:
            return None
        if config.tree is None:
            return 1 + self.first
        if not isinstance(config.tree, str):
            return len(tree_from_paths(config.tree)[0])
        whole: int = sum(config.tree_top_k**depth for depth in range(1, 1 + self.first))
        return 1 + min(config.tree_nodes, whole)

    def depth(self, rows: int) -> int:
        """Return how deep ``rows`` rows should guess next; 0 for an ordinary step."""
        depth = self._choose(rows) if self.adapts else self.first
        self._chosen[depth] += 1
        return depth

    def _choose(self, rows: int) -> int:
        experience, self._tried = self._experience, False
        if not self._chosen:  # the call begins
            experience.carry_over(rows)
        times = experience.times(rows)
        if not any(times):  # no depth but 0
            careful = self.first if self._compiled else max(1, UNKNOWN // rows - 1)
            return min(self.first, self.deepest, careful)
        if 0 not in times:
            return 0
        speeds = self._speeds(rows)
        best = max(speeds, key=speeds.__getitem__)
        last = experience.best.get(_size(rows))
        if last in speeds and speeds[best] < (MARGIN if last else PLAIN_MARGIN) * speeds[last]:
            best = last
        if best != last:
            experience.best[_size(rows)], experience.patience = best, LOOK_AGAIN
        self._best, self._speed = best, speeds[best]
        experience.steps += 1
        self._tried = self._trying or experience.steps >= experience.patience
        return self._other(best, speeds) if self._tried else best

    def _speeds(self, rows: int) -> dict[int, float]:
        """Return the tokens per second of a row that each depth is worth."""
        speeds = self._experience.speeds(rows, self.deepest)
        worth = 1 / (1 + APART * _size(rows) * self._apart(rows))
        depths = (0, self.first) if self._compiled else speeds
        return {depth: speeds[depth] * (worth if depth else 1.0) for depth in depths}

    def _apart(self, rows: int) -> float:
        """Return how much it matters, 0 to 1, that some rows get ahead: not at all if fewer take as much less time."""
        return self._experience.unshared(rows) if self._waits else 0.0

    def _other(self, best: int, speeds: dict[int, float]) -> int:
        """Return a depth to be tried instead of the ``best``: what is believed of the others may be out of date."""
        if best == 0:
            guessing = {depth: speed for depth, speed in speeds.items() if depth}
            return max(guessing, key=guessing.__getitem__, default=0)
        if self._compiled:
            return 0
        other = {"deeper": best + 1, "shallower": best - 1, "none": 0}[next(self._tries)]
        return min(other, self.deepest)

    def stepped(
        self,
        rows: int,
        depth: int,
        seconds: float | None,
        offered: Sequence[int],
        reached: Sequence[int],
        is_usual: bool = True,
    ) -> None:
        """Learn from a step that guessed ``depth`` deep, in ``seconds`` unless it also read the prompt or compiled.

        Row by row, ``offered`` says how deep it guessed and ``reached`` how many guesses were accepted. A step is not
        ``is_usual`` if its draft had to read what became text in earlier ones.
        """
        if seconds is not None and is_usual:
            self._experience.measured(rows, depth, seconds)
        if any(offered):
            self._experience.accepted(offered, reached)
        # As long as tries from ordinary steps are accepted they go on, because one row alone says little.
        is_good = self._best == 0 and 2 * sum(reached) > len(reached)
        self._in_a_row = self._in_a_row + 1 if is_good else 0
        self._trying = is_good and self._in_a_row % max(1, TELLING // rows) > 0
        if self._tried and seconds is not None:
            mean = sum(reached) / len(reached)
            won = mean - self._apart(rows) * (mean - min(reached))
            self._lost += seconds - (1 + won) / self._speed
        if self._tried and not self._trying:
            self._wait()

    def _wait(self) -> None:
        """Put the next try off until what the last ones cost is a small share of the time."""
        steps = self._lost * self._speed / TRIES  # each of them gives at least a token
        self._experience.patience, self._experience.steps = round(min(max(LOOK_AGAIN, steps), LONGEST)), 0
        self._lost = 0.0

    def __str__(self) -> str:
        total = sum(self._chosen.values())
        if not self.adapts or not total:
            return f"{self.first} deep in every step, as asked for"
        parts = ", ".join(f"{depth or 'none'} in {count / total:.0%}" for depth, count in self._chosen.most_common(4))
        return f"{parts} of {total} steps, by the clock"


def _size(rows: int) -> int:
    return max(0, rows - 1).bit_length()


def _on_line(times: dict[int, float], depth: int) -> float:
    """Return the seconds of ``depth`` from those of its measured neighbours, or of the nearest two on one side."""
    if depth in times:
        return times[depth]
    known = list(times)
    right = min(max(1, sum(one < depth for one in known)), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = max(0.0, (times[high] - times[low]) / (high - low))
    return max(times[low] + slope * (depth - low), min(times.values()))
