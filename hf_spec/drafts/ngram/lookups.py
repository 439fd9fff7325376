"""Acceptance of n-gram draft tokens, estimated from earlier ones after a match of the same length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...policy.acceptance import AcceptanceEstimator, num_accepted
from ...policy.base import DraftSource

EXACT_LENGTHS = 4  # tokens of a match, up to which every length has its own record; then every power of two


class _Lookup(NamedTuple):
    """A ``chain`` that was looked up for the tokens of a text from ``start`` on, after a match of this ``level``."""

    start: int
    chain: tuple[int, ...]
    level: int


class Lookups:
    """The chains that were looked up in one call, compared with the text once it is long enough.

    Chains that were not proposed count, too. So it costs no forward to learn when drafting pays. ``acceptance`` may be
    shared by calls.
    """

    def __init__(self, acceptance: AcceptanceEstimator, rows: int) -> None:
        self._acceptance = acceptance
        self._waiting: list[deque[_Lookup]] = [deque() for _ in range(rows)]

    def survival(self, row: int, text: Sequence[int], chain: tuple[int, ...], agreed: int) -> list[float]:
        """Return how probably each token of ``chain`` is accepted, which was found after ``agreed`` equal tokens."""
        waiting, level = self._waiting[row], match_class(agreed)
        while waiting and waiting[0].start + len(waiting[0].chain) <= len(text):
            self._judge(waiting.popleft(), text)
        if chain:
            waiting.append(_Lookup(len(text), chain, level))
        return self._acceptance.survival(DraftSource.NGRAM, len(chain), level)

    def _judge(self, lookup: _Lookup, text: Sequence[int]) -> None:
        start, chain, level = lookup
        right = num_accepted(chain, text[start : start + len(chain)])
        self._acceptance.record(DraftSource.NGRAM, [len(chain)], [right], level)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with ``rows`` only."""
        self._waiting = [self._waiting[row] for row in rows]

    def join(self, other: Lookups) -> None:
        """Go on with the rows of ``other``, too."""
        self._waiting += other._waiting


def match_class(agreed: int) -> int:
    """Number the matches that are judged alike, from 1 on: of 1, 2, 3, 4, 5 to 7, 8 to 15, ... tokens."""
    return max(1, agreed) if agreed <= EXACT_LENGTHS else EXACT_LENGTHS + agreed.bit_length() - 2
