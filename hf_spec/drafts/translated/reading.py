"""The text of one sequence in the draft's tokens. Only its end is encoded anew when the text grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...policy.acceptance import num_accepted
from .token_bytes import TokenBytes, whole_characters

TAIL = 32  # bytes at the end of the text that further text may encode differently
MOST_TAIL = 4 * TAIL  # bytes after which a tail without a good place to cut is cut all the same


class Reading:
    """A text in the tokens of ``draft``, which grows by tokens of ``target``.

    ``ids`` are the draft's tokens for the text, after ``head``. ``read`` of them are in the draft's cache.
    ``special`` maps special tokens of the target to the draft's; others write nothing.

    The tail is encoded again whenever it grows, because further text may join its last tokens. What stands before it
    is settled::

        ids     <s> Once upon a time │ , there was a li      + "ttle dog"
        ids     <s> Once upon a time │ , there was a little dog
                    settled          │ tail
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes, special: Mapping[int, int], head: Sequence[int]) -> None:
        self._target, self._draft, self._special = target, draft, special
        self.ids = list(head)
        self.read = 0
        self._settled = len(self.ids)
        self._tail = bytearray()
        self._starts = True  # the tail is the beginning of a text

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` of the target."""
        for token in tokens:
            if not self._target.is_special(token):
                data = self._target.of[token] or b""
                is_first = self._starts and not self._tail and self._target.adds_space
                self._tail += data.removeprefix(b" ") if is_first else data
                continue
            self._encode_tail()
            if (own := self._special.get(token)) is not None:
                self.ids.append(own)
            self._settle(len(self.ids), len(self._tail))
        self._encode_tail()
        self._shorten_tail()

    @property
    def is_unfinished(self) -> bool:
        """Tell whether the text ends within a character."""
        return len(whole_characters(self._tail)) < len(self._tail)

    @property
    def end(self) -> bytes:
        """Return the end of the text, from where a word begins if there is such a place."""
        start = max(0, len(self._tail) - TAIL)
        space = self._tail.find(b" ", start)
        return bytes(self._tail[space if space >= 0 else start :])

    def _encode_tail(self) -> None:
        new = self._draft.encode(whole_characters(self._tail), self._starts)
        old = self.ids[self._settled :]
        self.read = min(self.read, self._settled + num_accepted(old, new))
        self.ids[self._settled :] = new

    def _settle(self, ids: int, count: int) -> None:
        """Settle the first ``ids`` tokens, and take what they write, ``count`` bytes, out of the tail."""
        self._settled = ids
        del self._tail[:count]
        self._starts = False

    def _shorten_tail(self) -> None:
        """Settle the beginning of a long tail, where cutting it leaves its tokens as they are."""
        while len(self._tail) > 2 * TAIL:
            last = len(self._tail) - TAIL
            cut = max(self._tail.rfind(b" ", 1, last), 0)
            if cut == 0:  # a text without spaces
                cut = len(whole_characters(self._tail[:last]))
            before = self._draft.encode(bytes(self._tail[:cut]), self._starts)
            after = self._draft.encode(whole_characters(self._tail[cut:]), False)
            if before + after != self.ids[self._settled :]:
                if len(self._tail) <= MOST_TAIL:
                    return
                self.read = min(self.read, self._settled + num_accepted(before + after, self.ids[self._settled :]))
                self.ids[self._settled :] = before + after
            self._settle(self._settled + len(before), cut)
