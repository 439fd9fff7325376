"""How deep to guess: as deep as gives most text per second, judged by what steps took and what they emitted.

A step that guesses k deep emits 1 + S(1) + ... + S(k) tokens of a row on average, where S(j) is how often its j-th
guess is accepted, and takes T(k) seconds from the drafter to the new text. The depth with the largest ratio of the two
is taken; 0 is one of them, an ordinary step that asks no draft. Nothing is assumed of T but that it lies on a line
between two depths that were measured (Leviathan et al., arXiv 2211.17192, section 3.4, take T(k) = T(0) + c k).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from transformers import PreTrainedModel

from ..drafts.base import Speculator
from ..drafts.foresight import Foresight
from ..proposal import tree_from_paths
from ..sampling import is_seeded
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .experience import DEEPEST, LOOK_AGAIN, PLAIN_MARGIN, Experience, careful, experience_of, size_of
from .worth import PLAIN, Worth

LONGEST = 1024  # steps until another depth is tried, at most; at least LOOK_AGAIN
REST = 8  # ordinary steps that are chosen at once: choosing takes as long as some layers of a small target
TELLING = 7  # tries of one row that are accepted in a row, until that says enough; of two rows half as many, ...
TRIES = 1 / 64  # of the time, that tries may cost
LOOK_AT_SHAPES = 16  # calls until the other one of chain and tree is tried
GUESS = 0.05  # what a guess takes, of an ordinary step, as long as that is not known
MARGIN = 1.02  # how much faster another depth must promise to be


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
    Guesses get rows apart, by chance, and then there are steps for those alone that are behind. Where there is a
    ``worth``, the drafter asks that how deep to guess.
    """

    def __init__(
        self,
        experience: Experience,
        first: int,
        deepest: int = DEEPEST,
        adapts: bool = True,
        compiled: bool = False,
        waits: bool = True,
        worth: Worth | None = None,
    ) -> None:
        self.worth = worth
        self.first = min(first, deepest) if adapts else first
        self.deepest, self.adapts, self._compiled = deepest, adapts, compiled
        self._waits = waits
        self._experience = experience
        self._chosen: Counter[int] = Counter()
        self._best: int | None = None
        self._speed = 0.0  # tokens per second of a row that the best depth promises
        self._rest = 0, 0  # rows, and ordinary steps of theirs until there is a choice again
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
        weighs: bool = False,
        rows: int = 1,
    ) -> Pace:
        """Begin a call with what earlier ones of this ``target`` and draft found, decoded the same ``way``.

        ``weighs``: the drafter of the call, of ``rows`` rows, may decide itself, by the chances of its guesses.
        """
        paths = [] if config.tree is None or isinstance(config.tree, str) else [len(path) for path in config.tree]
        asked, own = config.num_speculative_tokens, speculator.defaults().num_speculative_tokens
        usual = max(paths, default=own if isinstance(own, int) else DEFAULT_NUM_SPECULATIVE_TOKENS)
        first = asked if isinstance(asked, int) else usual
        way = (*way, "compiled") if compiled else way
        experience = experience_of(target, speculator, config, *way)
        worth = None
        by_chances = speculator.knows_chances(rows) or (speculator.heeds_foresight and config.min_confidence == 0)
        if weighs and adapts and not compiled and config.tree is None and by_chances:
            worth = Worth(functools.partial(experience_of, target, speculator, config, *way), waits)
        return cls(experience, first, max(paths, default=DEEPEST), adapts, compiled, waits, worth)

    def settle(self, rows: int, costs_of: Callable[[Sequence[int]], list[float] | None]) -> int:
        """Return how deep a call of ``rows`` rows guesses in compiled steps: as deep as earlier ones of its size.

        It is settled before there are graphs. ``costs_of`` says what forwards of so many tokens take, as multiples of
        the first one. Of depths that promise nearly as much the shallowest is taken: it loses least where guesses turn
        out worse than they promise.
        """
        known, size = self._experience.settled, size_of(rows)
        if size not in known:
            costs = costs_of([rows * (1 + depth) for depth in range(1 + self.first)]) if rows > 1 else None
            tokens = self._experience.tokens()
            speeds = [tokens[depth] / (cost + GUESS * depth) for depth, cost in enumerate(costs or ())]
            enough = max(speeds[1:], default=0.0) / PLAIN_MARGIN
            near = (depth for depth, speed in enumerate(speeds) if depth and speed >= enough)
            known[size] = next(near, self.first)
        return min(self.first, known[size])

    def foresight(self, speculator: Speculator) -> Foresight | None:
        """Make what decides guess by guess, for a ``speculator`` that does not weigh its guesses itself."""
        if self.worth is None or not speculator.heeds_foresight:
            return None
        return Foresight(self.worth, self._experience.record, self.first)

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
        if self.worth is not None:
            return self.deepest
        depth = self._choose(rows) if self.adapts else self.first
        self._chosen[depth] += 1
        return depth

    def _choose(self, rows: int) -> int:
        experience, self._tried = self._experience, False
        if self._at_rest(rows):
            return 0
        if not self._chosen:  # the call begins
            experience.carry_over(rows)
        times = experience.times(rows)
        if not any(times):  # no depth but 0
            return min(self.first, self.deepest, self.first if self._compiled else careful(rows))
        if 0 not in times:
            return 0
        speeds = self._speeds(rows)
        best = max(speeds, key=speeds.__getitem__)
        last = experience.best.get(size_of(rows))
        if last in speeds and speeds[best] < (MARGIN if last else PLAIN_MARGIN) * speeds[last]:
            best = last
        if best != last:
            experience.best[size_of(rows)], experience.patience = best, LOOK_AGAIN
        self._best, self._speed = best, speeds[best]
        experience.steps += 1
        self._tried = self._trying or experience.steps >= experience.patience
        if self._tried:
            return self._other(best, speeds)
        if best == 0:
            self._rest = rows, min(REST, experience.patience - experience.steps) - 1
        return best

    def _at_rest(self, rows: int) -> bool:
        """Tell whether the next step of as many ``rows`` is an ordinary one because the last one was."""
        resting, steps = self._rest
        if resting != rows or steps <= 0:
            return False
        self._rest = rows, steps - 1
        self._experience.steps += 1
        return True

    def _speeds(self, rows: int) -> dict[int, float]:
        """Return the tokens per second of a row that each depth is worth."""
        speeds = self._experience.speeds(rows, self.deepest)
        worth = self._experience.apart(rows) if self._waits else 1.0
        depths = (0, self.first) if self._compiled else speeds
        return {depth: speeds[depth] * (worth if depth else 1.0) for depth in depths}

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
        kind: str = PLAIN,
    ) -> None:
        """Learn from a step that guessed ``depth`` deep, in ``seconds`` unless it also read the prompt or compiled.

        Row by row, ``offered`` says how deep it guessed and ``reached`` how many guesses were accepted. A step is not
        ``is_usual`` if its draft had to read what became text in earlier ones. ``kind`` names what was guessed.
        """
        if self.worth is not None:
            self._chosen[depth] += 1
            self.worth.stepped(rows, kind, depth, seconds if is_usual else None)
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
            apart = self._experience.unshared(rows) if self._waits else 0.0
            won = mean - apart * (mean - min(reached))
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
