"""Text files of which nobody ever finds a half, and JSON lines that are added to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_files(files: dict[str, str], folder: str | os.PathLike[str]) -> None:
    """Write ``files``, texts by name, into ``folder``, each of them completely or not at all."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the new name could reach the disk before the text
        os.replace(partial, path)


def append_answers(path: Path, lines: Sequence[dict[str, Any]], what: str = "answers") -> None:
    """Append JSON ``lines`` to the file at ``path``, which holds ``what``.

    Errors: an OSError that says that the file stays usable.
    """
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: {path}. The {what} in it are kept: free some space and repeat the call"
        ) from error
