"""Progress of long work, a tqdm bar and ``str()`` of it as a sentence, and numbers in words."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from transformers.utils import logging

working: list[Progress] = []  # the work in progress now, the innermost last


class Progress:
    """A count of ``done`` units of work ``what``, out of ``total`` (``None``: unknown)."""

    def __init__(self, what: str, total: int | None, unit: str, shown: bool = True, done: int = 0) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self._bar: Any = logging.tqdm(initial=done, total=total, desc=what, unit=unit, disable=not shown)
        self._before, self._began = done, time.monotonic()

    def update(self, count: int = 1) -> None:
        """Count ``count`` more."""
        self.done += count
        self._bar.update(count)

    def expect(self, total: int) -> None:
        """Count out of ``total`` from now on."""
        self.total = self._bar.total = total

    def note(self, text: str) -> None:
        """Show ``text`` behind the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> Progress:
        working.append(self)
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        working.remove(self)
        self._bar.__exit__(kind, error, place)

    def __str__(self) -> str:
        if self.total is None:
            return f"{self.what}, {self.done} {self.unit}"
        new, left = self.done - self._before, self.total - self.done
        seconds = (time.monotonic() - self._began) * left / new if new else None
        return f"{self.what}, {self.done} of {self.total} {self.unit}" + (
            f", about {duration(seconds)} more" if seconds is not None else ""
        )


def duration(seconds: float) -> str:
    """Format ``seconds`` for people."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def counted(number: int, what: str) -> str:
    """Write ``number`` with ``what`` is counted, a noun in the singular."""
    return f"{number} {what}{'s' * (number != 1)}"
