"""Compile functions as plain ``generate`` would be compiled, and count the graphs and the seconds that it takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.utils import logging

from .attention import folding_in_graphs

T = TypeVar("T")

GRAPHS = 256  # shapes of one function that are compiled before torch gives up; its own limit of 8 is too small for us

logger = logging.get_logger(__name__)

taking_turns = threading.Lock()  # a compiled forward sees the hooks of every thread that looks into it
_compiled: list[tuple[Callable[..., Any], dict[str, Any], Callable[..., Any]]] = []


class Graphs:
    """Count the graphs ``made`` in a call of ``generate``, and the ``seconds`` that took."""

    def __init__(self) -> None:
        self.made, self.seconds = 0, 0.0
        # Shapes are few and fixed, so none of them is to become a variable after its second value.
        self._settings = torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=GRAPHS)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is compiled inside, with the settings for few fixed shapes."""
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        with self._settings, folding_in_graphs():
            yield
        if made := counters["stats"]["unique_graphs"] - before:
            self.made += made
            self.seconds += time.perf_counter() - start


class Compiler:
    """Compile what guesses ``depth`` tokens deep for one call of ``generate``, with its ``config``."""

    def __init__(self, config: CompileConfig | None, depth: int) -> None:
        self.depth = depth
        self.graphs = Graphs()
        options = (config or CompileConfig()).to_dict()
        self._options = options | {"fullgraph": True, "dynamic": False}
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


def _compiled_with(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    for known, its_options, compiled in _compiled:
        if known is function and its_options == options:
            return compiled
    compiled = torch.compile(function, **options)
    _compiled.append((function, options, compiled))
    return compiled
