"""How probably draft tokens are accepted: by source and position, by match length, and by confidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice, repeat

from .base import MAX_LENGTH, DraftSource, Estimate
from .cost import size_class

DECAY = 0.98  # weight of a step after the next one; half of all weight is on the last 34 steps (replay: 0.97 to 0.98)
PLAIN_DECAY = DECAY ** (2 / 3)  # the same after a step that drafted nothing, and so taught nothing
PRIOR_ACCEPTANCE = 0.8  # of a draft token whose predecessor was accepted, before any was seen (replay: 0.7 to 0.8)
DISAGREED = 2.0  # the prior after a match of n tokens is n / (n + this): the next of n equal ones is equal, too
PRIOR_STEPS = 2.0  # steps that the prior weighs as much as, and earlier calls at most
PRIOR_LAG = 8.0  # draft tokens that all rows of a batch accept alike, before any was seen (replay: 4 to 8)
LEAVING = 0.3  # share of a step's time that its rows take one by one, and save by leaving (replay: 0.3 to 0.4)
BINS = 8  # of confidence, each calibrated by itself: as many as some hundred tokens fill
FADED_TOGETHER = 8  # plain steps after which the averages fade at once: plain steps have to be cheap
BIN_PRIOR = 5.0  # draft tokens per bin that were accepted as often as the confidence said, before any was seen

EXACT_LENGTHS = 4  # tokens of a match, up to which every length has its own record; then every power of two
NO_MATCH = 0  # the class of draft tokens of which nothing is known but source and position


class PositionCounts:
    """Acceptance by position: how many steps proposed more than j draft tokens, and how many accepted more than j.

    ``agreed``: the draft tokens follow a match of about so many tokens. Each that is accepted makes it longer.
    """

    def __init__(self, agreed: int = 0) -> None:
        self._agreed = agreed
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
        for position, (proposed, accepted) in enumerate(islice(seen, max(length, MAX_LENGTH))):
            prior = PRIOR_STEPS * self._prior(position) * survival
            survival = min(survival, (accepted + prior) / (proposed + PRIOR_STEPS))
            found.append(survival)
        self._survival = found
        return found[:length]

    def _prior(self, position: int) -> float:
        """Return the acceptance of a draft token whose predecessor was accepted, before any was seen."""
        agreed = self._agreed + position
        return agreed / (agreed + DISAGREED) if self._agreed else PRIOR_ACCEPTANCE


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


class Lag:
    """What the slowest row of a batch gains of what its rows accept on average.

    Where all rows end at the same length, the call ends with the slowest one. The others make it shorter only by
    leaving earlier.
    """

    def __init__(self) -> None:
        self._slowest = self._mean = 0.0  # accepted draft tokens of the slowest row, and of a row on average
        self._accepted: list[float] = []  # by each of the rows that are there now

    def begin_call(self) -> None:
        """Begin with other rows; earlier calls weigh as much as the prior."""
        self._close()
        share = min(1.0, PRIOR_LAG / self._mean) if self._mean else 0.0
        self._slowest, self._mean = share * self._slowest, share * self._mean

    def _close(self) -> None:
        slowest, mean = self._of_these_rows()
        self._slowest, self._mean, self._accepted = self._slowest + slowest, self._mean + mean, []

    def record(self, accepted: Sequence[int]) -> None:
        """Count the draft tokens that the rows accepted in a step."""
        known = self._accepted  # a call of another thread may replace it
        if len(accepted) != len(known):
            self._close()
            known = [0.0] * len(accepted)
        self._accepted = [count + more for count, more in zip(known, accepted, strict=True)]

    def share(self) -> float:
        """Return the share of an accepted draft token, on average over the rows, that makes a call shorter."""
        slowest, mean = self._of_these_rows()
        as_slow_as_all = (self._slowest + slowest + PRIOR_LAG) / (self._mean + mean + PRIOR_LAG)
        return LEAVING + (1 - LEAVING) * as_slow_as_all

    def _of_these_rows(self) -> tuple[float, float]:
        rows = self._accepted
        return (min(rows), sum(rows) / len(rows)) if rows else (0.0, 0.0)


class AcceptanceEstimator:
    """Acceptance of every source: averages by position, for n-grams by the length of their match, and calibrations."""

    def __init__(self) -> None:
        self._counts: dict[tuple[DraftSource, int], PositionCounts] = {}
        self.calibration: defaultdict[DraftSource, Calibration] = defaultdict(Calibration)
        self._lag: defaultdict[int, Lag] = defaultdict(Lag)  # by class of batch size
        self._plain_steps = 0  # since the averages last faded

    def _counts_of(self, source: DraftSource, agreed: int) -> PositionCounts:
        key = source, match_class(agreed)
        if (counts := self._counts.get(key)) is None:
            counts = self._counts.setdefault(key, PositionCounts(_middle_of(key[1])))
        return counts

    def begin_call(self, batch_size: int) -> None:
        """Let the averages of earlier calls weigh as much as the prior: other text may be accepted otherwise."""
        for (_, match), counts in list(self._counts.items()):
            if match == NO_MATCH:
                counts.limit(PRIOR_STEPS * batch_size)

    def lag_of_call(self, batch_size: int) -> Lag:
        """Return what was found in batches of about this size, at the start of a call whose rows end together."""
        lag = self._lag[size_class(batch_size)]
        lag.begin_call()
        return lag

    def record(
        self, source: DraftSource, proposed: Sequence[int], accepted: Sequence[int], agreed: int = NO_MATCH
    ) -> None:
        """Count how many tokens were proposed and accepted in one step, per sequence; none: another source drafted.

        ``agreed``: they were found by a match of so many tokens.
        """
        counts = self._counts_of(source, agreed)
        counts.scale(DECAY if any(proposed) else PLAIN_DECAY)
        if any(proposed):
            counts.record(proposed, accepted)

    def record_plain_step(self) -> None:
        """Let the averages fade after a plain step, those of several steps at once."""
        self._plain_steps += 1
        if self._plain_steps == FADED_TOGETHER:
            self._plain_steps = 0
            for (_, match), counts in list(self._counts.items()):
                if match == NO_MATCH:
                    counts.scale(PLAIN_DECAY**FADED_TOGETHER)

    def survival(self, source: DraftSource, length: int, agreed: int = NO_MATCH) -> list[float]:
        """Return for each position the probability that its draft token is accepted, with all before it."""
        return self._counts_of(source, agreed).survival(length)

    def estimate(self, source: DraftSource, batch_size: int, length: int) -> Estimate:
        """Return the average of ``source`` for every sequence."""
        return Estimate(source, [self.survival(source, length)] * batch_size)


def match_class(agreed: int) -> int:
    """Number the matches that are judged alike: of 1, 2, 3, 4, 5 to 7, 8 to 15, ... tokens; 0 for none."""
    return agreed if agreed <= EXACT_LENGTHS else EXACT_LENGTHS + agreed.bit_length() - 2


def _middle_of(match: int) -> int:
    """Return about how many tokens the matches of a class agree over."""
    return match if match <= EXACT_LENGTHS else 3 << match - EXACT_LENGTHS


def num_accepted(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens at the beginning of ``drafted`` that are those of the text."""
    pairs = enumerate(zip(drafted, tokens, strict=False))
    return next((place for place, (one, token) in pairs if one != token), min(len(drafted), len(tokens)))
