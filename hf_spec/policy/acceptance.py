"""How probably draft tokens are accepted: by source and position, by match length, and by confidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice, repeat

from .base import MAX_LENGTH, DraftSource, Estimate

DECAY = 0.98  # weight of a step after the next one; half of all weight is on the last 34 steps (replay: 0.97 to 0.98)
PLAIN_DECAY = DECAY ** (2 / 3)  # the same after a step that drafted nothing, and so taught nothing
PRIOR_ACCEPTANCE = 0.8  # of a draft token whose predecessor was accepted, before any was seen (replay: 0.7 to 0.8)
PRIOR_STEPS = 2.0  # steps that the prior weighs as much as, and earlier calls at most
BINS = 8  # of confidence, each calibrated by itself: as many as some hundred tokens fill
FADED_TOGETHER = 8  # plain steps after which the averages fade at once: plain steps have to be cheap
BIN_PRIOR = 5.0  # draft tokens per bin that were accepted as often as the confidence said, before any was seen

NO_FEATURE = 0  # the feature of draft tokens of which nothing is known but source and position


class PositionCounts:
    """Acceptance by position: how many steps proposed more than j draft tokens, and how many accepted more than j."""

    def __init__(self) -> None:
        self._proposed: list[float] = []
        self._accepted: list[float] = []
        self._survival: list[float] = []  # what follows from the counts, until they change

    def record(self, proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Count one step, by sequence. A shorter draft counts as rejected beyond its end: the step takes as long."""
        self._survival = []
        longest = max(proposed)
        for counts in (self._proposed, self._accepted):
            counts += [0.0] * (longest - len(counts))
        for position in range(longest):
            self._proposed[position] += len(proposed)
            self._accepted[position] += sum(position < count for count in accepted)

    def scale(self, share: float) -> None:
        """Let what was counted weigh less."""
        self._survival = []
        for counts in (self._proposed, self._accepted):
            counts[:] = [share * count for count in counts]

    def limit(self, steps: float) -> None:
        """Let what was counted weigh at most so many steps of one sequence."""
        if self._proposed and self._proposed[0] > steps:
            self.scale(steps / self._proposed[0])

    def survival(self, length: int) -> list[float]:
        """Return for each position the probability that its draft token is accepted, with all before it."""
        if length <= len(self._survival):
            return self._survival[:length]
        found, survival = [], 1.0
        seen = zip(chain(self._proposed, repeat(0.0)), chain(self._accepted, repeat(0.0)), strict=False)
        for proposed, accepted in islice(seen, max(length, MAX_LENGTH)):
            prior = PRIOR_STEPS * PRIOR_ACCEPTANCE * survival
            survival = min(survival, (accepted + prior) / (proposed + PRIOR_STEPS))
            found.append(survival)
        self._survival = found
        return found[:length]


class Calibration:
    """Correct probabilities by how often tokens that were given about the same probability were accepted."""

    def __init__(self) -> None:
        self._expected = [0.0] * BINS
        self._accepted = [0.0] * BINS

    def record(self, probability: float, is_accepted: bool) -> None:
        """Count a draft token that was accepted or rejected."""
        place = _bin(probability)
        self._expected[place] = DECAY * self._expected[place] + probability
        self._accepted[place] = DECAY * self._accepted[place] + is_accepted

    def __call__(self, probability: float) -> float:
        """Return the calibrated probability, 0 to 1."""
        if probability <= 0:
            return 0.0
        place, prior = _bin(probability), BIN_PRIOR * probability
        return min(1.0, probability * (self._accepted[place] + prior) / (self._expected[place] + prior))


def _bin(probability: float) -> int:
    return min(BINS - 1, int(probability * BINS))


class AcceptanceEstimator:
    """Acceptance of every source: averages by position, by a feature such as the match length, and calibrations."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[DraftSource, int], PositionCounts] = defaultdict(PositionCounts)
        self.calibration: defaultdict[DraftSource, Calibration] = defaultdict(Calibration)
        self._plain_steps = 0  # since the averages last faded

    def begin_call(self, batch_size: int) -> None:
        """Let the averages of earlier calls weigh as much as the prior: other text may be accepted otherwise."""
        for (_, feature), counts in list(self._counts.items()):
            if feature == NO_FEATURE:
                counts.limit(PRIOR_STEPS * batch_size)

    def record(
        self, source: DraftSource, proposed: Sequence[int], accepted: Sequence[int], feature: int = NO_FEATURE
    ) -> None:
        """Count how many tokens were proposed and accepted in one step, per sequence; none: another source drafted."""
        counts = self._counts[source, feature]
        counts.scale(DECAY if any(proposed) else PLAIN_DECAY)
        if any(proposed):
            counts.record(proposed, accepted)

    def record_plain_step(self) -> None:
        """Let the averages fade after a plain step, those of several steps at once."""
        self._plain_steps += 1
        if self._plain_steps == FADED_TOGETHER:
            self._plain_steps = 0
            for (_, feature), counts in list(self._counts.items()):
                if feature == NO_FEATURE:
                    counts.scale(PLAIN_DECAY**FADED_TOGETHER)

    def survival(self, source: DraftSource, length: int, feature: int = NO_FEATURE) -> list[float]:
        """Return for each position the probability that its draft token is accepted, with all before it."""
        return self._counts[source, feature].survival(length)

    def estimate(self, source: DraftSource, batch_size: int, length: int) -> Estimate:
        """Return the average of ``source`` for every sequence."""
        return Estimate(source, [self.survival(source, length)] * batch_size)


def num_accepted(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens at the beginning of ``drafted`` that are those of the text."""
    pairs = enumerate(zip(drafted, tokens, strict=False))
    return next((place for place, (one, token) in pairs if one != token), min(len(drafted), len(tokens)))
