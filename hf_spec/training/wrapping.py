"""The ``forward`` of a draft that computes a loss in training, and how it is removed for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

from ..drafts.modeling import DraftModel
from ..versions import CHECKPOINTING_ARGUMENT


def let_forward_compute_a_loss(draft: Any) -> None:
    """Let ``draft(batch_loss=function)`` return ``function(draft)``.

    Wrappers such as DDP and FSDP expect that all computations of a batch happen inside one call of ``forward``.
    """
    plain = type(draft).forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, batch_loss: Any = None, **kwargs: Any) -> Any:
        if batch_loss is None:
            return plain(self, *args, **kwargs)
        with _unwrapped(self):  # a language model calls its forward again; nested, autocast would not end
            return batch_loss(self)

    draft.forward = MethodType(forward, draft)
    if isinstance(draft, DraftModel):
        setattr(draft, f"{CHECKPOINTING_ARGUMENT}_enable", _recompute_steps)


def _recompute_steps(**kwargs: Any) -> None:
    """Do nothing: each step of a draft is recomputed as one unit, see ``unroll.feedback.outputs``."""


@contextlib.contextmanager
def as_trained(draft: Any, around: dict[str, Any]) -> Iterator[None]:
    """Give ``draft`` its training ``forward``, which ``around`` keeps between the calls.

    So generation with the draft in the same process computes like the saved draft, without autocast.
    """
    draft.__dict__.update(around)
    try:
        yield
    finally:
        if "forward" in draft.__dict__:
            around["forward"] = draft.__dict__.pop("forward")


@contextlib.contextmanager
def weights_put_back(draft: Any) -> Iterator[None]:
    """Restore the weights of ``draft`` at the end: to evaluate in half precision, Trainer rounds them in place."""
    weights = [(tensor, tensor.data) for tensor in draft.parameters()]
    buffers = [(module, dict(module._buffers)) for module in draft.modules()]
    try:
        yield
    finally:
        if any(tensor.dtype != data.dtype for tensor, data in weights):
            for tensor, data in weights:
                tensor.data = data
            for module, its in buffers:
                module._buffers.update(its)


@contextlib.contextmanager
def as_loaded(draft: Any) -> Iterator[None]:
    """Let ``draft`` compute as after loading: in evaluation mode, without autocast around ``forward``."""
    training = draft.training
    draft.eval()
    try:
        with _unwrapped(draft):
            yield
    finally:
        draft.train(training)


@contextlib.contextmanager
def _unwrapped(draft: Any) -> Iterator[None]:
    """Give ``draft`` the ``forward`` of its class instead of the wrapped one."""
    wrapped = draft.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            draft.forward = wrapped
