"""Where a weight's values are after oneDNN has reordered it, so that single rows can be read without undoing it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

PERIOD = 128  # rows after which the layout repeats; oneDNN's blocks have 8 to 64 rows
DIGIT = 100  # numbers are written in digits below this, which every floating-point type holds exactly
CHUNK = 4096  # rows that are compared at a time


class RowReader:
    """The rows of a reordered weight, read from the memory of ``packed`` (rows, columns)."""

    def __init__(self, packed: Tensor, row_starts: Tensor, column_offsets: Tensor) -> None:
        self._packed = packed  # owns the memory
        self._values = memory_of(packed)
        self._row_starts, self._column_offsets = row_starts, column_offsets

    @property
    def nbytes(self) -> int:
        """Return the size of the tables in bytes, without the packed values."""
        return self._row_starts.nbytes + self._column_offsets.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``, of any shape: (*ids.shape, columns); an IndexError for an id that is no row."""
        starts = self._row_starts.index_select(0, ids.reshape(-1))
        places = starts[:, None] + self._column_offsets
        return self._values[places].view(*ids.shape, len(self._column_offsets))


def memory_of(packed: Tensor) -> Tensor:
    """Return the memory of an oneDNN tensor as a flat tensor of its dtype. It is valid as long as ``packed`` lives."""
    size, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    values = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int8)
    return values.view(packed.dtype)


def row_reader(weight: Tensor, packed: Tensor, reorder: Callable[[Tensor], Tensor]) -> RowReader | None:
    """Return what reads the rows of ``packed``, which is ``weight`` (rows, columns) reordered; ``None`` if unknown.

    The layout is learnt from a few reordered rows of known content. All of ``weight`` is then compared.
    """
    rows = len(weight)
    offsets = _offsets(min(rows, 2 * PERIOD), weight.shape[1], weight.dtype, reorder)
    if offsets is None:
        return None
    starts, columns = offsets[:, 0], offsets[0] - offsets[0, 0]
    if not torch.equal(offsets, starts[:, None] + columns):
        return None
    numbers = torch.arange(rows, device="cpu")
    jump = starts[PERIOD] - starts[0] if len(starts) > PERIOD else 0
    row_starts = starts[numbers % PERIOD] + numbers // PERIOD * jump
    if int(row_starts.max() + columns.max()) >= len(memory_of(packed)):
        return None
    reader = RowReader(packed, row_starts, columns)
    parts = zip(numbers.split(CHUNK), weight.split(CHUNK), strict=True)
    return reader if all(same_bits(reader(some), part) for some, part in parts) else None


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of ``values`` as integers."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one dtype hold the same bits, NaN included."""
    return torch.equal(bits_of(one), bits_of(other))


def _offsets(rows: int, columns: int, dtype: torch.dtype, reorder: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the place in memory of each value of a reordered weight, (rows, columns); ``None`` if unclear."""
    row, column = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    found = [_content(number, dtype, reorder) for number in (row, column)]
    place = torch.arange(len(found[0]), device="cpu")
    is_value = (found[0] >= 0) & (found[1] >= 0)  # the rest is padding
    if int(is_value.sum()) != rows * columns:
        return None
    offsets = torch.full((rows, columns), -1, device="cpu")
    offsets[found[0][is_value], found[1][is_value]] = place[is_value]
    return offsets if int(offsets.min()) >= 0 else None


def _content(numbers: Tensor, dtype: torch.dtype, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    """Reorder ``numbers`` (rows, columns) and return them in the order of the memory, flat; padding is negative."""
    total: Tensor | None = None
    for unit in (1, DIGIT, DIGIT**2):
        digit = numbers // unit % DIGIT + 1  # padding is 0
        packed = reorder(digit.to(dtype))
        read = (memory_of(packed).float() - 1).long().clone()
        scaled = torch.where(read < 0, -(DIGIT**3), read * unit)
        total = scaled if total is None else total + scaled
    assert total is not None
    return total
