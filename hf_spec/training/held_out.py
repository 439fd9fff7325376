"""Examples split over processes: in evaluation, those added to make the shares equal are not counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard  # type: ignore[import-untyped]
from torch.utils.data import IterableDataset

from .data import numbers


class Filled(IterableDataset[dict[str, Any]]):
    """A stream padded to a multiple of ``share`` examples, the number that all processes together read at a time.

    Accelerate would pad the last share with the stream's first examples, which nobody could tell from the others.
    The padding here has no answers, so that none of it counts.
    """

    def __init__(self, dataset: Any, share: int) -> None:
        self.dataset, self.share = dataset, share

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count, example = 0, None
        for example in self.dataset:
            count += 1
            yield example
        for _ in range(-count % self.share):
            assert example is not None  # an empty stream needs no padding
            yield example | {"loss_mask": [0] * len(numbers(example["loss_mask"]))}


class Unsharded(IterableDataset[dict[str, Any]]):
    """A stream of which accelerate gives each process every so many examples, and not some of its files.

    Files differ in length, so that one process would take fewer steps than the others, and these would wait for it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Let the stream shuffle anew."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def source_of(dataset: Any) -> Any:
    """Return the original dataset, the same on all processes, of which ``dataset`` is a share or a padded stream."""
    while isinstance(dataset, Filled | IterableDatasetShard):
        dataset = dataset.dataset
    return dataset


def without_repeats(inputs: dict[str, Any], accelerator: Any, size: int) -> dict[str, Any]:
    """Mask the first examples that accelerate repeats in the last batch to give all processes equally many.

    ``size`` is how many examples a process reads at a time.
    """
    state = accelerator.gradient_state
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder < 1:
        return inputs
    kept = max(0, state.remainder - accelerator.process_index * size)  # examples of this process that count
    row = torch.arange(len(inputs["loss_mask"]), device=inputs["loss_mask"].device)
    return inputs | {"loss_mask": inputs["loss_mask"] * (row < kept)[:, None]}
