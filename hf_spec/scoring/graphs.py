"""Compile functions as plain ``generate`` would be compiled, and count the graphs and the seconds that it takes."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.utils import logging

from .attention import folding_in_graphs

T = TypeVar("T")

# Shapes are few and fixed: each has a graph, and none becomes a variable. Torch's own limit of 8 is too small for us.
FIXED_SHAPES = {"dynamic": False, "recompile_limit": 256}

logger = logging.get_logger(__name__)

taking_turns = threading.Lock()  # a compiled forward sees the hooks of every thread that looks into it
_compiled: list[tuple[Callable[..., Any], dict[str, Any], Callable[..., Any]]] = []


class Graphs:
    """Count the graphs ``made`` in a call of ``generate``, and the ``seconds`` that took."""

    def __init__(self) -> None:
        self.made, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is compiled inside, for blocks of guesses."""
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        with folding_in_graphs():
            yield
        if made := counters["stats"]["unique_graphs"] - before:
            self.made += made
            self.seconds += time.perf_counter() - start


class Compiler:
    """Compile what guesses ``depth`` tokens deep for one call of ``generate``, with its ``config``.

    No row gets more than ``most_new`` tokens behind the prompt.
    """

    def __init__(self, config: CompileConfig | None, depth: int, most_new: int | None = None) -> None:
        self.depth, self.most_new = depth, most_new
        self.graphs = Graphs()
        options = (config or CompileConfig()).to_dict()
        self._options = options | FIXED_SHAPES | {"fullgraph": True}
        self._works = True

    def __call__(self, function: Callable[..., T], name: str, *args: Any) -> T:
        """Return ``function(*args)``, compiled; as it is, after one warning, if that fails.

        ``args`` hold no number that changes often: a graph is made for each.
        """
        if not self._works:
            return function(*args)
        compiled = _compiled_with(function, self._options)
        try:
            with taking_turns, self.graphs.counted():
                torch.compiler.cudagraph_mark_step_begin()
                found: T = compiled(*args)
        except Exception as error:  # whatever torch.compile makes of an unforeseen draft
            found = function(*args)  # fails too if it is not the compiler that failed
            self._works = False
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join([f"{type(error).__name__}:", *lines[:2]])
            logger.warning_once(f"{name} is not compiled for guessing, but run as it is: {reason}.")
        return found


def compiled_model(model: Any, config: CompileConfig | None) -> Callable[..., Any]:
    """Return ``model`` compiled as ``get_compiled_call`` does it, but with a store of graphs of its own.

    Torch refuses a model more than eight graphs, or runs it as it is from then on: ours would leave none to plain
    ``generate``, which has one for each size of a static cache.
    """
    if model.get_compiled_call(config) == model.__call__:
        return cast(Callable[..., Any], model.__call__)  # transformers does not compile this architecture
    options = (config or model._default_compile_config()).to_dict()
    compiled = _compiled_with(nn.Module.__call__, options | FIXED_SHAPES | {"isolate_recompiles": True})
    return functools.partial(compiled, model)


def _compiled_with(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    for known, its_options, compiled in _compiled:
        if known is function and its_options == options:
            return compiled
    compiled = torch.compile(function, **options)
    _compiled.append((function, options, compiled))
    return compiled
