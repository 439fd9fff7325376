"""Forward hooks that act in one thread only: other threads may generate with the same model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]

COLLECTING = "transformers.utils.output_capturing"  # the module of transformers' own hooks
# Hooks of transformers and PEFT that let gradients pass the embeddings: new ones each time checkpointing is enabled.
FOR_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
NO_CONTEXT = contextlib.nullcontext()  # one object for all, so that a step spends no time on it


def hooked(
    modules: Collection[nn.Module], before: Before | None = None, after: After | None = None
) -> contextlib.AbstractContextManager[None]:
    """Call ``before`` and ``after`` around the forwards of ``modules`` while the context is open, as torch does.

    ``before(module, args, kwargs)`` returns the new arguments, and ``after(module, args, output)`` the new output;
    ``None`` changes nothing.
    """
    return _hooked(modules, before, after) if modules else NO_CONTEXT


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
        # torch.compile cannot ask for the thread; compiled forwards with hooks take turns instead.
        return hook(*args) if torch.compiler.is_compiling() or threading.get_ident() == thread else None

    return mark_as_ours(guarded)


Hook = TypeVar("Hook")


def mark_as_ours(hook: Hook) -> Hook:
    """Mark a hook of this package: it changes nothing that a caller could see."""
    hook._hf_spec_looks = True  # type: ignore[attr-defined]
    return hook


def is_ours(hook: object) -> bool:
    """Tell whether ``hook`` changes nothing: a marked one of ours, or one by which transformers collects outputs.

    The latter stay permanently after the first call that asked for hidden states or attentions. Hooks that only mark
    a tensor for gradients change nothing, either.
    """
    return (
        getattr(hook, "_hf_spec_looks", False)
        or getattr(hook, "__module__", None) == COLLECTING
        or getattr(hook, "__name__", None) in FOR_GRADIENTS
    )
