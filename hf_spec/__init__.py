"""Speculative decoding for Hugging Face Transformers: ``model.generate(..., speculator=draft)``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

# The command shows help and mistakes before torch and transformers are imported, which takes seconds.
_is_command = Path(*sys.argv[:1]).name in ("hf-spec", "hf-spec.exe") or sys.orig_argv[1:3] == ["-m", "hf_spec"]

if TYPE_CHECKING or not _is_command:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the public names where the command has not yet done so, and the folders that users name."""
        if name in ("bench", "demo", "doctor", "training"):
            return import_module(f".{name}", __name__)
        names = import_module(".public", __name__)
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
