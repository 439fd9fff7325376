"""Memory of buffers that graphs write in place, kept for the next call.

A CUDA graph is recorded for the addresses of such buffers. For other addresses torch records another one and keeps
both: that takes as long as tens of replays, in every call. So a call gets the memory of the call before it.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from transformers import CompileConfig

NEW_MEMORY = ("cpu",)  # devices on which a graph returns new memory each time: without CUDA graphs or the like
RECORDING_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile: they record graphs, where a device has them

Memory = dict[Hashable, Tensor]

# Of each target and draft, between its calls.
_memory_of: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()


class KeptBuffers:
    """The buffers of one call to ``owner``, a target or a draft, at the addresses that they had in the last call.

    A call that runs at the same time, in another thread or within this one, has memory of its own. Memory stays with
    ``owner``: for each buffer and each number of slots, as many rows as the largest batch had. Without ``owner``
    nothing is kept.
    """

    def __init__(self, owner: nn.Module | None = None) -> None:
        self._owner = owner
        self._memory: Memory | None = None if owner is None else _memory_of.pop(owner, {})

    def put(self, name: Hashable, states: Tensor) -> Tensor:
        """Copy ``states`` (batch, ...) to the memory for ``name`` and this shape; return it, fixed for graphs.

        ``states`` that are there already are returned as they are.
        """
        if self._memory is None:
            return _fixed(states.contiguous())
        key = name, states.shape[1:], states.dtype, states.device
        held = self._memory.get(key)
        if held is None or len(held) < len(states):
            with torch.inference_mode(False):  # or no call outside of that mode could write to it
                held = torch.empty_like(states, memory_format=torch.contiguous_format)
            self._memory[key] = held
        rows = held[: len(states)]
        if rows.data_ptr() == states.data_ptr():
            return states
        return _fixed(rows.copy_(states))

    def free(self) -> None:
        """Leave the memory to the next call."""
        if self._owner is not None and self._memory is not None:
            _memory_of[self._owner] = _memory_of.get(self._owner, {}) | self._memory
            self._memory = None


def buffers_of(owner: nn.Module, config: CompileConfig, device: torch.device) -> KeptBuffers:
    """Return the buffers of a call that is compiled with ``config``; they are kept if torch records graphs of it."""
    return KeptBuffers(owner if records_graphs(config, device) else None)


def records_graphs(config: CompileConfig, device: torch.device) -> bool:
    """Tell whether torch records graphs on ``device`` for a call that is compiled with ``config``."""
    asked = (config.options or {}).get("triton.cudagraphs", inductor.triton.cudagraphs)
    return device.type not in NEW_MEMORY and (config.mode in RECORDING_MODES or bool(asked))


def _fixed(buffer: Tensor) -> Tensor:
    """Tell graphs that the address of ``buffer`` does not change; return ``buffer``.

    Not where torch freezes graphs: they would read this buffer where a later call has another one.
    """
    if not inductor.freezing:
        torch._dynamo.mark_static_address(buffer)
    return buffer
