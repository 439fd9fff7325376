"""The interface of a draft-length policy, and what passes through it.

A step asks ``plan`` before it drafts, may ask ``keep_drafting`` after each draft token, and reports to ``observe``::

    plan = policy.plan(batch_size, estimates)     how many draft tokens, from which source
    policy.keep_drafting(confidence)              another one, given the draft's confidence in the last one?
    policy.observe(step)                          what the step took, and how much of it was accepted

A plan may depend on emitted tokens, acceptance and time. It never depends on draft tokens that were sampled and not
verified yet: dropping a sampled token because of its value would bias the output.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .acceptance import AcceptanceEstimator

MAX_LENGTH = 16  # draft tokens: longer chains were never worth their time on recorded answers


class DraftSource(enum.Enum):
    """Where the draft tokens of a sequence come from."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash takes many instructions

    NONE = "plain step"
    MODEL = "draft model"
    NGRAM = "n-grams"


@dataclass(frozen=True)
class Estimate:
    """How probably draft tokens of one source are accepted.

    ``by_sequence[b][j]`` is the probability that sequence b accepts more than j draft tokens. It does not rise with j.
    A sequence for which the source has no draft tokens has an empty list.
    """

    source: DraftSource
    by_sequence: Sequence[Sequence[float]]


@dataclass(frozen=True)
class DraftPlan:
    """At most ``length`` draft tokens per sequence, 0 for a plain step, from ``sources`` (one per sequence).

    A draft model drafts at most ``model_length``: more than ``length`` where ``keep_drafting`` ends its chains.
    Where ``length`` is 0, the plan holds for ``plain_steps`` steps of the same sequences.
    """

    length: int
    sources: tuple[DraftSource, ...]
    model_length: int = 0
    plain_steps: int = 1

    @property
    def source(self) -> DraftSource:
        """Return the source that decides how long the step takes: a draft model, if one sequence asks it."""
        if self.length == 0:
            return DraftSource.NONE
        return DraftSource.MODEL if DraftSource.MODEL in self.sources else DraftSource.NGRAM


@dataclass(frozen=True)
class StepObservation:
    """What a step did.

    ``length`` is that of the longest draft, ``proposed`` and ``accepted`` count draft tokens per sequence, on the
    longest path of a tree. ``seconds`` is ``None`` if the step did other work, too: it read the prompt, compiled, or
    the draft model had to read the tokens of earlier plain steps.
    """

    length: int
    seconds: float | None
    proposed: Sequence[int]
    accepted: Sequence[int]

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return len(self.proposed)


class DraftLengthPolicy(ABC):
    """Decide how many tokens each step of one call drafts.

    ``acceptance`` may be shared by calls. ``stops_early`` tells whether ``keep_drafting`` wants to be asked.
    """

    stops_early = False

    def __init__(self, acceptance: AcceptanceEstimator) -> None:
        self.acceptance = acceptance
        self._last = DraftPlan(0, ())

    @abstractmethod
    def plan(self, batch_size: int, estimates: Sequence[Estimate]) -> DraftPlan:
        """Choose source and length of the next step."""

    def keep_drafting(self, confidence: Tensor) -> bool:
        """Tell whether another draft token is worth its time, given the draft's top-1 probabilities (sequences,).

        Asked in steps whose source is a draft model, after each draft token but the last one allowed.
        """
        return True

    def observe(self, step: StepObservation) -> None:
        """Learn from a step that followed the last plan."""
        sources = self._last.sources
        if len(sources) != step.batch_size:  # requests came or went since
            sources = (self._last.source,) * step.batch_size
        for source in (DraftSource.MODEL, DraftSource.NGRAM):
            rows = [row for row, own in enumerate(sources) if own is source]
            self.acceptance.record(source, [step.proposed[row] for row in rows], [step.accepted[row] for row in rows])

    def plain_seconds(self, batch_size: int) -> float:
        """Return the seconds of a plain step; 0 if none was measured."""
        return 0.0

    @property
    def planned(self) -> int:
        """Return how many tokens a sequence of this step drafts at most."""
        return max(self._last.length, self._last.model_length)

    @property
    @abstractmethod
    def longest(self) -> int:
        """Return the largest length that ``plan`` may choose."""


def better_sources(estimates: Sequence[Estimate], batch_size: int) -> tuple[DraftSource, ...]:
    """Return for each sequence the source of which most draft tokens are expected to be accepted; ties: n-grams."""
    sources = []
    for row in range(batch_size):
        found = [(sum(one.by_sequence[row]), one.source is DraftSource.NGRAM, one) for one in estimates]
        found = [one for one in found if one[2].by_sequence[row]]
        sources.append(max(found, key=lambda one: one[:2])[2].source if found else DraftSource.NONE)
    return tuple(sources)
