"""PEFT on a target: adapters that differ between the rows of a batch, and adapters that change the prompt."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from .hooks import hooked

# Arguments that PEFT's hooks give its layers, one entry per row of the user's batch. Our forwards have other rows.
NAMES = "adapter_names"  # of generate(adapter_names=[...])
OFFSETS = "alora_offsets"  # of activated LoRA: how many last tokens of a row are adapted, or None
TASKS = "task_ids"  # of Poly, (batch,)


def base_model(model: Any) -> Any:
    """Return the model inside the wrappers of PEFT and torch.compile.

    PEFT's adapter layers are inside the model and stay active. A compiled model's ``generate`` is that of the model
    inside.
    """
    if isinstance(model, OptimizedModule):
        return base_model(model._orig_mod)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return base_model(model.get_base_model())
    return model


def why_in_generate(model: Any) -> str | None:
    """Name the active adapter of a PEFT model that works through the ``generate`` of PEFT alone, if there is one.

    These are virtual tokens (prompt, prefix and P-tuning) and activated LoRA, which counts tokens of the prompt.
    """
    model = getattr(model, "_orig_mod", model)
    config: Any = getattr(model, "active_peft_config", None)
    return str(getattr(config.peft_type, "value", config.peft_type)) if is_in_generate(config) else None


def is_in_generate(config: Any) -> bool:
    """Tell whether an adapter of this ``config`` works through the ``generate`` of PEFT alone."""
    return bool(getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None))


def given_by_row(hook: Any) -> str | None:
    """Name the argument per row that ``hook``, if it is PEFT's, gives a layer."""
    keywords = getattr(hook, "keywords", ())  # a functools.partial
    known = keywords or getattr(getattr(hook, "__code__", None), "co_freevars", ())
    return next((name for name in (NAMES, OFFSETS, TASKS) if name in known), None)


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that PEFT now adapts row by row, by its hooks on them; usually there are none."""
    if not hasattr(model, "peft_config"):  # PEFT sets it on every model it changes
        return []
    return [module for module in model.modules() if any(map(given_by_row, module._forward_pre_hooks.values()))]


def adapts_ends(layers: list[nn.Module]) -> bool:
    """Tell whether adapters of these layers count the tokens that they change from the end of what is read."""
    return any(given_by_row(hook) == OFFSETS for layer in layers for hook in layer._forward_pre_hooks.values())


def with_adapters(
    layers: list[nn.Module], rows_of: Callable[[int], Sequence[int]], are_steps: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Give each row in the forwards of this context the adapter of its row in the user's batch.

    ``rows_of(n)`` maps the n rows of a forward to rows of that batch. ``are_steps``: all tokens come after the prompt,
    so that activated LoRA adapts all of them or none.
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


def active_adapters(model: nn.Module) -> Hashable:
    """Return which adapters of PEFT are in ``model``, and which of them are active, disabled and merged, by layer."""
    if not hasattr(model, "peft_config"):
        return ()
    return tuple(_state(module) for module in model.modules() if "_active_adapter" in vars(module))


def _state(module: nn.Module) -> Hashable:
    return tuple(map(weakref.ref, module.modules())), *state_of_adapters(vars(module))


def state_of_adapters(own: dict[str, Any]) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """Return which adapters are active, whether they are disabled, and which are merged, by a layer's attributes."""
    active = own["_active_adapter"]
    names = (active,) if isinstance(active, str) else tuple(active)
    return names, bool(own.get("_disable_adapters")), tuple(own.get("merged_adapters", ()))


def adapter_of_inputs(model: Any) -> str | None:
    """Name the kind of PEFT adapter that now prepares the inputs of ``model`` (prompt tuning, prefix tuning)."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    return None if owner is model else f"{type(owner).__name__} {getattr(owner, 'peft_type', '')}".strip()
