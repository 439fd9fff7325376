"""The demo family: small models of one tokenizer that ship in the package, to try everything offline."""

from __future__ import annotations

from pathlib import Path

MODELS = ("target", "draft-vanilla", "draft-eagle3", "draft-medusa", "draft-mtp")


def path(name: str = "target") -> Path:
    """Return the directory of a shipped model, ready for `from_pretrained`; raise ValueError for another name."""
    if name not in MODELS:
        raise ValueError(f"The demo family has no model {name!r}: choose one of {', '.join(MODELS)}.")
    return Path(__file__).parent / name


__all__ = ["MODELS", "path"]
