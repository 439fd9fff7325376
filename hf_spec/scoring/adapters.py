"""What PEFT changes of a target from outside: adapters for each row of a batch, tokens of its own in the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .hooks import hooked

# What PEFT's hooks give its layers for each row of a batch, where forwards have other rows:
NAMES = "adapter_names"  # of generate(adapter_names=[...])
OFFSETS = "alora_offsets"  # of activated LoRA: how many of a row's last tokens are adapted, or None
TASKS = "task_ids"  # of Poly, (batch,)


def given_by_row(hook: Any) -> str | None:
    """Name what ``hook``, if it is one of PEFT, gives a layer for each row of a batch."""
    keywords = getattr(hook, "keywords", ())  # a functools.partial
    known = keywords or getattr(getattr(hook, "__code__", None), "co_freevars", ())
    return next((name for name in (NAMES, OFFSETS, TASKS) if name in known), None)


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that PEFT now adapts row by row, by its hooks on them; none in ordinary calls."""
    if not hasattr(model, "peft_config"):  # PEFT leaves it on whatever it changes
        return []
    return [module for module in model.modules() if any(map(given_by_row, module._forward_pre_hooks.values()))]


def with_adapters(
    layers: list[nn.Module], rows_of: Callable[[int], Sequence[int]], are_steps: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Let the rows of the forwards of this context be adapted as the rows ``rows_of(their number)`` of PEFT's batch.

    ``are_steps``: all their tokens come after the prompt, so that activated LoRA adapts all of them or none.
    """

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:  # PEFT's own hook came first
        rows, picked = rows_of(len(args[0])), dict(kwargs)
        if kwargs.get(NAMES) is not None:
            picked[NAMES] = [kwargs[NAMES][row] for row in rows]
        if kwargs.get(OFFSETS) is not None:
            offsets = [kwargs[OFFSETS][row] for row in rows]
            picked[OFFSETS] = [offset and args[0].shape[1] for offset in offsets] if are_steps else offsets
        if kwargs.get(TASKS) is not None:
            picked[TASKS] = kwargs[TASKS][torch.tensor(rows, device=kwargs[TASKS].device)]
        return args, picked

    return hooked(layers, before)


def adapter_of_inputs(model: Any) -> str | None:
    """Name the kind of adapter that PEFT now lets prepare the inputs of ``model`` (prompt tuning, prefix tuning)."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    return None if owner is model else f"{type(owner).__name__} {getattr(owner, 'peft_type', '')}".strip()
