"""Count over batches how a draft does on a text that it is shown, beside what ``generate`` measures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import Marks


class Tally:
    """Sum marks over batches, each figure (steps,)."""

    NAMES = ("loss", "divisor", "rows", "right", "overlap", "inside")

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (figures, steps)

    def add(self, marks: Marks, divisor: Tensor, rows: Tensor) -> None:
        """Add a batch: its loss sums and their ``divisor`` (steps,), and marks of the ``rows`` that count.

        A guess counts as right if those of all earlier steps were, as in a chain.
        """
        right = (marks.right & rows).long().cumprod(0)
        figures = [marks.losses, divisor, rows.sum((1, 2)), right.sum((1, 2))]
        figures += [(marks.overlap * rows).sum((1, 2)), (marks.inside & rows).sum((1, 2))]
        found = torch.stack([figure.double().cpu() for figure in figures])
        self.sums = found if self.sums is None else self.sums + found

    def figures(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Return what the counts come to; ``reduce`` adds those of other processes.

        ``accuracy_k``: how often the first k guesses are the target's best tokens. ``expected_length``: what a greedy
        chain of all steps would emit per verification. ``overlap_k``: how often a sampled guess k would be accepted if
        those before were. ``in_vocabulary``: how often the draft can guess the target's best token at all.
        """
        if self.sums is None:
            return {}
        sums = dict(zip(self.NAMES, reduce(self.sums), strict=True))
        rows = sums["rows"].clamp(min=1)
        accuracy, overlap = (sums["right"] / rows).tolist(), (sums["overlap"] / rows).tolist()
        figures = {"expected_length": 1 + sum(accuracy), "in_vocabulary": (sums["inside"] / rows)[0].item()}
        figures |= {f"accuracy_{step}": share for step, share in enumerate(accuracy, start=1)}
        return figures | {f"overlap_{step}": share for step, share in enumerate(overlap, start=1)}

    def loss(self, step_weights: Tensor, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> float:
        """Return the loss over all batches, (steps,) weighted."""
        assert self.sums is not None
        sums = reduce(self.sums)
        return float((step_weights.cpu() * sums[0] / sums[1].clamp(min=1)).sum())
