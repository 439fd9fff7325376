"""Sums over batches of how well a draft predicts a given text, in addition to what ``generate`` measures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .losses import StepMetrics


class RunningSums:
    """The sums of metrics over batches, each one (steps,)."""

    NAMES = ("loss", "divisor", "counted", "correct", "overlap", "inside")

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (names, steps)

    def add(self, metrics: StepMetrics, divisor: Tensor, counted: Tensor) -> None:
        """Add a batch: its loss sums, their ``divisor`` (trained steps,), and metrics of the ``counted`` positions.

        A draft token counts as correct only if those of all earlier steps were, as in a chain.
        """
        correct = (metrics.correct & counted).long().cumprod(0)
        divisor = functional.pad(divisor, (0, len(counted) - len(divisor)))
        sums = [metrics.losses, divisor, counted.sum((1, 2)), correct.sum((1, 2))]
        sums += [(metrics.overlap * counted).sum((1, 2)), (metrics.inside & counted).sum((1, 2))]
        found = torch.stack([one.cpu().double() for one in sums])
        self.sums = found if self.sums is None else self.sums + found

    def averages(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Return the averages over all positions; ``reduce`` adds the sums of other processes.

        ``accuracy_k``: how often the first k draft tokens are the target's best tokens. ``expected_length``: tokens
        that a greedy chain of all steps would emit per verification. ``overlap_k``: how often a sampled draft token k
        would be accepted if those before were. ``in_vocabulary``: how often the draft has the target's best token.
        """
        if self.sums is None:
            return {}
        sums = dict(zip(self.NAMES, reduce(self.sums), strict=True))
        counted = sums["counted"].clamp(min=1)
        accuracy, overlap = (sums["correct"] / counted).tolist(), (sums["overlap"] / counted).tolist()
        metrics = {"expected_length": 1 + sum(accuracy), "in_vocabulary": (sums["inside"] / counted)[0].item()}
        metrics |= {f"accuracy_{step}": share for step, share in enumerate(accuracy, start=1)}
        return metrics | {f"overlap_{step}": share for step, share in enumerate(overlap, start=1)}

    def loss(
        self, step_weights: Tensor, together: bool, reduce: Callable[[Tensor], Tensor] = lambda sums: sums
    ) -> float:
        """Return the loss over all batches, each trained step weighted by ``step_weights`` (trained steps,).

        ``together``: all steps have one divisor, the weighted sum of theirs.
        """
        assert self.sums is not None
        sums = reduce(self.sums)[:, : len(step_weights)]
        if together:
            return float((step_weights.cpu() * sums[0]).sum() / (step_weights.cpu() * sums[1]).sum().clamp(min=1))
        return float((step_weights.cpu() * sums[0] / sums[1].clamp(min=1)).sum())
