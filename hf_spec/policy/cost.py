"""What a step takes, by batch size, source and length: measured, or worked out from shapes without a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn

from ..scoring.modules import weights_of
from .base import MAX_LENGTH, DraftSource

SAMPLES = 32  # latest steps of each length, whose median counts: other programs disturb for less long
LAYER = 500_000, 50_000_000  # parameters read in the time that a layer's operators take: on a CPU, an accelerator
# Extra time of a CPU's float32 forward of several tokens, as a share of one (docs/performance.md). With weights packed
# into blocks there is none (docs/packing.md).
SECOND_TOKEN = 0.4
NEXT_TOKEN = 0.05, 0.0025  # extra time of each further token, as a share of one: on a CPU, an accelerator
# What is outside of the forwards, in layers: counted in operators and instructions of Python, with equal weight
# (tests/policy/test_counted_cost.py).
VERIFYING = 1.0  # masks for several tokens, the rule, the commit
DRAFTING = 1.5  # in addition where a draft model is asked: it reads accepted tokens, and its tokens are chosen
# Time in which a score is made ready to sample from it (temperature, top-k, softmax), in parameters that are read:
# 0.03 ms for 2,048 scores where a CPU reads 1.8 million parameters in a millisecond (examples/default_speed.py).
SCORE = 26
UNEQUAL = 0.15  # extra operators of a layer where rows have unequal lengths: writes by index, masks for each row


class StepCost(ABC):
    """The time of a step by length, for one target and draft; ``is_measured``: in seconds."""

    is_measured = False

    @abstractmethod
    def plain(self, batch_size: int) -> float:
        """Return the seconds of a plain step; 0 while they are not known."""

    @abstractmethod
    def curve(self, batch_size: int, source: DraftSource) -> Sequence[float]:
        """Return the seconds of steps of ``source`` by length, from 0 to MAX_LENGTH; empty while not known."""

    @abstractmethod
    def usual(self, batch_size: int, source: DraftSource) -> int:
        """Return the length at which ``source`` is tried again after a long time without it."""

    @abstractmethod
    def observe(self, batch_size: int, source: DraftSource, length: int, seconds: float | None) -> float:
        """Note what a step took, if that is known, and return what it counts as."""


class MeasuredCost(StepCost):
    """Medians of measured steps, smoothed by a line through all lengths.

    Batches of 1, 2, 3 to 4, 5 to 8, ... sequences count as one size.
    """

    is_measured = True

    def __init__(self) -> None:
        self._samples: dict[tuple[int, DraftSource], dict[int, deque[float]]] = {}
        self._since_median: dict[tuple[int, DraftSource], int] = {}
        self._medians: dict[tuple[int, DraftSource], dict[int, float]] = {}
        self._curves: dict[tuple[int, DraftSource], list[float]] = {}

    def observe(self, batch_size: int, source: DraftSource, length: int, seconds: float | None) -> float:
        key = size_class(batch_size), source
        samples = self._samples.setdefault(key, {})
        if length not in samples:  # the first step of a kind warms up and does not count
            samples[length] = deque(maxlen=SAMPLES)
            return seconds or 0.0
        if seconds is None:
            return 0.0
        own = samples[length]
        own.append(seconds)
        self._since_median[key] = since = self._since_median.get(key, 0) + 1
        if length == 0 and len(own) > 8 and since < 8:  # plain steps have to be cheap, and their median is known
            return seconds
        self._since_median[key] = 0
        # A dict of its own: another thread may be looking through the old one.
        self._medians[key] = {**self._medians.get(key, {}), length: median(samples[length])}
        for place in list(self._curves):
            if place[0] == key[0]:
                self._curves.pop(place, None)
        return seconds

    def plain(self, batch_size: int) -> float:
        return self._medians.get((size_class(batch_size), DraftSource.NONE), {}).get(0, 0.0)

    def curve(self, batch_size: int, source: DraftSource) -> Sequence[float]:
        key = size_class(batch_size), source
        if (curve := self._curves.get(key)) is None:  # another thread may drop it at any moment
            times = self._medians.get(key, {})
            weights = {length: len(self._samples[key][length]) for length in times}
            curve = self._curves[key] = _on_line(times, weights, self.plain(batch_size)) if times else []
        return curve

    def usual(self, batch_size: int, source: DraftSource) -> int:
        return max(self._medians.get((size_class(batch_size), source), {}), default=0)


def size_class(batch_size: int) -> int:
    """Number the batch sizes that are measured together: 1, 2, 3 to 4, 5 to 8, ... sequences."""
    return max(0, batch_size - 1).bit_length()


def _on_line(times: dict[int, float], weights: dict[int, int], plain: float) -> list[float]:
    """Return seconds by length: medians, and between and beyond them the straight line through all of them.

    Below the second length that was measured the line lies no higher than between a ``plain`` step and these two, so
    that short drafts are tried where a line through long ones says that they take as long.
    """
    if len(times) == 1:
        times, weights = {0: plain} | times, {0: 1} | weights
    total = sum(weights.values())
    middle = sum(weight * length for length, weight in weights.items()) / total
    mean = sum(weights[length] * taken for length, taken in times.items()) / total
    spread = sum(weight * (length - middle) ** 2 for length, weight in weights.items())
    slope = sum(weights[length] * (length - middle) * (taken - mean) for length, taken in times.items()) / spread
    line = [mean + max(0.0, slope) * (length - middle) for length in range(MAX_LENGTH + 1)]
    for end in sorted(times)[:2] if plain else ():
        for length in range(1, min(end, MAX_LENGTH + 1)):
            line[length] = min(line[length], plain + (times[end] - plain) * length / end)
    return [max(times.get(length, taken), 1e-9) for length, taken in enumerate(line)]


@dataclass(frozen=True)
class ModelShape:
    """What one forward of a model has to do: its layers, and the parameters that it reads."""

    layers: int
    parameters: int

    def seconds(
        self, tokens: int, is_accelerator: bool, is_half: bool, is_in_blocks: bool = False, are_unequal: bool = False
    ) -> float:
        """Return the time of a forward of ``tokens`` tokens, in parameters that are read in that time.

        ``is_in_blocks``: weights are packed into blocks. ``are_unequal``: these are rows of unequal lengths.
        """
        second = 0.0 if is_half or is_accelerator or is_in_blocks or tokens == 1 else SECOND_TOKEN
        share = 1 + second + NEXT_TOKEN[is_accelerator] * (tokens - 1) / (2 if is_half else 1)
        layers = self.layers * (1 + UNEQUAL) if are_unequal else self.layers
        return layers * LAYER[is_accelerator] + self.parameters * share


def shape_of(model: nn.Module) -> ModelShape:
    """Count layers and parameters; the head is one layer more, and so is the choice of a token."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = getattr(model, "layers", None)
    count = len(layers) if layers is not None else int(getattr(text, "num_hidden_layers", 1) or 1)
    return ModelShape(count + 1, sum(map(Tensor.numel, weights_of(model))))


class ShapeCost(StepCost):
    """Step times worked out from shapes: the same on every machine, as a call with a seed needs them.

    The unit is the time in which one parameter is read. ``draft(length)`` lists the draft's forwards.
    ``nodes(length)`` counts the draft tokens that are verified, more than ``length`` in a tree. ``scores`` is the size
    of a distribution that is sampled from on a CPU, and 0 elsewhere.
    """

    def __init__(
        self,
        target: ModelShape,
        draft: Callable[[int], Sequence[ModelShape]],
        nodes: Callable[[int], int],
        is_accelerator: bool,
        is_half: bool,
        is_in_blocks: bool = False,
        scores: int = 0,
    ) -> None:
        self._target, self._draft, self._nodes = target, draft, nodes
        self._machine, self._sampling = (is_accelerator, is_half, is_in_blocks), SCORE * scores
        self._curves: dict[tuple[int, DraftSource], list[float]] = {}

    def plain(self, batch_size: int) -> float:
        return self._target.seconds(batch_size, *self._machine) + batch_size * self._sampling

    def curve(self, batch_size: int, source: DraftSource) -> Sequence[float]:
        key = batch_size, source
        if key not in self._curves:
            self._curves[key] = [self._seconds(*key, length) for length in range(MAX_LENGTH + 1)]
        return self._curves[key]

    def usual(self, batch_size: int, source: DraftSource) -> int:
        return 1  # what a retry costs is known: the shortest one is the cheapest

    def observe(self, batch_size: int, source: DraftSource, length: int, seconds: float | None) -> float:
        return self.curve(batch_size, source)[length]

    def draft_token(self, batch_size: int, length: int) -> float:
        """Return the time in which a draft model drafts one of ``length`` tokens, in plain steps."""
        return self._drafting(batch_size, length) / length / self.plain(batch_size)

    def _seconds(self, batch_size: int, source: DraftSource, length: int) -> float:
        if length == 0:
            return self.plain(batch_size)
        tokens, layer = batch_size * (1 + self._nodes(length)), LAYER[self._machine[0]]
        verified = self._target.seconds(tokens, *self._machine, batch_size > 1) + tokens * self._sampling
        verified += VERIFYING * layer
        if source is not DraftSource.MODEL:
            return verified
        drawn = batch_size * self._nodes(length) * self._sampling
        return verified + self._drafting(batch_size, length) + drawn + DRAFTING * layer

    def _drafting(self, batch_size: int, length: int) -> float:
        return sum(forward.seconds(batch_size, *self._machine, batch_size > 1) for forward in self._draft(length))
