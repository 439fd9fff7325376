"""Attributes of configs that several models in the mode may share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

Undo = Callable[[Callable[[Any], Any]], None]  # undoes a change of an object, or of what the function makes of it


@dataclass
class _Shared:
    """What an attribute was ``before``, and the number of modes in which it is another."""

    before: Any
    modes: int = 0


_shared: dict[str, WeakIdKeyDictionary] = {}  # by attribute, then by config


def is_changed(config: Any, name: str) -> bool:
    """Tell whether a mode has set the attribute ``name`` of ``config``."""
    return config in _shared.get(name, ())


def change(configs: Iterable[Any], name: str, value: Any) -> Undo:
    """Set the attribute ``name`` of ``configs`` until the last mode that did so ends; return what undoes it.

    A config that has another one as a part comes before it.
    """
    configs = list({id(one): one for config in configs for one in _with_parts(config)}.values())
    changes = _shared.setdefault(name, WeakIdKeyDictionary())
    for config in configs:  # all before any is set: transformers' setters also set parts
        changes.setdefault(config, _Shared(getattr(config, name))).modes += 1
    for config in configs:
        setattr(config, name, value)

    def undo(of: Callable[[Any], Any]) -> None:
        for config in configs:
            changed, shared = of(config), changes[config]
            if changed is config:
                shared.modes -= 1
            is_over = changed is not config or not shared.modes
            setattr(changed, name, shared.before if is_over else value)  # a whole that was set has set its parts, too
            if not shared.modes:
                del changes[config]

    return undo


def _with_parts(config: Any) -> list[Any]:
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(one for part in parts if part is not None for one in _with_parts(part))]
