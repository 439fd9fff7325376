"""Data-parallel processes, each with its own copy of the model: what they do together."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]

T = TypeVar("T")


class Processes:
    """One of several processes that do the same work on different data, or the only one.

    A process that failed alone would leave the others waiting for its part. So errors are shared, and all fail.
    """

    def __init__(self, accelerator: Accelerator | PartialState | None) -> None:
        self.count = 1 if accelerator is None else accelerator.num_processes
        self.number = 0 if accelerator is None else accelerator.process_index

    @property
    def is_first(self) -> bool:
        """Tell whether this is the process that writes the results of all."""
        return self.number == 0

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` in every process and return all results, in order. Errors: those of any process, in all."""
        if self.count == 1:
            return [work()]
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as found:
            error = found
        told = None if error is None else f"{type(error).__name__}: {error}"
        everyone = gather_object([(result, told)])
        if error is not None:
            raise error
        for number, (_, problem) in enumerate(everyone):
            if problem is not None:
                raise RuntimeError(f"process {number} failed, so that its prompts have no answers: {problem}")
        return [result for result, _ in everyone]

    def by_the_first(self, work: Callable[[], T]) -> T | None:
        """Do ``work`` in the first process only, and return its result in all. Errors: its own, in all."""
        return self.together(lambda: work() if self.is_first else None)[0]

    def same(self, read: Callable[[], list[T]], key: Callable[[T], Any]) -> list[T]:
        """Return the result of ``read``. Errors: a ValueError if its items have other ``key``s in another process."""
        found: list[T] = []

        def digest() -> str:
            found.extend(read())
            return hashlib.sha256(json.dumps([key(one) for one in found]).encode()).hexdigest()

        if len(set(self.together(digest))) > 1:
            raise ValueError(
                "the processes were given different prompts: pass the same ones, in the same order, to each. "
                "They share them out themselves"
            )
        return found


def launched(device: str | None) -> tuple[PartialState | None, str | None]:
    """Return the state and the device of a process that accelerate or torchrun has launched as one of several.

    A single process gets ``None`` and the ``device`` that was asked for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, device
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.accelerator.is_available())
    return state, device or str(state.device)


def part() -> None:
    """Destroy the process group, once this process has done its work.

    The threads of a gloo group race with the end of the interpreter, and sometimes abort it.
    """
    import torch.distributed as group

    if group.is_available() and group.is_initialized():
        group.destroy_process_group()
