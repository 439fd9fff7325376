"""The first layers of a target, with its final norm and its head, as a model that reads the target's own cache."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .features import Features, decoder_of
from .hooks import hooked
from .plain import difference, input_device, precision
from .prompts import tokens_for
from .runner import ModelRunner
from .trials import in_short, tried_once

PROBE_TOKENS = 8  # that tell whether a model can do without its last layers
# Largest difference that may be due to rounding, as a share of the logits' spread.
EXIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
# What replaces the forward of one module: bound to the whole model, it would run all layers.
REPLACED = ("forward", "_old_forward", "_compiled_call_impl")


class FirstLayers:
    """The first ``count`` layers of a runner's model, run over the cache of that runner.

    The layers have read the text together with the others, so there is nothing to prefill. Draft tokens are written
    after the committed ones, where the forward that scores them writes the same keys again.
    """

    def __init__(self, runner: ModelRunner, count: int) -> None:
        self._runner, self._model = runner, first_layers(runner.model, count)

    @contextlib.contextmanager
    def drafting(self) -> Iterator[ModelRunner]:
        """Lend a runner of these layers, and drop what it has written."""
        runner = copy.copy(self._runner)  # anew each time: rows and positions of the original change
        runner.model, runner.features = self._model, Features(self._model)
        slots = self._runner.slots
        try:
            yield runner
        finally:
            rows = len(slots.cache.rows.cpu_lengths)
            slots.commit(torch.zeros(rows, 0, dtype=torch.long), [0] * rows, in_place=True)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a model of the first ``count`` layers of ``model``, which shares its modules, weights and hooks.

    Errors: a ValueError if the layers of ``model`` are not one list of modules.
    """
    *above, last = _path_to_layers(model)
    shallow = module = _without_children(model)
    for name in above:
        child = _without_children(module._modules[name])
        module._modules[name], module = child, child
    module._modules[last] = nn.ModuleList(list(module._modules[last])[:count])
    return cast(PreTrainedModel, shallow)


def _without_children(module: Any) -> Any:
    """Copy ``module`` without copying what it holds, so that its submodules can be exchanged."""
    twin = object.__new__(type(module))
    vars(twin).update((name, value) for name, value in vars(module).items() if name not in REPLACED)
    twin._modules = dict(module._modules)
    return twin


def _path_to_layers(model: PreTrainedModel) -> list[str]:
    """Name the modules on the way from ``model`` to the list of its decoder's layers."""
    count, inside = model.config.get_text_config(decoder=True).num_hidden_layers, {*decoder_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and module in inside:
            path: list[str] = name.split(".")
            return path
    raise ValueError(f"the layers of {type(model).__name__} are not one list of {count} modules")


def why_no_early_exit(model: PreTrainedModel, count: int) -> str | None:
    """Say why ``model`` cannot do without the layers after the first ``count``, or return ``None`` if it can.

    It is tried once. A model in training mode or without weights cannot be tried.
    """
    if model.training or model.device.type == "meta":
        return None
    return _why_no_exit(model, count)


@tried_once
def _why_no_exit(model: PreTrainedModel, count: int) -> str | None:
    """Compare the first layers with the whole model, whose later layers pass on what they are given."""
    name = type(model).__name__
    try:
        shallow = first_layers(model, count)
        ids = tokens_for(model, 1, PROBE_TOKENS).to(input_device(model))
        with passing_on(model, count):
            expected = model(input_ids=ids, use_cache=False).logits
        logits = shallow(input_ids=ids, use_cache=False).logits
    except Exception as error:  # whatever an unforeseen architecture makes of fewer layers
        return f"{name} cannot run its first {count} layers alone ({in_short(error)})"
    apart = float(difference(logits, expected).max())
    if not apart <= EXIT_TOLERANCE.get(precision(model), 1e-3):  # nan is refused too
        return f"the first {count} layers of {name} alone compute something else than within it"
    return None


def passing_on(model: PreTrainedModel, count: int) -> contextlib.AbstractContextManager[None]:
    """Let the layers of ``model`` after the first ``count`` return what they are given."""
    layers: Any = model
    for name in _path_to_layers(model):
        layers = layers._modules[name]

    given: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given[module] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return given[module] if isinstance(output, Tensor) else (given[module], *output[1:])

    return hooked(list(layers)[count:], before, after)
