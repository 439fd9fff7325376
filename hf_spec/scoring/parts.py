"""Rows of unequal length, divided into parts that are computed one after the other, where padding costs more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """The columns from ``first`` up to ``end`` that a row, or a part of the rows, uses."""

    first: int
    end: int


def cheapest_parts(rows: Sequence[Extent], fixed: float) -> list[range]:
    """Divide neighbouring rows into the parts that cost least, in their order.

    All rows of a part are as wide as its first and last column ask for. A part costs its rows times that width, and
    ``fixed`` in addition, both in places (one column of one row).
    """
    costs, begins = [0.0], [0]  # of the cheapest parts of the first n rows, and where the last of these parts begins
    for end in range(1, len(rows) + 1):
        first, last = rows[end - 1]
        least, at = float("inf"), 0
        for begin in range(end - 1, -1, -1):
            first, last = min(first, rows[begin].first), max(last, rows[begin].end)
            cost = costs[begin] + (end - begin) * (last - first) + fixed
            if cost <= least:  # of equal ones the fewest parts
                least, at = cost, begin
        costs.append(least)
        begins.append(at)
    parts, end = [], len(rows)
    while end:
        parts.append(range(begins[end], end))
        end = begins[end]
    return parts[::-1]
