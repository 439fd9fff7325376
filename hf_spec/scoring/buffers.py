"""Growing tensors of cache slots, and the length of each batch row in them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..device_tensors import cached_arange, cached_full, to_device

SLOTS_ADDED = 256  # slots added at least when a buffer is full
COLUMNS_AHEAD = 64  # column numbers computed at once, for columns after the committed tokens
SMALL_BUFFER = 1 << 17  # bytes up to which copying a buffer takes less time than an indexed write
NOWHERE = -2  # no column


class SequenceLengths:
    """The length of each batch row, shared by all layers of a cache.

    ``lengths`` (batch,) counts the committed slots. ``cpu_lengths`` is the same on the CPU, so that no layer asks the
    accelerator. ``shortest`` and ``longest`` are their extremes; ``equal_lengths``: all rows are equally long.
    ``draft_nodes`` counts the nodes of the draft region, the same number in every row. ``small_to`` is the number of
    columns up to which the buffers of all layers are small. In a forward that may append to small buffers, the new
    columns are those from ``appends_at`` up to ``appends_to``.
    """

    def __init__(self, lengths: Tensor, cpu_lengths: list[int]) -> None:
        self.draft_nodes = 0
        self.small_to, self.appends_at, self.appends_to = sys.maxsize, NOWHERE, NOWHERE
        self.device = lengths.device
        self.set(lengths, cpu_lengths)

    def set(self, lengths: Tensor | None, cpu_lengths: list[int], columns: Tensor | None = None) -> None:
        """Set the lengths of the rows; ``lengths`` may be ``None`` where all are the same.

        ``columns`` (batch, n) are the numbers of the columns after the committed ones, if they are known.
        """
        self._lengths, self.cpu_lengths = lengths, cpu_lengths
        self.shortest, self.longest = min(cpu_lengths, default=0), max(cpu_lengths, default=0)
        self.equal_lengths = self.shortest == self.longest
        self.version = object()  # a new one for each change of the lengths
        self._columns = columns
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def lengths(self) -> Tensor:
        """Return the lengths on the device, (batch,)."""
        if self._lengths is None:
            self._lengths = cached_full(self.longest, len(self.cpu_lengths), self.device)
        return self._lengths

    def begin_forward(self, count: int) -> None:
        """Let layers append the ``count`` nodes of the next forward to small buffers, where all rows are equally long.

        ``end_forward`` has to follow, also after an error.
        """
        end = self.longest + self.draft_nodes
        if self.equal_lengths and end <= self.small_to:
            self.appends_at, self.appends_to = end, end + count

    def end_forward(self) -> None:
        """Let nothing be appended until the next ``begin_forward``."""
        self.appends_at = NOWHERE

    def advance(self, counts: Sequence[int], on_device: Tensor | None = None) -> None:
        """Make row b longer by ``counts[b]``; ``on_device`` (batch,) are the same counts, if they are there already.

        Equal counts need no upload. Rows that end equally long need no device operation at all.
        """
        if not any(counts):
            return
        cpu_lengths = list(map(operator.add, self.cpu_lengths, counts))
        if len(set(cpu_lengths)) == 1:
            self.set(None, cpu_lengths)
            return
        more: int | Tensor = counts[0]
        if len(set(counts)) > 1:
            more = (to_device(list(counts), self.device) if on_device is None else on_device)[:, None]
        columns = self.columns(1) + more
        self.set(columns[:, 0], cpu_lengths, columns)

    def columns(self, count: int) -> Tensor:
        """Return the columns after the committed ones, (batch, ``count`` or more), computed once per length."""
        if self._columns is None or self._columns.shape[1] < count:
            count = max(COLUMNS_AHEAD, count)
            if self.equal_lengths:
                self._columns = cached_arange(count, self.device, self.longest).expand(len(self.cpu_lengths), -1)
            else:
                self._columns = self.lengths[:, None] + cached_arange(count, self.device)
        return self._columns

    def next_columns(self, count: int) -> Tensor:
        """Return the columns of the next ``count`` nodes of a chain, (batch, count)."""
        end = self.draft_nodes + count
        return self.columns(end)[:, self.draft_nodes : end]

    def places(self, count: int) -> tuple[Tensor, Tensor]:
        """Return rows (batch, 1) and columns (batch, count) of the next nodes, computed once for all layers."""
        place = self.draft_nodes, count
        if place not in self._places:
            self._places[place] = cached_arange(len(self.cpu_lengths), self.device)[:, None], self.next_columns(count)
        return self._places[place]


class SlotBuffer:
    """A tensor that grows along dimension ``dim``, its slots, and can drop the oldest ones.

    Its layout is that of transformers. ``start`` is the column of its first slot.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.data: Tensor | None = None
        self.start = 0

    @property
    def by_slot(self) -> Tensor:
        """Return a view of ``data`` as (batch, slots, ...)."""
        assert self.data is not None
        return self.data.transpose(1, self.dim)

    @property
    def small_columns(self) -> int:
        """Return how many columns take at most ``SMALL_BUFFER`` bytes."""
        return 0 if self.data is None else SMALL_BUFFER * self.data.shape[self.dim] // max(1, self.data.nbytes)

    def adopt(self, states: Tensor, start: int) -> None:
        """Use ``states``, which begin at column ``start``, as the data."""
        self.data, self.start = states, start

    def write(self, states: Tensor, rows: SequenceLengths, first: int) -> Tensor:
        """Add ``states`` as new nodes and return the columns from ``first`` on."""
        dim, data, count = self.dim, self.data, states.shape[self.dim]
        before = rows.longest + rows.draft_nodes
        end, equal = before + count, rows.equal_lengths
        # In a graph sizes may be symbols.
        if equal and data is not None and not torch.compiler.is_compiling() and data.nbytes <= SMALL_BUFFER:
            return self._append(data, states, first, before)
        if data is None or end - self.start > data.shape[dim]:
            data = self._grow(states, first, end)
        start = self.start
        if equal:  # one contiguous copy instead of an indexed write per row
            data.narrow(dim, before - start, count).copy_(states)
        else:
            self.by_slot[self._index(*rows.places(count))] = states.transpose(1, dim)
        return data.narrow(dim, first - start, end - first)

    def _append(self, data: Tensor, states: Tensor, first: int, end: int) -> Tensor:
        """Put the columns of ``data`` from ``first`` to ``end``, and ``states``, into a new buffer that they fill."""
        if self.start != first or data.shape[self.dim] != end - first:
            data = data.narrow(self.dim, first - self.start, end - first)
        self.data, self.start = torch.cat((data, states), self.dim), first
        return self.data

    def _grow(self, like: Tensor, first: int, end: int) -> Tensor:
        """Move to a new buffer with space for columns up to ``end``, and drop those before ``first``."""
        size = end - first + max(SLOTS_ADDED, (end - first) // 2)
        if self.data is None:
            grown = like.new_zeros((*like.shape[: self.dim], size, *like.shape[self.dim + 1 :]))
        else:
            gone = first - self.start
            kept = self.data.narrow(self.dim, gone, self.data.shape[self.dim] - gone)
            next_columns = [0, 0] * (kept.ndim - 1 - self.dim)  # the dimensions after this one are not padded
            grown = torch.nn.functional.pad(kept, [*next_columns, 0, size - kept.shape[self.dim]])
        self.data, self.start = grown, first
        return grown

    def columns(self, row: int, first: int, end: int) -> Tensor:
        """Return the slots (slots, ...) of one row from column ``first``, or the oldest one kept, up to ``end``."""
        return self.by_slot[row, max(0, first - self.start) : end - self.start]

    def move(self, row: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots at columns ``source`` to columns ``target``, both (batch, count), of rows ``row`` (batch, 1)."""
        if self.data is not None:
            self.by_slot[self._index(row, target)] = self.by_slot[self._index(row, source)]

    def _index(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Turn rows and columns into indices of ``by_slot``."""
        assert self.data is not None
        row, column = row.to(self.data.device), column.to(self.data.device)
        return row, column - self.start if self.start else column

    def clear(self, rows: SequenceLengths) -> None:
        """Zero the slots after the committed ones: a nan there would reach even queries that mask it, as 0 * nan."""
        if self.data is None:
            return
        for row, length in enumerate(rows.cpu_lengths):
            self.by_slot[row, length - self.start :].zero_()

    def join(self, other: SlotBuffer, rows: SequenceLengths, others: SequenceLengths) -> None:
        """Append the rows ``others`` of ``other``, with what they have committed, after the own ``rows``."""
        sides = ((self, rows), (other, others))
        like = next((one.data for one, _ in sides if one.data is not None), None)
        if like is None:
            return
        start = min(0 if one.data is None else one.start for one, _ in sides)  # no data: nothing was read yet
        batch, end = len(rows.cpu_lengths) + len(others.cpu_lengths), max(rows.longest, others.longest)
        shape = [batch, *like.shape[1:]]
        shape[self.dim] = end - start + SLOTS_ADDED
        joined = like.new_zeros(shape)
        parts = joined.transpose(1, self.dim).split([len(rows.cpu_lengths), len(others.cpu_lengths)])
        for part, (one, its) in zip(parts, sides, strict=True):
            if one.data is not None and its.longest > one.start:
                part[:, one.start - start : its.longest - start] = one.by_slot[:, : its.longest - one.start]
        self.data, self.start = joined, start

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        if self.data is not None:
            self.data = self.data.index_select(0, rows.to(self.data.device))
