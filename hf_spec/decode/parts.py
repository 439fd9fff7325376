"""Statistics of a whole call of Whisper, whose ``generate`` cuts sound into windows and lets each be decoded apart.

A window is decoded again at the next temperature where its text is poor. Each time transformers' usual ``generate``
runs for those rows of the call that are left, and leaves the statistics of a part. Rows are found by two methods of
Whisper: ``generate_with_fallback`` is told which rows a window has, and ``_need_fallback`` says of one after the other
whether it is decoded again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from ..metrics import SpeculationStats
from ..scoring.adapters import base_model


class Parts:
    """The statistics of the parts of one call of ``model``, and which ``rows`` of the call the next part decodes.

    ``asked`` are keywords of the call that its parts get, too.
    """

    def __init__(self, model: PreTrainedModel, asked: dict[str, Any]) -> None:
        self.model, self.asked = base_model(model), asked
        self.rows: list[int] | None = None
        self._decoded: list[int] = []  # the rows of the last part
        self._found: list[tuple[SpeculationStats, list[int] | None]] = []

    def add(self, stats: SpeculationStats) -> None:
        """Add the ``stats`` of a part."""
        known = self.rows is not None and len(self.rows) == stats.batch_size
        self._found.append((stats, self.rows if known else None))

    def begin_window(self, rows: Sequence[int]) -> None:
        """Note that the next part decodes ``rows`` of the call."""
        self.rows = list(rows)

    def note_fallback(self, index: int, again: bool) -> None:
        """Note whether the row at ``index`` of the last part is decoded ``again``."""
        if index == 0:
            self._decoded, self.rows = self.rows or [], []
        if again and self.rows is not None and index < len(self._decoded):
            self.rows.append(self._decoded[index])

    def together(self) -> SpeculationStats | None:
        """Return the sum of all parts, with one row for each row of the call; ``None`` if nothing was drafted."""
        if not self._found:
            return None
        parts = [stats for stats, _ in self._found]
        rows = [part for _, part in self._found if part is not None]
        return SpeculationStats.merge(parts, rows if len(rows) == len(parts) else None)


_collecting: ContextVar[Parts | None] = ContextVar("parts of a call", default=None)


@contextmanager
def collecting(model: PreTrainedModel, asked: dict[str, Any]) -> Iterator[Parts]:
    """Collect the statistics of ``model`` as those of the parts of one call, which get the keywords ``asked``.

    As keywords of Whisper's own ``generate`` they would replace those that a generation config names.
    """
    parts = Parts(model, asked)
    token = _collecting.set(parts)
    try:
        yield parts
    finally:
        _collecting.reset(token)


def asked_of_all(model: PreTrainedModel) -> dict[str, Any]:
    """Return the keywords that all parts of an open call of ``model`` get."""
    parts = _collecting.get()
    if parts is None:
        return {}
    return parts.asked if parts.model is base_model(model) else {}


def is_part(model: PreTrainedModel, stats: SpeculationStats) -> bool:
    """Tell whether ``stats`` are those of a part of a call of ``model``, and add them if so."""
    parts = _collecting.get()
    if parts is None or parts.model is not base_model(model):
        return False
    parts.add(stats)
    return True


def noting_rows(plain: Any) -> Any:
    """Wrap ``generate_with_fallback``, which decodes one window of some rows."""

    def note(parts: Parts, arguments: dict[str, Any], result: Any) -> None:
        parts.begin_window(arguments["batch_idx_map"])

    return _noting(plain, note, before=True)


def noting_fallbacks(plain: Any) -> Any:
    """Wrap ``_need_fallback``, which says whether a row is decoded again, and whether it is skipped."""

    def note(parts: Parts, arguments: dict[str, Any], result: Any) -> None:
        parts.note_fallback(arguments["index"], bool(result[0]))

    return _noting(plain, note, before=False)


def _noting(plain: Any, note: Callable[[Parts, dict[str, Any], Any], None], before: bool) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _collecting.get()
        arguments = {} if parts is None else dict(signature.bind(self, *args, **kwargs).arguments)
        if parts is not None and before:
            note(parts, arguments, None)
        result = plain(self, *args, **kwargs)
        if parts is not None and not before:
            note(parts, arguments, result)
        return result

    method._hf_spec_original = plain  # type: ignore[attr-defined]
    return method
