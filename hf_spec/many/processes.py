"""Processes that hold a copy of the model each: share the prompts, and give everyone all answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .prompts import Pending

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]

T = TypeVar("T")


class Processes:
    """Be one of several processes, which do the same in turns, or the only one.

    A process whose work fails would leave the others waiting for its part. So they tell each other, and fail together.
    """

    def __init__(self, accelerator: Accelerator | PartialState | None) -> None:
        self.count = 1 if accelerator is None else accelerator.num_processes
        self.number = 0 if accelerator is None else accelerator.process_index

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

    def same(self, read: Callable[[], list[Pending]]) -> list[Pending]:
        """Return what ``read`` gives here. Errors: a ValueError if it gives other prompts in another process."""
        prompts: list[Pending] = []

        def digest() -> str:
            prompts.extend(read())
            return hashlib.sha256(json.dumps([one.ids for one in prompts]).encode()).hexdigest()

        if len(set(self.together(digest))) > 1:
            raise ValueError(
                "the processes were given different prompts: pass the same ones, in the same order, to each. "
                "generate_many shares them out itself"
            )
        return prompts

    def mine(self, prompts: Sequence[Pending]) -> list[Pending]:
        """Choose this process's part of ``prompts``: as many as the others, and about as long."""
        return sorted(prompts, key=lambda one: (len(one.ids), one.index))[self.number :: self.count]
