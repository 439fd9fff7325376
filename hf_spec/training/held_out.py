"""Examples to evaluate on, shared by processes: what makes their shares equal in number is not counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard  # type: ignore[import-untyped]
from torch.utils.data import IterableDataset

from .data import numbers


class Filled(IterableDataset[dict[str, Any]]):
    """A stream whose number of examples is a multiple of ``share``, what all processes read at a time.

    Accelerate would fill up the last share of a stream with its first examples, and nobody could tell them from
    others. What fills it up here has no answers, so that nothing in it counts.
    """

    def __init__(self, dataset: Any, share: int) -> None:
        self.dataset, self.share = dataset, share

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count, example = 0, None
        for example in self.dataset:
            count += 1
            yield example
        for _ in range(-count % self.share):
            assert example is not None  # of an empty stream nothing is missing
            yield example | {"loss_mask": [0] * len(numbers(example["loss_mask"]))}


def source_of(dataset: Any) -> Any:
    """Return the dataset that all processes have alike, of which ``dataset`` is a share or filled up."""
    while isinstance(dataset, Filled | IterableDatasetShard):
        dataset = dataset.dataset
    return dataset


def without_repeats(inputs: dict[str, Any], accelerator: Any, size: int) -> dict[str, Any]:
    """Leave out of a last batch the repeated first examples, by which all processes have as many.

    ``size`` is how many examples a process reads at a time.
    """
    state = accelerator.gradient_state
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder < 1:
        return inputs
    kept = max(0, state.remainder - accelerator.process_index * size)  # of this process
    row = torch.arange(len(inputs["loss_mask"]), device=inputs["loss_mask"].device)
    return inputs | {"loss_mask": inputs["loss_mask"] * (row < kept)[:, None]}
