"""Names of transformers' cache argument: ``cache`` since 5.24, ``past_key_values`` before, others in old models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..versions import CACHE as CACHE

CACHES = tuple(dict.fromkeys((CACHE, "past_key_values", "cache_params", "state")))


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the ``arguments`` of ``generate`` or of a forward, or ``None`` if there is none."""
    return next((arguments[name] for name in CACHES[:-1] if arguments.get(name) is not None), None)
