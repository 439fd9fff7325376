"""Look into the forwards of a model, in this thread only: other threads may generate with the same model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]

COLLECTING = "transformers.utils.output_capturing"
NOTHING = contextlib.nullcontext()  # changes nothing, and takes a step no time


def hooked(
    modules: Collection[nn.Module], before: Before | None = None, after: After | None = None
) -> contextlib.AbstractContextManager[None]:
    """Call ``before`` and ``after`` around the forwards of ``modules`` while the context is open, as torch does.

    ``before(module, args, kwargs)`` returns what the module is given, and ``after(module, args, output)`` what it
    gives, or ``None`` to leave that as it is.
    """
    return _hooked(modules, before, after) if modules else NOTHING


@contextlib.contextmanager
def _hooked(modules: Collection[nn.Module], before: Before | None, after: After | None) -> Iterator[None]:
    handles = []
    try:
        for module in modules:
            if before is not None:
                handles.append(module.register_forward_pre_hook(_in_this_thread(before), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(_in_this_thread(after)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def guarded(*args: Any) -> Any:
        # torch.compile cannot look at a thread; compiled forwards that are looked into take turns.
        return hook(*args) if torch.compiler.is_compiling() or threading.get_ident() == thread else None

    return looking(guarded)


Hook = TypeVar("Hook")


def looking(hook: Hook) -> Hook:
    """Mark a hook of this package, which changes nothing that a caller could see."""
    hook._hf_spec_looks = True  # type: ignore[attr-defined]
    return hook


def only_looks(hook: object) -> bool:
    """Tell whether ``hook`` changes nothing: ours by its mark, and those that let transformers collect its outputs.

    The latter stay for good after the first call that asked for hidden states or attentions.
    """
    return getattr(hook, "_hf_spec_looks", False) or getattr(hook, "__module__", None) == COLLECTING
