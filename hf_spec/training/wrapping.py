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
    if isinstance(draft, DraftModel):  # its steps are recomputed as a whole, see unrolling.outputs
        draft.activation_checkpointing_enable = lambda **kwargs: None  # type: ignore[method-assign]


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
