"""What training puts around the ``forward`` of a draft, and how it is taken off for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

from ..drafts.modeling import DraftModel


def let_forward_compute_a_loss(draft: Any) -> None:
    """Let ``draft(batch_loss=function)`` return ``function(draft)``.

    What wraps a draft for training expects all that is done with it for a batch inside one call of ``forward``.
    """
    plain = type(draft).forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, batch_loss: Any = None, **kwargs: Any) -> Any:
        if batch_loss is None:
            return plain(self, *args, **kwargs)
        with _unwrapped(self):  # autocast would not end if a language model's forward were wrapped within itself
            return batch_loss(self)

    draft.forward = MethodType(forward, draft)
    if isinstance(draft, DraftModel):
        draft.activation_checkpointing_enable = _recompute_steps  # type: ignore[assignment]


def _recompute_steps(**kwargs: Any) -> None:
    """Do nothing: the steps of a draft are recomputed as a whole, see ``unrolling.outputs``."""


@contextlib.contextmanager
def as_trained(draft: Any, around: dict[str, Any]) -> Iterator[None]:
    """Let ``draft`` have the ``forward`` that training has made of it, which ``around`` keeps meanwhile and between.

    Whoever generates with the draft in the same process gets what is saved, without autocast.
    """
    draft.__dict__.update(around)
    try:
        yield
    finally:
        if "forward" in draft.__dict__:
            around["forward"] = draft.__dict__.pop("forward")


@contextlib.contextmanager
def weights_put_back(draft: Any) -> Iterator[None]:
    """Put back the weights of ``draft`` in the end: Trainer evaluates in half precision by rounding them in place."""
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
    """Let ``draft`` compute as it will when it is loaded: in evaluation mode, without autocast around ``forward``."""
    training = draft.training
    draft.eval()
    try:
        with _unwrapped(draft):
            yield
    finally:
        draft.train(training)


@contextlib.contextmanager
def _unwrapped(draft: Any) -> Iterator[None]:
    """Give ``draft`` the ``forward`` of its class, without what training has put around it."""
    wrapped = draft.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            draft.forward = wrapped
