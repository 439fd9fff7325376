"""Which combinations of parameters are tested each time, and which only with ``-m slow``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """List all combinations of the axes' values, and mark as slow those whose pairs of values others have."""
    combinations = list(itertools.product(*(list(enumerate(axis)) for axis in axes)))
    pairs = [set(itertools.combinations(enumerate(place for place, _ in one), 2)) for one in combinations]
    wanted, kept = set[Any]().union(*pairs), set[int]()
    while wanted:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & wanted))
        wanted -= pairs[best]
        kept.add(best)
    return [
        pytest.param(*(value for _, value in one), marks=() if number in kept else pytest.mark.slow)
        for number, one in enumerate(combinations)
    ]
