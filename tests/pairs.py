"""Which combinations of parameters are tested each time, and which only with ``-m slow``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """List all combinations of the axes' values, and mark as slow those whose pairs of values others have."""
    return _enough(axes, 2)


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """List all combinations, and mark as slow those whose values others have: for axes that hardly meet."""
    return _enough(axes, 1)


def usual(axis: Iterable[Any], wanted: Iterable[Any]) -> list[Any]:
    """List the values of an axis, and mark as slow all but the ``wanted`` ones, which stand for those like them."""
    values, kept = list(axis), list(wanted)
    assert all(one in values for one in kept), [one for one in kept if one not in values]
    return [pytest.param(value, marks=() if value in kept else pytest.mark.slow) for value in values]


def _enough(axes: tuple[Iterable[Any], ...], together: int) -> list[Any]:
    """Mark as slow the combinations that add no ``together`` values which no earlier one has."""
    combinations = list(itertools.product(*(list(enumerate(axis)) for axis in axes)))
    groups = [set(itertools.combinations(enumerate(place for place, _ in one), together)) for one in combinations]
    wanted, kept, used = set[Any]().union(*groups), set[int](), Counter[Any]()
    while wanted:  # of combinations that add as much, take one whose values were taken least
        news = [(len(group & wanted), -sum(used[one] for one in group)) for group in groups]
        best = news.index(max(news))
        wanted -= groups[best]
        used.update(groups[best])
        kept.add(best)
    return [
        pytest.param(*(value for _, value in one), marks=() if number in kept else pytest.mark.slow)
        for number, one in enumerate(combinations)
    ]
