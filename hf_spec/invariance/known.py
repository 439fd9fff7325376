"""What the bits of a model depend on, to tell whether it still is as it was when it was tried."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..packing.weight import PackedWeight, layout_of
from ..scoring.adapters import active_adapters
from ..scoring.hooks import is_ours

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes of modules that are looked at by themselves, and those that transformers sets in a call.
LEFT_OUT = {*HOOKS, "_parameters", "_buffers", "_modules", "_output_capturing_hooks_installed", "rope_deltas"}


class State:
    """What a model is like: equal to another if nothing was changed, added or replaced.

    It looks at modules, weights, hooks, replaced forwards, attributes, configs, adapters, and settings of torch.
    """

    def __init__(self, model: Any) -> None:
        self._values: list[Hashable] = [settings_of_torch(), active_adapters(model)]
        self._objects: list[weakref.ref[Any]] = []  # compared by identity; they must not keep the model
        self._configs: set[int] = set()  # many modules have the same
        for module in model.modules():
            self._note(module)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, State)
            and self._values == other._values
            and len(self._objects) == len(other._objects)
            and all(one() is known() is not None for one, known in zip(self._objects, other._objects, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def _note(self, module: nn.Module) -> None:
        own = vars(module)
        self._objects += [weakref.ref(module), weakref.ref(type(module).forward)]
        # No number of a hook is used twice.
        hooks = tuple(number for name in HOOKS for number, hook in own.get(name, {}).items() if not is_ours(hook))
        self._values.append(hooks)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self._objects.append(weakref.ref(tensor))
                self._values.append(_layout(tensor))
                if isinstance(tensor, PackedWeight) and tensor._storage.packed is not None:
                    self._objects.append(weakref.ref(tensor._storage.packed))
        for name in sorted(own.keys() - LEFT_OUT):
            self._note_attribute(name, own[name])

    def _note_attribute(self, name: str, value: Any) -> None:
        try:
            self._objects.append(weakref.ref(value))
        except TypeError:  # numbers, texts, lists
            self._values.append((name, repr(value)))
        else:
            if isinstance(value, dict | set):
                self._values.append((name, repr(value)))
            elif isinstance(value, PreTrainedConfig) and id(value) not in self._configs:
                self._configs.add(id(value))
                self._values.append((name, repr(vars(value))))


def _layout(tensor: Tensor) -> Hashable:
    """Return what decides by which kernel a weight is computed with, and how often its values were changed."""
    changed = tensor._version if _is_plain(tensor) and not tensor.is_inference() else 0
    return layout_of(tensor), tensor.dtype, tensor.shape, str(tensor.device), changed, address(tensor)


def address(tensor: Tensor) -> int:
    """Return where the values of a plain tensor begin, 0 for others."""
    return tensor.data_ptr() if _is_plain(tensor) else 0


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` may be asked for its memory: packed weights would turn into plain ones."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def settings_of_torch() -> tuple[Hashable, ...]:
    """Return the settings of torch by which it chooses kernels."""
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return torch.get_num_threads(), *autocast, *settings_without_errors()


def settings_without_errors() -> tuple[Hashable, ...]:
    """Return the settings that no forward in the mode looks at: for other threads and autocast it raises errors."""
    cuda = torch.backends.cuda.matmul
    return (
        cuda.fp32_precision,  # the getters of torch's older settings fail once a newer one is set
        cast(Any, torch.backends.mkldnn).matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_bf16_reduced_precision_reduction,
        tuple(nn.modules.module._global_forward_hooks),
        tuple(nn.modules.module._global_forward_pre_hooks),
    )
