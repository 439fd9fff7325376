"""Guards against harmful content of foreign files: terminal escapes in names, endless pipes, broken text."""

from __future__ import annotations

import os
import stat
from typing import Any

DEEPEST = 50  # maximum nesting of lists and objects: more than any conversation, tool or recipe has


def printable(text: object) -> str:
    """Return ``text`` with unprintable characters escaped, which could control a terminal; keep line ends and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in str(text))


def check_ends(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if ``path`` is a pipe, a socket or a device, which may never end. A missing file passes."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening the file will say what is wrong
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(
            f"{path} is a pipe or a device, which may never end: write what it gives to a file, and pass that"
        )


def check_sound(value: Any, depth: int = 0) -> None:
    """Raise a ValueError if a value of JSON cannot be written as UTF-8 or is nested more than ``DEEPEST`` deep."""
    if depth > DEEPEST:
        raise ValueError(f"lists and objects stand within each other more than {DEEPEST} deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            place = ascii(value[error.start])
            raise ValueError(f"character {error.start + 1} of a text is {place}, half of a surrogate pair") from error
    elif isinstance(value, dict):
        for name, one in value.items():
            check_sound(name, depth + 1)
            check_sound(one, depth + 1)
    elif isinstance(value, list | tuple):
        for one in value:
            check_sound(one, depth + 1)
