"""Remember what was written: the latest tokens of finished texts, and where what followed what.

Every place is found by the last 1, 2, 4 or 8 tokens in front of it, and then read as far back as it agrees. All of it
stands in flat arrays: about 100 bytes a token, whatever the texts are. Known as suffix decoding (arXiv 2411.04975).
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

# Stands behind each remembered text. No token id, so no text ends in it and no continuation may contain it.
BREAK = -1
# Lengths of the ends of a text that are looked up, the longest first.
SIZES = (8, 4, 2, 1)
# Places that are looked at, the latest ones: bounds a step however common the end of a text is.
LOOK_BACK = 32
# Tokens in front of a place that are compared.
LONGEST_MATCH = 64
# Places by hash that there are at first, as a power of two; there are more once so many tokens are remembered.
FIRST_PLACES = 12
# Tokens of a text that are recognised at once as the beginning of one that is remembered.
BLOCK = 64

# Tokens, the position behind a match in them, and how many tokens in front of it agree.
Place = tuple[Sequence[int], int, int]


class Memory:
    """Hold at most ``size`` tokens of whole texts, the latest ones; threads may share it.

    A text that begins as a remembered one, such as the next turn of a conversation, adds only what is new in it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.largest = BREAK  # of the token ids that were ever remembered
        self._lock = Lock()
        self._tokens = array("i")
        self._forgotten = 0  # tokens that were dropped before the first one of ``_tokens``
        # For each size of n-gram: by its hash the latest place behind it; by place, the one before with that hash.
        # Places count from the first token ever remembered, 1 is its own; 0 is none.
        self._most = max(0, size - 1).bit_length()
        self._spread(min(self._most, FIRST_PLACES))
        self._beginnings: dict[int, int] = {}  # hash of a whole beginning of a text -> place behind it

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of what is remembered, without the lock: other threads may go on writing."""
        with self._lock:
            return copy.deepcopy({name: one for name, one in vars(self).items() if one is not self._lock})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def __len__(self) -> int:
        return min(len(self._tokens), self.size)

    @property
    def nbytes(self) -> int:
        """Count the bytes that tokens and places take."""
        arrays = (self._tokens, *self._latest, *self._before)
        return sum(one.itemsize * len(one) for one in arrays)

    def tokens(self) -> list[int]:
        """Return what is remembered, the oldest token first, BREAK behind each text."""
        with self._lock:
            return self._tokens[len(self._tokens) - len(self) :].tolist()

    def add(self, text: Sequence[int]) -> None:
        """Remember ``text``, whole: the oldest tokens go, and of a text longer than the memory its beginning."""
        with self._lock:
            self.largest = max(self.largest, *text) if text else self.largest
            known = self._known(text)
            self._append(text[max(0, known - LONGEST_MATCH) :][-max(1, self.size - 1) :])
            self._note_beginnings(text, known)
            self._forget()

    def find(self, context: Sequence[int], size: int, depth: int) -> list[Place]:
        """List the latest places behind the last ``size`` tokens of ``context``, each in a copy that goes on for
        ``depth`` tokens."""
        number = SIZES.index(size)
        found: list[Place] = []
        ngram = array("i", context[-size:])
        before = self._before[number]
        with self._lock:
            first = len(self._tokens) - len(self)
            place = self._latest[number][hash(tuple(ngram)) & self._mask]
            for _ in range(LOOK_BACK):
                index = place - 1 - self._forgotten
                if index < first + size:
                    break
                if self._tokens[index - size : index] == ngram:
                    start = max(first, index - LONGEST_MATCH)
                    copied = self._tokens[start : index + depth]
                    found.append((copied, index - start, agreement(copied, index - start, context)))
                place = before[index]
        return found

    def _append(self, text: Sequence[int]) -> None:
        start = len(self._tokens)
        self._tokens.extend(text)
        self._tokens.append(BREAK)
        if len(self._tokens) <= self._mask + 1 or self._mask + 1 == 1 << self._most:
            self._link(start, len(self._tokens))
            return
        self._spread(min(self._most, (4 * len(self._tokens)).bit_length()))
        start = 0
        for end in [index for index, token in enumerate(self._tokens, start=1) if token == BREAK]:
            self._link(start, end)
            start = end

    def _spread(self, bits: int) -> None:
        """Make room for ``1 << bits`` places by hash, none of them known: it comes with the tokens that need it."""
        self._mask = (1 << bits) - 1
        self._latest = [array("q", bytes(8 << bits)) for _ in SIZES]
        self._before = [array("q") for _ in SIZES]

    def _link(self, start: int, stop: int) -> None:
        """Note the places in the text that ``_tokens[start:stop]`` is, with its BREAK."""
        for size, latest, before in zip(SIZES, self._latest, self._before, strict=True):
            before.extend([0] * min(size, stop - start))
            for index in range(start + size, stop):
                bucket = hash(tuple(self._tokens[index - size : index])) & self._mask
                before.append(latest[bucket])
                latest[bucket] = self._forgotten + index + 1

    def _forget(self) -> None:
        """Drop tokens that nobody may see: now and then, because the rest has to move."""
        if (surplus := len(self._tokens) - self.size) > self.size // 4:
            for one in (self._tokens, *self._before):
                del one[:surplus]
            self._forgotten += surplus
            self._beginnings = {key: place for key, place in self._beginnings.items() if place > self._forgotten}

    def _known(self, text: Sequence[int]) -> int:
        """Count the tokens, in whole blocks, with which a text begins that is remembered."""
        first = self._forgotten + len(self._tokens) - len(self)
        known = 0
        for end, beginning in _beginnings(text):
            if self._beginnings.get(beginning, 0) - BLOCK < first:
                break
            known = end
        return known

    def _note_beginnings(self, text: Sequence[int], known: int) -> None:
        """Note where each beginning of ``text`` ends, but for those that were ``known`` or were not kept."""
        behind = self._forgotten + len(self._tokens) - 1  # of the text
        for end, beginning in _beginnings(text):
            place = behind - (len(text) - end)
            if end > known and place - BLOCK >= behind + 1 - len(self):
                self._beginnings[beginning] = place


def _beginnings(text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the length and the hash of every beginning of ``text`` that is whole blocks long."""
    beginning = 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        beginning = hash((beginning, *text[end - BLOCK : end]))
        yield end, beginning


def agreement(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Count the tokens in front of ``position`` that are those at the end of ``context``."""
    most = min(position, len(context), LONGEST_MATCH)
    for length in range(1, most + 1):
        if tokens[position - length] != context[-length]:
            return length - 1
    return most
