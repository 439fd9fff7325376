"""Rows of unequal length, divided into parts that are computed one after the other, where padding costs more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple


class Extent(NamedTuple):
    """The columns from ``first`` up to ``end`` that a row, or a part of the rows, uses."""

    first: int
    end: int


def cheapest_parts(rows: Sequence[Extent], fixed: float) -> list[range]:
    """Divide neighbouring rows into the parts that cost least, in their order.

    All rows of a part are as wide as its first and last column ask for. A part costs its rows times that width, and
    ``fixed`` in addition, both in places (one column of one row). Equal neighbours are never divided, so the time
    grows with the square of those that differ.
    """
    runs = [(extent, len(list(equal))) for extent, equal in groupby(rows)]
    costs, begins = [0.0], [0]  # of the cheapest parts of the first n runs, and where the last of these parts begins
    for end in range(1, len(runs) + 1):
        (first, last), count = runs[end - 1][0], 0
        least, at = float("inf"), 0
        for begin in range(end - 1, -1, -1):
            extent, more = runs[begin]
            first, last, count = min(first, extent.first), max(last, extent.end), count + more
            cost = costs[begin] + count * (last - first) + fixed
            if cost <= least:  # of equal ones the fewest parts
                least, at = cost, begin
        costs.append(least)
        begins.append(at)
    starts = [0, *accumulate(count for _, count in runs)]  # the first row of each run, and the end
    parts, end = [], len(runs)
    while end:
        parts.append(range(starts[begins[end]], starts[end]))
        end = begins[end]
    return parts[::-1]
