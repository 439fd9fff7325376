"""Tensors of slots that grow, and how far each row of a batch has come in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..counting import numbers, repeated, uploaded

GROWTH = 256  # slots added at least when a buffer is full
AHEAD = 64  # columns behind the text that are numbered at once
SMALL = 1 << 17  # bytes up to which it takes less time to copy a buffer than to find the place to write


class Rows:
    """Say how far each row has come: shared by all layers of a cache.

    ``lengths`` (batch,) counts the committed slots; ``cpu_lengths`` is the same on the CPU, so that no layer asks
    the accelerator; ``shortest`` and ``longest`` are their extremes, and ``is_level`` tells that these are the same;
    ``open`` counts the nodes of the open forest, the same in every row.
    """

    def __init__(self, lengths: Tensor, cpu_lengths: list[int]) -> None:
        self.open = 0
        self.device = lengths.device
        self.set(lengths, cpu_lengths)

    def set(self, lengths: Tensor | None, cpu_lengths: list[int], columns: Tensor | None = None) -> None:
        """Let the rows have these lengths; the device need not be told that all are the same.

        ``columns`` (batch, n) are those behind the text, if they are known.
        """
        self._lengths, self.cpu_lengths = lengths, cpu_lengths
        self.shortest, self.longest = min(cpu_lengths, default=0), max(cpu_lengths, default=0)
        self.is_level = self.shortest == self.longest
        self.version = object()  # of the lengths
        self._columns = columns
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def lengths(self) -> Tensor:
        """Return the lengths on the device, (batch,)."""
        if self._lengths is None:
            self._lengths = repeated(self.longest, len(self.cpu_lengths), self.device)
        return self._lengths

    def advance(self, counts: Sequence[int], on_device: Tensor | None = None) -> None:
        """Let row b get longer by ``counts[b]``; they are also ``on_device`` (batch,) if nobody has to put them there.

        Nothing is uploaded either where they are all the same, and nothing is added where all rows are.
        """
        if not any(counts):
            return
        cpu_lengths = [length + count for length, count in zip(self.cpu_lengths, counts, strict=True)]
        if len(set(cpu_lengths)) == 1:
            self.set(None, cpu_lengths)
            return
        more: int | Tensor = counts[0]
        if len(set(counts)) > 1:
            more = (uploaded(list(counts), self.device) if on_device is None else on_device)[:, None]
        columns = self.columns(1) + more
        self.set(columns[:, 0], cpu_lengths, columns)

    def columns(self, count: int) -> Tensor:
        """Return the columns behind the text, (batch, ``count`` or more): worked out once per length."""
        if self._columns is None or self._columns.shape[1] < count:
            count = max(AHEAD, count)
            if self.is_level:
                self._columns = numbers(count, self.device, self.longest).expand(len(self.cpu_lengths), -1)
            else:
                self._columns = self.lengths[:, None] + numbers(count, self.device)
        return self._columns

    def behind(self, count: int) -> Tensor:
        """Return the columns of the next ``count`` nodes of a chain, (batch, count)."""
        end = self.open + count
        return self.columns(end)[:, self.open : end]

    def places(self, count: int) -> tuple[Tensor, Tensor]:
        """Return rows (batch, 1) and columns (batch, count) of the next nodes: worked out once for all layers."""
        place = self.open, count
        if place not in self._places:
            self._places[place] = numbers(len(self.cpu_lengths), self.device)[:, None], self.behind(count)
        return self._places[place]


class SlotBuffer:
    """A tensor of ordinary layout that grows along dimension ``dim``, its slots, and can forget the oldest.

    ``start`` is the column of its first slot.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.data: Tensor | None = None
        self.start = 0

    @property
    def by_slot(self) -> Tensor:
        """Return ``data`` seen as (batch, slots, ...)."""
        assert self.data is not None
        return self.data.transpose(1, self.dim)

    def adopt(self, states: Tensor, start: int) -> None:
        """Take over ``states`` that begin at column ``start``."""
        self.data, self.start = states, start

    def write(self, states: Tensor, rows: Rows, first: int) -> Tensor:
        """Add ``states`` as new nodes and return the columns from ``first`` on."""
        dim, data, count = self.dim, self.data, states.shape[self.dim]
        end = rows.longest + rows.open + count
        in_graph = torch.compiler.is_compiling()  # where sizes may be symbols
        if rows.is_level and data is not None and not in_graph and data.nbytes <= SMALL:
            return self._append(data, states, first, end - count)
        if data is None or end - self.start > data.shape[dim]:
            data = self._make_room(states, first, end)
        start = self.start
        if rows.is_level:
            data.narrow(dim, end - count - start, count).copy_(states)
        else:
            self.by_slot[self._index(*rows.places(count))] = states.transpose(1, dim)
        return data.narrow(dim, first - start, end - first)

    def _append(self, data: Tensor, states: Tensor, first: int, end: int) -> Tensor:
        """Hold the columns of ``data`` from ``first`` to ``end``, and ``states``, in a new buffer without room."""
        if self.start != first or data.shape[self.dim] != end - first:
            data = data.narrow(self.dim, first - self.start, end - first)
        self.data, self.start = torch.cat((data, states), self.dim), first
        return self.data

    def _make_room(self, like: Tensor, first: int, end: int) -> Tensor:
        """Hold columns up to ``end`` in a new buffer, and leave those before ``first`` behind."""
        size = end - first + max(GROWTH, (end - first) // 2)
        if self.data is None:
            grown = like.new_zeros((*like.shape[: self.dim], size, *like.shape[self.dim + 1 :]))
        else:
            gone = first - self.start
            kept = self.data.narrow(self.dim, gone, self.data.shape[self.dim] - gone)
            behind = [0, 0] * (kept.ndim - 1 - self.dim)  # of the dimensions behind this one nothing is added
            grown = torch.nn.functional.pad(kept, [*behind, 0, size - kept.shape[self.dim]])
        self.data, self.start = grown, first
        return grown

    def columns(self, row: int, first: int, end: int) -> Tensor:
        """Return the slots (slots, ...) of one row from column ``first`` on, or the first that is kept, to ``end``."""
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

    def clear(self, rows: Rows) -> None:
        """Put zeros behind the committed slots: a nan there would reach queries that do not see it, as 0 * nan."""
        if self.data is None:
            return
        for row, length in enumerate(rows.cpu_lengths):
            self.by_slot[row, length - self.start :].zero_()

    def join(self, other: SlotBuffer, rows: Rows, others: Rows) -> None:
        """Take over what ``others`` have committed to ``other``, behind one's own ``rows``."""
        sides = ((self, rows), (other, others))
        like = next((one.data for one, _ in sides if one.data is not None), None)
        if like is None:
            return
        start = min(0 if one.data is None else one.start for one, _ in sides)  # without data, nothing was read yet
        batch, end = len(rows.cpu_lengths) + len(others.cpu_lengths), max(rows.longest, others.longest)
        shape = [batch, *like.shape[1:]]
        shape[self.dim] = end - start + GROWTH
        joined = like.new_zeros(shape)
        parts = joined.transpose(1, self.dim).split([len(rows.cpu_lengths), len(others.cpu_lengths)])
        for part, (one, its) in zip(parts, sides, strict=True):
            if one.data is not None and its.longest > one.start:
                part[:, one.start - start : its.longest - start] = one.by_slot[:, : its.longest - one.start]
        self.data, self.start = joined, start

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        if self.data is not None:
            self.data = self.data.index_select(0, rows.to(self.data.device))
