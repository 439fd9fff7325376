"""Run a trial once per model, and remember its result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .adapters import adapted_layers, with_adapters
from .changes import way_of_forward
from .hooks import NO_CONTEXT

MOST_WAYS = 32  # results remembered per model: hooks that are rebuilt for each call give a new key each time
Options = ParamSpec("Options")
Found = TypeVar("Found")


class ExplainedError(ValueError):
    """An error that says all of its cause and cure; a trial that meets it adds nothing."""


def in_short(error: Exception) -> str:
    """Describe an error in one line: a compiler's may fill pages."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"[:300]


def tried_once(
    trial: Callable[Concatenate[PreTrainedModel, Options], Found],
) -> Callable[Concatenate[PreTrainedModel, Options], Found]:
    """Run ``trial(model, ...)`` once for each model, key of its forward (``way_of_forward``) and other arguments.

    Results are remembered, errors are not. It runs without gradients and leaves the model as it was. An argument that
    has a ``kind`` is remembered by that.
    """
    known: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Found]] = WeakKeyDictionary()

    @functools.wraps(trial)
    def remembered(model: PreTrainedModel, /, *args: Options.args, **kwargs: Options.kwargs) -> Found:
        given = tuple(getattr(one, "kind", one) for one in (*args, *kwargs.values()))
        key = way_of_forward(model), given, tuple(kwargs)
        found = known.setdefault(model, {})
        if key in found:
            return found[key]
        with in_a_trial(model):
            result = trial(model, *args, **kwargs)
        for old in list(found)[: max(0, len(found) - MOST_WAYS + 1)]:
            found.pop(old, None)
        found[key] = result
        return result

    return cast(Callable[Concatenate[PreTrainedModel, Options], Found], remembered)


@contextlib.contextmanager
def in_a_trial(model: PreTrainedModel) -> Iterator[None]:
    """Compute forwards without gradients, with the adapter of a call's first row, and leave ``model`` as it was.

    A forward changes the ``rope_deltas`` of the last prompt with images.
    """
    lags = [(module, module.rope_deltas) for module in model.modules() if hasattr(module, "rope_deltas")]
    of_the_first_row = with_adapters(adapted_layers(model), lambda count: [0] * count)
    try:
        with torch.no_grad(), of_the_first_row:
            yield
    finally:
        for module, lag in lags:
            module.rope_deltas = lag


def in_evaluation(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Switch dropout off, with which no two forwards agree: a policy generates while it is trained."""
    return _untrained(model) if model.training else NO_CONTEXT


@contextlib.contextmanager
def _untrained(model: nn.Module) -> Iterator[None]:
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True
