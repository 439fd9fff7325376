"""Small integer and bool tensors on a device, cached: each operator costs a step the time to dispatch it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SHORTEST = 128  # where the shortest cached range ends
FIRST_NUMBER = -2  # where each begins: NO_PARENT is -1 and PAD_NODE is -2
HOST_VALUES = "_hf_spec_uploaded"  # the attribute in which a tensor keeps the Python values it was made from


def cached_arange(count: int, device: torch.device, start: int = 0) -> Tensor:
    """Return ``start``, ``start`` + 1, ... as a view (count,) of a shared tensor, which must not be written to.

    It is a cached ``torch.arange``. ``start`` is -2 or more.
    """
    if torch.compiler.is_compiling():
        return torch.arange(start, start + count, device=device)
    end = start + count
    return _arange(max(SHORTEST, 1 << max(0, end - 1).bit_length()), device)[start - FIRST_NUMBER : end - FIRST_NUMBER]


def cached_full(number: int, count: int, device: torch.device) -> Tensor:
    """Return ``number`` (-2 or more) ``count`` times, as a view (count,) that must not be written to."""
    if torch.compiler.is_compiling():
        return cached_arange(1, device, number).expand(count)
    return _full(number, count, device)


@functools.lru_cache(maxsize=256)
def _full(number: int, count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return cached_arange(1, device, number).expand(count)


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Put numbers, lists of them or lists of lists on ``device``, without waiting for a GPU.

    The values stay readable on the CPU, see ``to_list``.
    """
    here = torch.tensor(values, device="cpu")  # whatever torch's default is
    there = here.pin_memory().to(device, non_blocking=True) if _pins_memory(device.type) else here.to(device)
    setattr(there, HOST_VALUES, values)
    return there


@functools.cache
def _pins_memory(kind: str) -> bool:
    """Tell whether torch pins memory for devices of this ``kind``; Apple's share their memory with the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or kind == "mps":
        return False
    try:
        torch.empty(1, device="cpu").pin_memory()
    except RuntimeError:  # not every backend does
        return False
    return True


def to_list(tensor: Tensor) -> list[Any]:
    """Return the values of ``tensor``, without asking the device if ``to_device`` made it.

    Such a tensor must not have been written to.
    """
    known: Sequence[Any] | None = getattr(tensor, HOST_VALUES, None)
    return tensor.tolist() if known is None else list(known)


def identity_mask(count: int, device: torch.device) -> Tensor:
    """Return the cached mask (count, count) bool in which each node sees itself alone; it must not be written to."""
    if torch.compiler.is_compiling():
        return torch.eye(count, dtype=torch.bool, device=device)
    return _identity(count, device)


@functools.lru_cache(maxsize=64)
def _identity(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(count, dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=64)
def _arange(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode could not be used outside of it
        return torch.arange(FIRST_NUMBER, count, device=device)
