"""The same number of draft tokens in every step."""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import AcceptanceEstimator
from .base import DraftLengthPolicy, DraftPlan, Estimate, StepObservation, better_sources

UNBOUNDED = 1 << 30  # more draft tokens than any context has


class FixedLength(DraftLengthPolicy):
    """Draft ``length`` tokens in every step, whatever is accepted; ``reason`` is for the statistics."""

    def __init__(self, length: int, acceptance: AcceptanceEstimator, reason: str = "as asked for") -> None:
        super().__init__(acceptance)
        self.length, self._reason = length, reason

    def plan(self, batch_size: int, estimates: Sequence[Estimate]) -> DraftPlan:
        steps = 1 if self.length else UNBOUNDED  # nothing is to be decided again
        self._last = DraftPlan(self.length, better_sources(estimates, batch_size), self.length, steps)
        return self._last

    def observe(self, step: StepObservation) -> None:
        """Learn from a step, unless nothing is ever drafted."""
        if self.length:
            super().observe(step)

    @property
    def longest(self) -> int:
        return self.length

    def __str__(self) -> str:
        return f"{self.length} draft tokens in every step, {self._reason}"


def unbounded(acceptance: AcceptanceEstimator) -> FixedLength:
    """Return the policy of drafters for which somebody else bounds the length."""
    return FixedLength(UNBOUNDED, acceptance)
