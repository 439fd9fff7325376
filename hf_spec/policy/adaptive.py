"""As many draft tokens as give most text per second, by what was accepted and what steps take.

A step with k draft tokens emits 1 + S(1) + ... + S(k) tokens on average, where S(j) is how often the j-th one is
accepted, and takes T(k) seconds. The length with the largest ratio is taken; 0 is a plain step. Leviathan et al.
(arXiv 2211.17192, section 3.4) choose so for a constant acceptance rate and T(k) = T(0) + c k; here both are measured.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..progress import counted
from .acceptance import FADED_TOGETHER, PRIOR_ACCEPTANCE, AcceptanceEstimator, Lag
from .base import MAX_LENGTH, DraftLengthPolicy, DraftPlan, DraftSource, Estimate, StepObservation, better_sources
from .cost import StepCost, size_class

if TYPE_CHECKING:
    from torch import Tensor

MIN_SPEEDUP = 1.03  # how much faster than plain steps, whose time is certain, drafting has to promise to be
TRIES = 1 / 128  # of the time, that trying each source which promises less may cost
FIRST_NGRAMS = 16  # draft tokens of all sequences in a first try of n-grams: they are often wrong, and these cost


class Idle:
    """Seconds since the last step of each source, in steps of batches of about the same size; shared by calls."""

    def __init__(self) -> None:
        self._now: defaultdict[int, float] = defaultdict(float)
        self._last: defaultdict[tuple[int, DraftSource], float] = defaultdict(float)

    def stepped(self, batch_size: int, source: DraftSource, seconds: float) -> None:
        """Note a step of ``source``."""
        size = size_class(batch_size)
        self._now[size] += seconds
        self._last[size, source] = self._now[size]

    def seconds(self, batch_size: int, source: DraftSource) -> float:
        """Return the seconds since the last step of ``source``."""
        size = size_class(batch_size)
        return self._now[size] - self._last[size, source]


class AdaptiveLength(DraftLengthPolicy):
    """Choose source and length of each step by expected tokens per second.

    ``first`` is tried of a source that was not measured. ``lengths`` bounds the choice: over static caches there are
    two, because each one costs a graph. ``stops_early``: a draft model's chain ends where its confidence says so.
    ``basis`` is for the statistics; ``agree`` returns the plan of the first of several processes. ``lag``: all rows
    end at the same length.
    """

    def __init__(
        self,
        cost: StepCost,
        acceptance: AcceptanceEstimator,
        idle: Idle,
        first: int,
        lengths: Sequence[int] = range(MAX_LENGTH + 1),
        stops_early: bool = False,
        basis: str = "by measured time",
        agree: Callable[[DraftPlan], DraftPlan] = lambda plan: plan,
        lag: Lag | None = None,
    ) -> None:
        super().__init__(acceptance)
        self.cost, self.idle, self.first, self.lengths = cost, idle, first, lengths
        self.stops_early, self._lag = stops_early, lag
        self._basis, self._agree = basis, agree
        self._chosen: Counter[int] = Counter()
        self._last = _plain(1)
        self._retried: DraftSource | None = None  # by the last plan, though plain steps promise more
        self._again: DraftSource | None = None  # the time of that step said nothing: it read what plain steps had left
        self._confidence: list[list[float]] = []  # of the draft tokens of this step, by sequence
        self._survival: list[list[float]] = []

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def plan(self, batch_size: int, estimates: Sequence[Estimate]) -> DraftPlan:
        self._last = self._agree(self._choose(batch_size, estimates))
        if self.stops_early and self._last.source is DraftSource.MODEL and self._is_known(batch_size):
            model = next(one for one in estimates if one.source is DraftSource.MODEL)
            self._last = replace(self._last, model_length=min(self.longest, max(map(len, model.by_sequence))))
        self._confidence = [[] for _ in range(batch_size)]
        self._survival = [[] for _ in range(batch_size)]
        return self._last

    def keep_drafting(self, confidence: Tensor) -> bool:
        """Tell whether another draft token is worth its time, by calibrated confidence and step times."""
        for kept, survival, own in zip(self._confidence, self._survival, confidence.tolist(), strict=True):
            kept.append(own if own == own else 0.0)  # a NaN in the draft's logits ends the chain, not the call
            calibrated = self.acceptance.calibration[DraftSource.MODEL](kept[-1])
            survival.append((survival[-1] if survival else 1.0) * calibrated)
        drafts = [source is DraftSource.MODEL for source in self._last.sources]
        so_far = mean_survival(one if own else () for one, own in zip(self._survival, drafts, strict=True))
        further = range(1, 1 + self._last.model_length - len(so_far))
        rest = (so_far[-1] * PRIOR_ACCEPTANCE**more for more in further)
        return self._best(len(drafts), DraftSource.MODEL, [*so_far, *rest])[0] > len(so_far)

    def observe(self, step: StepObservation) -> None:
        source = self._last.source if step.length else DraftSource.NONE
        self._chosen[step.length] += 1
        if step.seconds is None and step.length and self.cost.is_measured:
            self._again = self._retried
        self._retried = None
        if step.length == 0 and self._last.model_length and self._last.source is DraftSource.MODEL:
            self.acceptance.record_plain_step()  # the draft ran and proposed nothing: no time of a plain step
            return
        seconds = self.cost.observe(step.batch_size, source, min(step.length, MAX_LENGTH), step.seconds)
        self.idle.stepped(step.batch_size, source, seconds)
        if step.length == 0:
            self.acceptance.record_plain_step()
            return
        super().observe(step)
        if self._lag is not None:
            self._lag.record(step.accepted)
        calibration = self.acceptance.calibration[DraftSource.MODEL]
        rows = zip(self._confidence, self._last.sources, step.proposed, step.accepted, strict=False)
        for confidence, own, proposed, accepted in rows:
            if own is DraftSource.MODEL:  # after a rejected token nothing is known
                for position, probability in enumerate(confidence[: min(proposed, accepted + 1)]):
                    calibration.record(probability, position < accepted)

    def plain_seconds(self, batch_size: int) -> float:
        return self.cost.plain(batch_size) if self.cost.is_measured else 0.0

    def _options(self, batch_size: int, estimates: Sequence[Estimate]) -> list[_Option]:
        """List who could draft: n-grams alone, and for each sequence the better source."""
        if not any(map(any, [one.by_sequence for one in estimates])):
            return []  # nobody has a draft token
        ngrams = [one for one in estimates if one.source is DraftSource.NGRAM]
        options = {}
        for used in (ngrams, estimates) if len(ngrams) < len(estimates) else (ngrams,):
            sources = better_sources(used, batch_size)
            found = {one.source: one.by_sequence for one in used}
            rows = [found[own][row] if own in found else () for row, own in enumerate(sources)]
            if survival := mean_survival(rows):
                options[sources] = _Option(DraftPlan(1, sources).source, sources, survival)
        return list(options.values())

    def _choose(self, batch_size: int, estimates: Sequence[Estimate]) -> DraftPlan:
        options = self._options(batch_size, estimates)
        again, self._again = self._again, None
        if (one := next((one for one in options if one.source is again), None)) is not None:
            return one.plan(min(len(one.survival), self.cost.usual(batch_size, one.source)))
        return self._explored(batch_size, options) or self._fastest(batch_size, options)

    def _explored(self, batch_size: int, options: Sequence[_Option]) -> DraftPlan | None:
        """Return a plan for what was not measured, or not for a long time."""
        for one in options:
            if not self.cost.curve(batch_size, one.source):
                return one.plan(min(len(one.survival), self._first_of(one.source, batch_size)))
        plain = self.cost.plain(batch_size)
        if options and (not plain or self.idle.seconds(batch_size, DraftSource.NONE) > plain / TRIES):
            return _plain(batch_size)
        return None

    def _first_of(self, source: DraftSource, batch_size: int) -> int:
        """Return the length at which ``source`` is tried first."""
        if source is DraftSource.MODEL:
            return self.first
        most = min(self.first, max(1, FIRST_NGRAMS // batch_size))
        return max((length for length in self.lengths if 0 < length <= most), default=self.first)

    def _fastest(self, batch_size: int, options: Sequence[_Option]) -> DraftPlan:
        best, fastest, wait = None, 0.0, math.inf
        for one in options:
            length, speed = self._best(batch_size, one.source, one.survival)
            usual = min(len(one.survival), self.cost.usual(batch_size, one.source))
            until = self.cost.curve(batch_size, one.source)[usual] / TRIES - self.idle.seconds(batch_size, one.source)
            if length == 0 and until < 0:
                self._retried = one.source
                return one.plan(usual)
            wait = min(wait, until)
            if length and speed > fastest:
                best, fastest = one.plan(length), speed
        return best or _plain(batch_size, self._steps_of(wait, batch_size))

    def _steps_of(self, seconds: float, batch_size: int) -> int:
        """Return the plain steps in ``seconds``, at most those after which estimates change."""
        plain = self.cost.plain(batch_size)
        return max(1, math.ceil(min(FADED_TOGETHER, seconds / plain))) if plain else 1

    def _best(self, batch_size: int, source: DraftSource, survival: Sequence[float]) -> tuple[int, float]:
        """Return the best length of ``source``, 0 if none is worth it, and its tokens per second of a sequence."""
        plain, seconds = self.cost.plain(batch_size), self.cost.curve(batch_size, source)
        if not plain or not seconds:
            return len(survival), math.inf
        best, fastest = 0, MIN_SPEEDUP / plain
        share = 1.0 if self._lag is None or batch_size == 1 else self._lag.share()
        expected = [*itertools.accumulate((share * one for one in survival), initial=1.0)]
        for length in self.lengths:
            tokens = expected[min(length, len(survival))]
            if length and (speed := tokens / seconds[length]) > fastest:
                best, fastest = length, speed
            if length >= len(survival):
                break
        return best, fastest

    def _is_known(self, batch_size: int) -> bool:
        return bool(self.cost.plain(batch_size)) and bool(self.cost.curve(batch_size, DraftSource.MODEL))

    def __str__(self) -> str:
        total = sum(self._chosen.values())
        shown = self._chosen.most_common(4)
        parts = [f"{length or 'none'} in {count / total:.0%}" for length, count in shown] or ["none"]
        if others := total - sum(count for _, count in shown):
            parts.append(f"others in {others / total:.0%}")
        return f"{', '.join(parts)} of {counted(total, 'step')}, {self._basis}"


@dataclass(frozen=True)
class _Option:
    """One way to draft: who drafts for each sequence, and how probably the tokens are accepted, on average."""

    source: DraftSource
    sources: tuple[DraftSource, ...]
    survival: Sequence[float]

    def plan(self, length: int) -> DraftPlan:
        return DraftPlan(length, self.sources, length)


def _plain(batch_size: int, steps: int = 1) -> DraftPlan:
    return DraftPlan(0, (DraftSource.NONE,) * batch_size, plain_steps=steps)


def mean_survival(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean over sequences; a shorter draft counts as rejected beyond its end."""
    rows = list(rows)
    return [sum(column) / len(rows) for column in itertools.zip_longest(*rows, fillvalue=0.0)]
