"""Compile functions as plain ``generate`` compiles models, and count the graphs and the seconds that it takes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.utils import logging

from ..packing.graphs import packed_in_graphs
from ..packing.weight import PackedWeight
from .adapters import adapted_layers
from .attention import folding_in_graphs
from .changes import foreign_hooks
from .kept import NEW_MEMORY, KeptBuffers, buffers_of
from .modules import modules_of

T = TypeVar("T")

# Shapes are few and fixed: each has its own graph, none is symbolic. Torch's default of 8 recompilations is too few.
FIXED_SHAPES = {"dynamic": False, "recompile_limit": 256}

_FORWARD, _COMPILED = attrgetter("forward"), "_torchdynamo_orig_callable"
_OWN_FORWARD = frozenset(("forward", "_compiled_call_impl"))  # attributes of a module that its class does not set

logger = logging.get_logger(__name__)

taking_turns = threading.Lock()  # a compiled forward runs the hooks that any thread has put on the model
_failed: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by draft or rule, options and hooks that failed
_compiled: list[tuple[Callable[..., Any], dict[str, Any], tuple[Hashable, ...], Callable[..., Any]]] = []


def lasting(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in memory of its own where the next run of a graph overwrites its previous outputs."""
    return tensor if tensor.device.type in NEW_MEMORY else tensor.clone()


class Graphs:
    """The number of graphs ``made`` with ``config`` in one call of ``generate``, and the ``seconds`` that took."""

    def __init__(self, config: CompileConfig) -> None:
        self._fuses = config.backend == "inductor"
        self.made, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is compiled in this context, which runs blocks of draft tokens."""
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        with folding_in_graphs(self._fuses), packed_in_graphs():
            yield
        if made := counters["stats"]["unique_graphs"] - before:
            self.made += made
            self.seconds += time.perf_counter() - start


class Compiler:
    """The compilation of drafting (``depth`` draft tokens) or verification in one ``generate`` call with ``config``.

    No row gets more than ``most_new`` tokens after the prompt. ``begins_step``: once this graph runs, the outputs of
    earlier graphs are no longer needed.
    """

    def __init__(
        self, config: CompileConfig | None, depth: int, most_new: int | None = None, begins_step: bool = True
    ) -> None:
        self.config = config or CompileConfig()
        self.depth, self.most_new, self._begins_step = depth, most_new, begins_step
        self.graphs = Graphs(self.config)
        self._options = self.config.to_dict() | FIXED_SHAPES | {"fullgraph": True, "isolate_recompiles": True}
        self._kept: list[KeptBuffers] = []
        self._too_large: list[Any] = []
        self._sharing: dict[nn.Module, tuple[nn.Module, ...]] = {}
        self._hooks: dict[nn.Module, tuple[Hashable, ...]] = {}

    def buffers_of(self, draft: nn.Module, device: torch.device) -> KeptBuffers:
        """Return the memory of ``draft``'s buffers, until ``free_buffers``."""
        self._kept.append(buffers_of(draft, self.config, device))
        return self._kept[-1]

    def free_buffers(self) -> None:
        """Leave the memory of all drafts to the next call."""
        for kept in self._kept:
            kept.free()

    def __call__(
        self, function: Callable[..., T], owner: Any, *args: Any, keep: Callable[[T], T] = lambda found: found
    ) -> T:
        """Return ``function(*args)``, compiled, or run eagerly for an ``owner`` with which that has failed.

        A failure is warned of once, and holds for later calls. A lack of memory is silent, and holds for this call.
        ``args`` must hold no Python number that changes often: each value is compiled anew. ``keep`` takes results out
        of the memory of graphs, before another thread runs one.
        """
        if isinstance(owner, nn.Module) and owner not in self._sharing:
            self._sharing[owner], self._hooks[owner] = _sharing_packed_weights(owner), hooks_in_graphs(owner)
        way = self._options, self._hooks.get(owner, ())
        if way in _failed.get(owner, ()) or owner in self._too_large:
            return function(*args)
        compiled = _compiled_with(function, *way, self._sharing.get(owner, ()))
        try:
            with taking_turns, self.graphs.counted():
                if self._begins_step:
                    torch.compiler.cudagraph_mark_step_begin()
                found: T = keep(compiled(*args))
                return found
        except torch.OutOfMemoryError:  # in this call: a smaller one may have room for its graphs
            self._too_large.append(owner)
        except Exception as error:  # whatever torch.compile makes of an unforeseen draft
            found = function(*args)  # fails too if it is not the compiler that failed
            _failed.setdefault(owner, []).append(way)
            name = getattr(owner, "__name__", type(owner).__name__)
            logger.warning(f"{name} is not compiled, but run as it is: {why_not_compiled(error)}.")
            return found
        return function(*args)  # out here, where the error holds no memory any more


def why_not_compiled(error: Exception) -> str:
    """Say in one line what went wrong; torch.compile's own messages may fill pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])


def is_compiled(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> bool:
    """Tell whether the user has compiled the model or a part of it, by ``compile()`` or torch.compile of a forward.

    ``modules``: those of the model, where they are known.
    """
    modules = modules_of(model) if modules is None else modules
    if all(map(_OWN_FORWARD.isdisjoint, map(vars, modules))):  # as usual: their classes tell all
        return any(map(hasattr, map(_FORWARD, set(map(type, modules))), repeat(_COMPILED)))
    return any(module._compiled_call_impl is not None or hasattr(module.forward, _COMPILED) for module in modules)


def compiled_model(model: Any, config: CompileConfig, hooks: tuple[Hashable, ...]) -> Callable[..., Any]:
    """Return ``model`` compiled as ``get_compiled_call`` does it, but with a separate cache of graphs.

    Torch allows eight graphs per model, then refuses or runs eagerly. Ours would leave none to plain ``generate``,
    which has one for each size of a static cache. A graph keeps the hooks that it was compiled with, and torch does
    not notice further ones. So each of the ``hooks_in_graphs`` has graphs of its own.
    """
    if model.get_compiled_call(config) == model.__call__:
        return cast(Callable[..., Any], model.__call__)  # transformers does not compile this architecture
    options = config.to_dict() | FIXED_SHAPES | {"isolate_recompiles": True}
    compiled = _compiled_with(nn.Module.__call__, options, hooks, _sharing_packed_weights(model))
    return functools.partial(compiled, model)


def hooks_in_graphs(model: Any, watched: Sequence[int] = ()) -> tuple[Hashable, ...]:
    """Return what tells hooks on ``model`` apart that torch would not notice if they came after a graph.

    They are those on ``watched`` layers, hooks of others, and adapters per row.
    """
    return (*watched, *foreign_hooks(model), len(adapted_layers(model)))


def _sharing_packed_weights(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of ``model`` that share a packed weight with others, such as tied embeddings."""
    weights = [(module, weight) for module in modules_of(model) for weight in module._parameters.values()]
    shared = [one for one, weight in weights if isinstance(weight, PackedWeight) and len(weight._storage.owners) > 1]
    return tuple(dict.fromkeys(shared))


def _knowing(modules: tuple[nn.Module, ...], function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``function(...)`` after a look at ``modules``: a graph of them must not begin with a weight they share.

    To torch's compiler a packed weight is no tensor but an object. It fails at a module that it meets for the first
    time, if it has met that module's weight before.
    """
    for module in modules:
        _ = module.training
    return function(*args, **kwargs)


def _compiled_with(
    function: Callable[..., Any],
    options: dict[str, Any],
    hooks: tuple[Hashable, ...] = (),
    sharing: tuple[nn.Module, ...] = (),
) -> Callable[..., Any]:
    """Return ``function`` compiled, the same one for the same arguments; see ``_knowing`` for ``sharing``."""
    if sharing:
        return functools.partial(_compiled_with(_knowing, options, hooks), sharing, function)
    for known, its_options, its_hooks, compiled in _compiled:
        if known is function and its_options == options and its_hooks == hooks:
            return compiled
    compiled = _torch_compile(function, options)
    _compiled.append((function, options, hooks, compiled))
    return compiled


def _torch_compile(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile ``function``. Torch before 2.13 has no limits of its own for it: it gets code of its own instead."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(function, **options)
    options = options.copy()
    options.pop("isolate_recompiles", None)
    limits = torch._dynamo.config.patch(recompile_limit=options.pop("recompile_limit"))

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    copied = types.FunctionType(called.__code__.replace(), globals(), closure=called.__closure__)
    return cast(Callable[..., Any], limits(torch.compile(copied, **options)))
