"""Text files of which nobody ever finds a half."""

from __future__ import annotations

import os
from pathlib import Path


def write_files(files: dict[str, str], folder: str | os.PathLike[str]) -> None:
    """Write ``files``, texts by name, into ``folder``, each of them completely or not at all."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
