"""Acceptance of n-gram draft tokens, estimated from earlier ones after a match of the same length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...policy.acceptance import AcceptanceEstimator, num_accepted
from ...policy.base import DraftSource


class _Lookup(NamedTuple):
    """A ``chain`` for the tokens of a text from ``start`` on, found after a match of ``agreed`` tokens."""

    start: int
    chain: tuple[int, ...]
    agreed: int


class Lookups:
    """The chains that were looked up in one call, compared with the text until a token differs.

    Chains that were not proposed count, too. So it costs no forward to learn when drafting pays. ``acceptance`` may be
    shared by calls.
    """

    def __init__(self, acceptance: AcceptanceEstimator, rows: int) -> None:
        self._acceptance = acceptance
        self._waiting: list[list[_Lookup]] = [[] for _ in range(rows)]

    def survival(self, row: int, text: Sequence[int], chain: tuple[int, ...], agreed: int) -> list[float]:
        """Return how probably each token of ``chain`` is accepted, which was found after ``agreed`` equal tokens."""
        agreed = max(1, agreed)
        self._waiting[row] = waiting = [one for one in self._waiting[row] if not self._is_judged(one, text)]
        if chain:
            waiting.append(_Lookup(len(text), chain, agreed))
        return self._acceptance.survival(DraftSource.NGRAM, len(chain), agreed)

    def _is_judged(self, lookup: _Lookup, text: Sequence[int]) -> bool:
        """Compare a chain with ``text``, and record it once a token differs or all are there."""
        start, chain, agreed = lookup
        right = num_accepted(chain, text[start : start + len(chain)])
        if right == len(text) - start < len(chain):
            return False
        self._acceptance.record(DraftSource.NGRAM, [len(chain)], [right], agreed)
        return True

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with ``rows`` only."""
        self._waiting = [self._waiting[row] for row in rows]

    def join(self, other: Lookups) -> None:
        """Go on with the rows of ``other``, too."""
        self._waiting += other._waiting
