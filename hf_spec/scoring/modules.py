"""The modules and weights of a model, listed in few instructions of Python: every call asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter, methodcaller
from typing import TypeVar

from torch import nn

T = TypeVar("T")

_MODULES, _PARAMETERS, _VALUES = itemgetter("_modules"), itemgetter("_parameters"), methodcaller("values")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List ``model`` and its modules, level by level, each once.

    Torch's own walk builds their names, and takes fifty times as many instructions.
    """
    found: dict[nn.Module, None] = {}
    level = {model: None}
    while level:
        found |= level
        level = dict.fromkeys(chain.from_iterable(map(_VALUES, map(_MODULES, map(vars, level)))))
        for known in level.keys() & {None, *found}:
            del level[known]
    return list(found)


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of ``model``, each once."""
    return weights_in(modules_of(model))


def weights_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """List the parameters of ``modules``, without those of modules inside, each once."""
    return distinct(chain.from_iterable(map(_VALUES, map(_PARAMETERS, map(vars, modules)))))


def distinct(things: Iterable[T | None]) -> list[T]:
    """List the objects among ``things``, each once, without ``None``."""
    listed = list(things)
    found = dict(zip(map(id, listed), listed, strict=True))
    found.pop(id(None), None)
    return list(found.values())  # type: ignore[arg-type]
