"""What PEFT changes of a target from outside: adapters for each row of a batch, tokens of its own in the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .hooks import hooked

NAMES = "adapter_names"  # of generate(adapter_names=[...]), an adapter for each row, where forwards have other rows


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that PEFT now gives an adapter per row, by its hooks on them; none in ordinary calls."""
    if not hasattr(model, "peft_config"):  # PEFT leaves it on whatever it changes
        return []
    return [module for module in model.modules() if any(map(_gives_names, module._forward_pre_hooks.values()))]


def with_adapters(
    layers: list[nn.Module], names_of: Callable[[list[str], int], list[str]]
) -> contextlib.AbstractContextManager[None]:
    """Let ``layers`` take ``names_of(PEFT's names, rows)`` in the forwards of this context, a name for each row."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {NAMES: names_of(kwargs[NAMES], len(args[0]))}  # PEFT's own hook came first

    return hooked(layers, before)


def adapter_of_inputs(model: Any) -> str | None:
    """Name the kind of adapter that PEFT now lets prepare the inputs of ``model`` (prompt tuning, prefix tuning)."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    return None if owner is model else f"{type(owner).__name__} {getattr(owner, 'peft_type', '')}".strip()


def _gives_names(hook: Any) -> bool:
    return NAMES in getattr(hook, "keywords", {})  # a functools.partial
