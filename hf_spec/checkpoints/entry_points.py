"""Formats that other installed packages add by entry points of the group ``hf_spec.formats``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..drafts.files import Format
from ..untrusted import printable

GROUP = "hf_spec.formats"


class EntryPointError(ValueError):
    """An error in the code of another package, which names its entry point."""


@dataclasses.dataclass(frozen=True)
class Added:
    """The formats of other packages, and ``problems``: what is wrong with the entry points that gave none."""

    formats: tuple[Format, ...]
    problems: tuple[str, ...]


@functools.lru_cache
def added_formats(taken: frozenset[str]) -> Added:
    """Load the entry points, once in a process; ``taken`` are the names that their formats must not have."""
    found: dict[str, Format] = {}
    problems = []
    for point in sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value)):
        try:
            one = _load(point, taken | found.keys())
        except EntryPointError as error:
            problems.append(str(error))
        else:
            found[one.name] = one
    return Added(tuple(found.values()), tuple(problems))


def _load(point: EntryPoint, taken: Container[str]) -> Format:
    package = point.dist.name if point.dist is not None else "a package without a name"
    who = f"the entry point {point.name!r} ({point.value}) of {package}"
    one = _named(who, "cannot be loaded", point.load)()
    if not isinstance(one, Format):
        raise EntryPointError(f"{who} is a {type(one).__name__}; it should be an hf_spec.Format")
    if one.name in taken:
        raise EntryPointError(f"{who} has the name of another format, {one.name!r}; it needs one of its own")
    if one.inside_target:
        raise EntryPointError(f"{who} has inside_target, which would apply to the files of all drafts; leave it out")
    return dataclasses.replace(
        one,
        owner=one.owner or package,
        recognises=_named(who, "cannot say whether it knows these files", one.recognises),
        read=_named(who, "cannot read these files", one.read),
        keys=one.keys and _named(who, "cannot list the keys of this config", one.keys),
    )


def _named(who: str, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` whose errors, of any type, become one that names the entry point."""

    def run(*given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:
            cause = f"{type(error).__name__}: {printable(error)}"
            raise EntryPointError(f"{who} {what} ({cause}); update that package, or remove it") from error

    return run
