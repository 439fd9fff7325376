"""Functions of transformers that this package wraps once for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


def mark_wrapper(wrapper: Wrapper, original: Any, owner: str) -> Wrapper:
    """Note that ``wrapper``, of the module ``owner``, stands for ``original``, which ``wraps`` and undoing need."""
    wrapper._hf_spec = owner  # type: ignore[attr-defined]
    wrapper._hf_spec_original = original  # type: ignore[attr-defined]
    return wrapper


def wraps(function: Any, owner: str) -> bool:
    """Tell whether ``function``, or one that it wraps, is a wrapper of the module ``owner``.

    Another copy of this package, such as a draft's own code, may have wrapped the same function.
    """
    while function is not None:
        if getattr(function, "_hf_spec", None) == owner:
            return True
        function = getattr(function, "_hf_spec_original", None)
    return False
