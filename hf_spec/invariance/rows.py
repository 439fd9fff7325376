"""Functions of rows that give each row the same bits, however many rows are passed at once.

A matrix product sums each row in an order that depends on how many rows there are. So each function is tried with
several numbers of rows, and only those numbers are used that give the same bits. Other numbers of rows are padded to
the next one, or split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # numbers of rows that are tried, and no others are used
MOST = SIZES[-1]
ALIGNMENT = 64  # bytes, as torch allocates: products of one library sum otherwise where an input begins elsewhere

Function = Callable[[Tensor], Tensor]
Functions = Callable[[Tensor], tuple[Tensor, ...]]


def agreeing_sizes(function: Function, sample: Tensor) -> tuple[int, ...]:
    """Return the numbers of rows for which ``function`` gives a row the same bits, at whichever place it stands.

    ``sample`` (MOST, inputs) are rows of random numbers. The result is the largest group of sizes that agree, and of
    two the one that begins with fewer rows. It is empty if the place of a row matters for each number of rows.
    """
    groups: list[tuple[dict[int, Tensor], list[int]]] = []
    for size in reversed(SIZES):
        found = _bits_by_row(function, sample, size)
        if found is None:
            continue
        for known, members in groups:
            if all(torch.equal(known[row], bits) for row, bits in found.items()):
                members.append(size)
                break
        else:
            groups.append((found, [size]))
    best = max((members for _, members in groups), key=lambda members: (len(members), -min(members)), default=[])
    return tuple(sorted(best))


def _bits_by_row(function: Function, sample: Tensor, size: int) -> dict[int, Tensor] | None:
    """Return the results of the first and last ``size`` rows by number; ``None`` if a row's place changes its bits."""
    found: dict[int, Tensor] = {}
    order = list(range(len(sample)))
    first, last = order[:size], order[len(sample) - size :]
    for rows in (first, first[1:] + first[:1], last, last[size // 2 :] + last[: size // 2]):
        for row, bits in zip(rows, function(sample[rows]), strict=True):
            if row in found and not torch.equal(found[row], bits):
                return None
            found[row] = bits
    return found


def in_sizes(function: Function, states: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``function(states)``, (..., outputs), of ``states`` (..., inputs), called with ``sizes`` of rows only."""
    if not states.numel():
        return function(states)
    (result,) = all_in_sizes(lambda rows: (function(rows),), states, sizes)
    return result.view(*states.shape[:-1], result.shape[-1])


def one_by_one(function: Function, states: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``function(states)`` of ``states`` (batch, ...), called with one row of the batch at a time."""
    return torch.cat([function(one) for one in states.split(1)])


def all_in_sizes(function: Functions, states: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Do as ``in_sizes`` for a ``function`` with several results, (rows, outputs) each."""
    rows = states.reshape(-1, states.shape[-1])
    if rows.data_ptr() % ALIGNMENT:
        rows = rows.clone()
    count, most = len(rows), sizes[-1]
    parts = [_padded(function, rows[first : first + most], sizes) for first in range(0, count, most)]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _padded(function: Functions, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    count = len(rows)
    if count in sizes:
        return function(rows)
    size = next(size for size in sizes if size > count)
    found = function(torch.nn.functional.pad(rows, (0, 0, 0, size - count)))
    return tuple(result[:count] for result in found)
