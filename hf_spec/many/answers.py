"""A file of answers from which a killed run resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..checkpoints.fingerprint import differences
from ..whole_files import append_answers

Question = dict[str, Any]  # the prompt, under one of the names of ``ASKED``
ASKED = ("prompt", "messages")


class AnswerFile:
    """A file with one JSON line per answer, as it comes: its ``index``, the prompt, and the answer.

    A line counts only with its newline. A line that a kill or a full disk cut off is removed, and answered again. A
    second file next to it, with ``.made_from.json`` after its name, holds the settings of the answers. So no answers
    with other settings are added.

    Args:
        path: of the file. settings: what the answers are made with, as JSON holds it.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.settings = settings
        self._made_from = self.path.with_name(f"{self.path.name}.made_from.json")
        self._done: dict[int, bytes] = {}  # digest of each prompt by its index

    def __contains__(self, index: int) -> bool:
        return index in self._done

    def __len__(self) -> int:
        return len(self._done)

    def prepare(self) -> None:
        """Create the file, or remove an incomplete line at the end of an existing one.

        Errors: a ValueError if its answers were made with other settings; an OSError if it cannot be written.
        """
        if self.path.exists() and self.path.stat().st_size:
            self._check_made_from()
            with self.path.open("rb") as file:
                complete = sum(len(line) for line in file if line.endswith(b"\n"))
            os.truncate(self.path, complete)
            return
        self.path.touch()  # fails before anything runs if it cannot be written
        new = self._made_from.with_name(f"{self._made_from.name}.new")
        new.write_text(json.dumps(self.settings, indent=1), encoding="utf-8")
        new.replace(self._made_from)  # so that a kill leaves no incomplete file

    def _check_made_from(self) -> None:
        try:
            made_from = json.loads(self._made_from.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} has no readable {self._made_from.name} next to it, which says what its answers were "
                "made with: write to another file"
            ) from error
        if found := differences(made_from, dict.fromkeys(made_from) | self.settings):
            raise ValueError(
                f"the answers in {self.path} were made with something else: {'; '.join(found)}. Repeat the command "
                "that began it, or write to another file"
            )

    def read(self, questions: Iterable[Question]) -> int:
        """Find out which of ``questions`` are answered, and count all ``questions``.

        Errors: a ValueError that names a line which is no answer, or answers none of ``questions``.
        """
        lines: dict[int, int] = {}
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    entry = json.loads(line)
                    asked = {name: entry[name] for name in ASKED if name in entry}
                    lines[entry["index"]], self._done[entry["index"]] = number, _digest(asked)
                except (ValueError, LookupError, TypeError) as error:
                    raise ValueError(f"{self.path}, line {number} is no answer: {line[:60]!r}") from error
        left, count = set(lines), 0
        for index, asked in enumerate(questions):
            count += 1
            if self._done.get(index) == _digest(asked):
                left.discard(index)
        if left:
            raise ValueError(
                f"{self.path}, line {lines[min(left)]} does not answer prompt {min(left)}: repeat the command with "
                "the prompts that it was begun with, or write to another file"
            )
        return count

    def write(self, index: int, asked: Question, answer: dict[str, Any]) -> None:
        """Append the answer to what was ``asked``. Errors: an OSError if the disk is full; the file stays usable."""
        append_answers(self.path, [{"index": index, **asked, **answer}])


def _digest(asked: Question) -> bytes:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()[:16]
