"""Train drafts: the training-time test, its losses, data, and a ``Trainer``."""

from __future__ import annotations

from .unrolling import unroll

__all__ = ["unroll"]
