"""The demo family: small models with one tokenizer that ship in the package, to try everything offline."""

from __future__ import annotations

import re
from pathlib import Path

MODELS = ("target", "draft-vanilla", "draft-eagle3", "draft-medusa", "draft-mtp", "draft-dspark")


def path(name: str = "target") -> Path:
    """Return the directory of a shipped model, ready for `from_pretrained`; raise ValueError for another name."""
    if name not in MODELS:
        raise ValueError(f"The demo family has no model {name!r}: choose one of {', '.join(MODELS)}.")
    return Path(__file__).parent / name


def mended(text: str) -> str:
    """Repair UTF-8 that was read as Windows-1252 (`â€œ`), which occurs in the family's training text."""
    return re.sub(r"[^\x00-\x7f]+", lambda run: _decoded(run[0]), text)


def _decoded(run: str) -> str:
    try:
        return b"".join(_byte(character) for character in run).decode("utf-8")
    except UnicodeError:
        return run.replace("â€", '"')  # a closing quotation mark whose last byte was lost


def _byte(character: str) -> bytes:
    try:
        return character.encode("cp1252")
    except UnicodeEncodeError:  # cp1252 leaves five bytes undefined
        return character.encode("latin-1")


__all__ = ["MODELS", "mended", "path"]
