"""What can change a model's forward and so invalidate findings about it, as far as it is cheap to detect."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .adapters import NAMES, adapter_of_inputs, given_by_row, state_of_adapters
from .hooks import is_ours
from .modules import distinct, modules_of
from .plain import precision

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS_OF = itemgetter(*_HOOKS)
_STATE = itemgetter("training", "_parameters", *_HOOKS)
_CONFIG, _VALUES, _DTYPE = methodcaller("get", "config"), methodcaller("values"), attrgetter("dtype")
_RARE = frozenset(("forward", "_compiled_call_impl", "_active_adapter"))  # only changed modules have these attributes
_LABELS = ("id2label", "label2id")  # of configurations: may be thousands, and no forward reads them


def way_of_forward(model: PreTrainedModel) -> Hashable:
    """Return a key of what the forward of ``model`` is made of, but for the values of its weights.

    It holds hooks, the types of modules and weights, PEFT's active adapters, the configurations, the precision, and
    replaced functions. It is computed in every call, so nothing here is done module by module in Python.
    """
    modules = modules_of(model)
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    owns = [*map(vars, modules)]
    training, parameters, *hooks = zip(*map(_STATE, owns), strict=True)
    changes: list[Hashable] = []
    if any(chain(*hooks)) or not all(map(_RARE.isdisjoint, owns)):
        changes += [(place, *found) for place, own in enumerate(owns) if (found := _changes(own))]
    weights = distinct(chain.from_iterable(map(_VALUES, parameters)))
    functions: chain[Any] = chain((kind.forward for kind in dict.fromkeys(kinds)), _functions(model))
    return (
        (precision(model), adapter_of_inputs(model)),
        (kinds, training, tuple(map(len, parameters))),
        (*map(type, weights), *map(_DTYPE, weights)),
        tuple(changes),
        tuple(map(_frozen, distinct(map(_CONFIG, owns)))),
        tuple(map(_identity, functions)),
    )


def foreign_hooks(model: nn.Module) -> list[str]:
    """Name the forward hooks of other packages on ``model`` and its modules, as "module: hook".

    Those of this package, and of PEFT's adapters for each row, do not count.
    """
    if not any(chain.from_iterable(map(_HOOKS_OF, map(vars, modules_of(model))))):
        return []  # as in most calls, without the names
    return [
        f"{name or type(module).__name__}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for name, module in model.named_modules()
        for hooks in _HOOKS
        for hook in list(getattr(module, hooks).values())
        if not is_ours(hook) and given_by_row(hook) is None
    ]


def _changes(own: dict[str, Any]) -> list[Hashable]:
    """Return how a single module was changed, by its attributes."""
    found: list[Hashable] = []
    for hooks in _HOOKS:
        if marks := _hooks(own[hooks].values()):
            found += hooks, *marks
    if "forward" in own and not is_ours(own["forward"]):
        found.append(_identity(own["forward"]))
    if "_compiled_call_impl" in own and own["_compiled_call_impl"] is not None:
        found.append("compiled")
    if "_active_adapter" in own:  # of PEFT
        found += state_of_adapters(own)
    return found


def _hooks(hooks: Iterable[Any]) -> list[Hashable]:
    marks: list[Hashable] = []
    for hook in list(hooks):  # another thread may add some
        if is_ours(hook):
            continue
        by_row = given_by_row(hook)  # of PEFT, rebuilt for each call, so that its identity tells nothing
        if by_row is None:
            marks.append(_identity(hook))
        else:
            marks.append((by_row, hook.keywords[NAMES][0] if by_row == NAMES else None))
    return marks


def _identity(one: Any) -> Hashable:
    """Return a mark that equals that of no other object, also once ``one`` is gone, and does not keep it alive."""
    try:
        mark = weakref.ref(one)
        hash(mark)
    except TypeError:
        return id(one)
    return mark


def _frozen(value: Any) -> Hashable:
    """Return the content of a configuration, or of a value in it, as something hashable."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, PreTrainedConfig):
        return _frozen(vars(value))
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in value.items() if name not in _LABELS)
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, torch.dtype) else (type(value), _identity(value))


def _functions(model: PreTrainedModel) -> Iterator[Any]:
    """Yield functions that transformers or torch look up in every forward, and that may have been replaced."""
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function: Any = functions.get(implementation)
        while hasattr(function, "_hf_spec_original"):  # our first call wraps it: not a change
            function = function._hf_spec_original
        yield function
    module = nn.modules.module
    for hooks in (module._global_forward_pre_hooks, module._global_forward_hooks):
        yield from list(hooks.values())
