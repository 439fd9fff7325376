"""A history of finished texts: their latest tokens, and an index from n-grams to what followed them.

Each position is indexed by the last 1, 2, 4 and 8 tokens before it. A match is then extended backwards for as long as
tokens are equal. All data is in flat arrays: about 100 bytes a token, whatever the texts are. The method is known as
suffix decoding (arXiv 2411.04975).
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

# Separator after each remembered text. It is no token id, so it never matches, and no continuation may contain it.
BREAK = -1
# Sizes of the n-grams that are indexed, the longest first.
SIZES = (8, 4, 2, 1)
# Latest positions that are compared per n-gram: bounds the time of a step, however common the n-gram is.
LOOK_BACK = 32
# Tokens before a position that are compared at most.
LONGEST_MATCH = 64
# Initial number of hash buckets, as a power of two; there are more once as many tokens are remembered.
FIRST_PLACES = 12
# Tokens per block of a text's beginning, by which a text is recognised as the continuation of a remembered one.
BLOCK = 64

# Tokens, the position after a match in them, and how many tokens before it are equal.
Place = tuple[Sequence[int], int, int]


class SuffixIndex:
    """The latest ``size`` tokens of finished texts; threads may share it.

    A text that begins like a remembered one, such as the next turn of a conversation, adds only its new part.
    """

    _is_whole = True  # False while a text is added, and after an interruption of that

    def __init__(self, size: int) -> None:
        self.size = size
        self.largest = BREAK  # largest token id that was ever remembered
        self._lock = Lock()
        self._tokens = array("i")
        self._forgotten = 0  # tokens that were dropped before the first one of ``_tokens``
        # For each size of n-gram, a linked list per hash: ``_latest`` maps a bucket to the latest position after such
        # an n-gram, ``_before`` maps a position to the one before it with the same hash. Position 1 is the first
        # token that was ever remembered; 0 is none.
        self._most = max(0, size - 1).bit_length()
        self._spread(min(self._most, FIRST_PLACES))
        self._beginnings: dict[int, int] = {}  # hash of a text's first blocks -> position after them

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of the state without the lock; other threads may go on writing."""
        with self._lock:
            return copy.deepcopy({name: one for name, one in vars(self).items() if one is not self._lock})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def __len__(self) -> int:
        return min(len(self._tokens), self.size)

    @property
    def nbytes(self) -> int:
        """Count the bytes of tokens and index."""
        arrays = (self._tokens, *self._latest, *self._before)
        return sum(one.itemsize * len(one) for one in arrays)

    def tokens(self) -> list[int]:
        """Return the remembered tokens, the oldest first, with BREAK after each text."""
        with self._lock:
            self._repair()
            return self._tokens[len(self._tokens) - len(self) :].tolist()

    def add(self, text: Sequence[int]) -> None:
        """Remember a finished ``text``; the oldest tokens go, and of a text longer than the history its beginning."""
        with self._lock:
            self._repair()
            self.largest = max(self.largest, *text) if text else self.largest
            known = self._known(text)
            self._is_whole = False
            self._append(text[max(0, known - LONGEST_MATCH) :][-max(1, self.size - 1) :])
            self._note_beginnings(text, known)
            self._forget()
            self._is_whole = True

    def find(self, context: Sequence[int], size: int, depth: int) -> list[Place]:
        """List the latest positions after the last ``size`` tokens of ``context``, each in a copy with ``depth``
        following tokens."""
        number = SIZES.index(size)
        found: list[Place] = []
        ngram = array("i", context[-size:])
        with self._lock:
            self._repair()
            before = self._before[number]
            first = len(self._tokens) - len(self)
            place = self._latest[number][hash(tuple(ngram)) & self._mask]
            for _ in range(LOOK_BACK):
                index = place - 1 - self._forgotten
                if index < first + size:  # dropped, or the end of the list; further ones are older still
                    break
                if self._tokens[index - size : index] == ngram:
                    start = max(first, index - LONGEST_MATCH)
                    copied = self._tokens[start : index + depth]
                    found.append((copied, index - start, match_length(copied, index - start, context)))
                place = before[index]
        return found

    def _append(self, text: Sequence[int]) -> None:
        start = len(self._tokens)
        self._tokens.extend(text)
        self._tokens.append(BREAK)
        if len(self._tokens) <= self._mask + 1 or self._mask + 1 == 1 << self._most:
            self._link(start, len(self._tokens))
            return
        self._index_again()  # with a larger table: there are more tokens than buckets

    def _repair(self) -> None:
        """Forget a text whose addition was interrupted, for example by a notebook's stop button."""
        if self._is_whole:
            return
        while self._tokens and self._tokens[-1] != BREAK:
            self._tokens.pop()
        self._beginnings = {}
        self._index_again()
        self._is_whole = True

    def _index_again(self) -> None:
        self._spread(min(self._most, max(FIRST_PLACES, (4 * len(self._tokens)).bit_length())))
        start = 0
        for end in [index for index, token in enumerate(self._tokens, start=1) if token == BREAK]:
            self._link(start, end)
            start = end

    def _spread(self, bits: int) -> None:
        """Reset the index to ``1 << bits`` empty buckets; the table grows with the number of tokens."""
        self._mask = (1 << bits) - 1
        self._latest = [array("q", bytes(8 << bits)) for _ in SIZES]
        self._before = [array("q") for _ in SIZES]

    def _link(self, start: int, stop: int) -> None:
        """Index the text ``_tokens[start:stop]``, its BREAK included."""
        for size, latest, before in zip(SIZES, self._latest, self._before, strict=True):
            before.extend([0] * min(size, stop - start))
            for index in range(start + size, stop):
                bucket = hash(tuple(self._tokens[index - size : index])) & self._mask
                before.append(latest[bucket])
                latest[bucket] = self._forgotten + index + 1

    def _forget(self) -> None:
        """Drop tokens beyond ``size``: only now and then, because it moves all others."""
        if (surplus := len(self._tokens) - self.size) > self.size // 4:
            for one in (self._tokens, *self._before):
                del one[:surplus]
            self._forgotten += surplus
            self._beginnings = {key: place for key, place in self._beginnings.items() if place > self._forgotten}

    def _known(self, text: Sequence[int]) -> int:
        """Count the tokens at the start of ``text``, in complete blocks, that are remembered already."""
        first = self._forgotten + len(self._tokens) - len(self)
        known = 0
        for end, beginning in _beginnings(text):
            if self._beginnings.get(beginning, 0) - BLOCK < first:
                break
            known = end
        return known

    def _note_beginnings(self, text: Sequence[int], known: int) -> None:
        """Index where each beginning of ``text`` ends, except those ``known`` before and those not kept."""
        after = self._forgotten + len(self._tokens) - 1  # position after the text
        for end, beginning in _beginnings(text):
            place = after - (len(text) - end)
            if end > known and place - BLOCK >= after + 1 - len(self):
                self._beginnings[beginning] = place


def _beginnings(text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield length and hash of every beginning of ``text`` that consists of complete blocks."""
    beginning = 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        beginning = hash((beginning, *text[end - BLOCK : end]))
        yield end, beginning


def match_length(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Count how many ``tokens`` before ``position`` equal the last ones of ``context``."""
    most = min(position, len(context), LONGEST_MATCH)
    for length in range(1, most + 1):
        if tokens[position - length] != context[-length]:
            return length - 1
    return most
