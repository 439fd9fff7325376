"""Which rows of a forward attend together: neighbours of similar length, where that costs less than padding. ::

    - - - - - - t t t        the first two rows attend to three columns, without a mask of the padding,
    - - - - - - - t t        and the third one to nine
    t t t t t t t t t

On a CPU a call of scaled dot products costs as much as 65,536 numbers of keys of one node, or as fewer of several
nodes. An accelerator attends to all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .attention import Span
from .parts import Extent, cheapest_parts

CALL_NUMBERS = 65_536  # numbers of keys that attention reads in the time that a further call costs
NODES_TWICE = 16  # nodes per sequence for which a column costs twice as much as for one
MOST_ROWS = 64  # larger batches are not divided: that takes the square of their rows
DIVIDED_AGAIN = 64  # columns by which the rows grow until they are divided again


class RowSpans:
    """The spans of the rows of ``cache`` from step to step; the division is kept while rows grow a little.

    ``padding`` (batch, prompt) bool is False at padding, ``None`` without any.
    """

    def __init__(self, cache: Any, padding: Tensor | None) -> None:
        self._cache = cache
        # The first column of each row after its padding, by number in the batch of the prefill. None: all at once.
        self._starts = _starts(padding, cache.rows.cpu_lengths) if cache.rows.device.type == "cpu" else None
        self._key: object = None
        self._parts: dict[int, list[range]] = {}  # by the number of new nodes

    def of(self, count: int) -> Sequence[Span]:
        """Return the spans of a forward over ``count`` new nodes, none where all rows should attend at once."""
        if self._starts is None:
            return ()
        rows = self._cache.rows
        ends = rows.cpu_lengths
        if not 1 < len(ends) <= MOST_ROWS:
            return ()
        key = tuple(self._cache.batch), rows.longest // DIVIDED_AGAIN, rows.shortest // DIVIDED_AGAIN
        if key != self._key:
            self._key, self._parts = key, {}
        if (parts := self._parts.get(count)) is None:
            extents = [Extent(self._starts[row], end) for row, end in zip(self._cache.batch, ends, strict=True)]
            parts = self._parts[count] = self._divided(extents, count)
        if len(parts) < 2:
            return ()
        new, starts = rows.draft_nodes + count, [self._starts[row] for row in self._cache.batch]
        return [
            Span(one.start, one.stop, min(starts[one.start : one.stop]), max(ends[one.start : one.stop]) + new)
            for one in parts
        ]

    def align(self) -> None:
        """Move the starts of the rows, which are about to be shifted to the end of the longest one."""
        if self._starts is not None:
            rows = self._cache.rows
            for row, length in zip(self._cache.batch, rows.cpu_lengths, strict=True):
                self._starts[row] += rows.longest - length
            self._key = None

    def _divided(self, extents: list[Extent], count: int) -> list[range]:
        """Divide the rows so that keys and calls cost least; in one part where no layer keeps all columns."""
        numbers = _numbers_of_a_column(self._cache)
        if numbers == 0 or self._cache.window is not None:
            return []
        return cheapest_parts(extents, CALL_NUMBERS / (numbers * (1 + count / NODES_TWICE)))


def _starts(padding: Tensor | None, rows: Sequence[int]) -> list[int] | None:
    """Return where each row begins after its left padding; ``None`` for one row, or with padding in a row's middle."""
    if len(rows) < 2:
        return None
    if padding is None:
        return [0] * len(rows)
    starts = (padding.cumsum(1) == 0).sum(1)
    has_holes = bool((padding.sum(1) + starts != padding.shape[1]).any())
    found: list[int] = starts.tolist()
    return None if has_holes else found


def _numbers_of_a_column(cache: Any) -> int:
    """Count the numbers that one column of a layer of full attention has as keys; 0 if there is no such layer."""
    for layer in cache.layers:
        if layer.keeps_slots and layer.window is None and (keys := layer.buffers["keys"].data) is not None:
            return int(keys.shape[1] * keys.shape[3])
    return 0
