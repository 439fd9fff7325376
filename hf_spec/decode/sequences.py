"""The token ids of a batch while it grows: sequences of different lengths, where each one ends, and the streamer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device_tensors import to_device
from ..verify.stopping import StopChecker

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

COLUMNS_ADDED = 256  # columns that are added at least when the buffer is full


class Sequences:
    """Prompt and emitted tokens of every sequence, which stop where plain ``generate`` would stop them.

    ``rows`` are the batch rows that still grow. ``lengths`` are the lengths of all rows. A finished row is padded.
    Without an end-of-sequence token plain ``generate`` pads nothing, so rows grow until all are finished.
    """

    def __init__(
        self, input_ids: Tensor, stops: StopChecker, pad_token: Tensor | None, streamer: BaseStreamer | None
    ) -> None:
        self.prompt_length = input_ids.shape[1]
        self.lengths = [self.prompt_length] * input_ids.shape[0]
        self.rows = list(range(input_ids.shape[0]))
        self.stops = stops
        self._ids = input_ids
        # Tokens of each row that are on the CPU only so far, and the column of the first one, or of the next token.
        self._pending: list[list[int]] = [[] for _ in self.rows]
        self._starts = list(self.lengths)
        self._unfinished = set(self.rows)
        self._pad = 0 if pad_token is None else int(pad_token)
        self._streamer = streamer
        self._streamed = self.prompt_length

    @property
    def ids(self) -> Tensor:
        """Return the token ids of the growing rows, (rows, capacity); those after a row's length mean nothing."""
        self._write()
        if len(self.rows) == len(self._ids):
            return self._ids
        return self._ids.index_select(0, to_device(self.rows, self._ids.device))

    @property
    def row_lengths(self) -> list[int]:
        """Return the lengths of the growing rows."""
        return list(map(self.lengths.__getitem__, self.rows))

    @property
    def length(self) -> int:
        """Return the length of the longest row; the others are padded to it."""
        return max(self.lengths)

    @property
    def shown(self) -> int:
        """Return how many columns the streamer was given, or without one how many all growing rows have."""
        return self._streamed if self._streamer is not None else self._shared_length

    @property
    def _shared_length(self) -> int:
        return min(self.row_lengths, default=self.length)

    def remaining_tokens(self, rows: Sequence[int]) -> list[int]:
        """Return how many draft tokens each of ``rows`` may accept; another token follows the last of them."""
        if (end := self.stops.max_length) is None:
            return [1 << 30] * len(rows)
        return [max(0, end - 1 - length) for length in map(self.lengths.__getitem__, rows)]

    def most_remaining(self, rows: Sequence[int]) -> int:
        """Return the largest of ``remaining_tokens``."""
        if (end := self.stops.max_length) is None:
            return 1 << 30
        return max(0, end - 1 - min(map(self.lengths.__getitem__, rows)))

    def last_tokens(self, rows: Sequence[int]) -> Tensor:
        """Return the last token of each of ``rows``, (rows,)."""
        self._write()
        return torch.stack([self._ids[row, self.lengths[row] - 1] for row in rows])

    def show_prompt(self) -> None:
        """Show the prompt to the streamer."""
        if self._streamer is not None:
            self._streamer.put(self._ids.cpu())

    def extend(self, emitted: Sequence[Sequence[int]]) -> list[int]:
        """Append ``emitted[b]`` to each growing row, and return how many tokens are kept: none after the row's end.

        They stay on the CPU, and are copied to the device when ``ids`` is read.
        """
        before, all_grow = self.row_lengths, len(self.rows) == len(self.lengths)
        pending = self._pending if all_grow else [self._pending[row] for row in self.rows]
        for own, new in zip(pending, emitted, strict=True):
            own += new
        text = self.ids if self.stops.reads_text else self._ids
        kept, going_on = [], []
        ends = self.stops.first_stop(text, before, emitted)
        if ends.count(None) == len(ends):  # as in most steps
            kept = list(map(len, emitted))
            longer = list(map(operator.add, before, kept))
            if all_grow:
                self.lengths = longer
            else:
                for row, length in zip(self.rows, longer, strict=True):
                    self.lengths[row] = length
            self._stream()
            return kept
        for row, new, old, end in zip(self.rows, emitted, before, ends, strict=True):
            self.lengths[row] = old + len(new) if end is None else end
            kept.append(self.lengths[row] - old)
            if end is None:
                going_on.append(row)
            else:
                del self._pending[row][end - self._starts[row] :]
        self.rows = going_on
        self._stream()
        return kept

    def _write(self) -> None:
        """Copy the tokens that are on the CPU only to the device, in one transfer."""
        width = max(map(len, self._pending))
        if width == 0:
            return
        self._reserve(max(map(sum, zip(self._starts, map(len, self._pending), strict=True))) + 1)
        spare = self._ids.shape[1] - 1  # a column after all text, which takes the padding of ``tokens``
        tokens, columns = [], []
        for start, new in zip(self._starts, self._pending, strict=True):
            missing = width - len(new)
            tokens.append([*new, *[0] * missing])
            columns.append([*range(start, start + len(new)), *[spare] * missing])
        both = to_device([tokens, columns], self._ids.device)  # (2, batch, width)
        self._ids.scatter_(1, both[1], both[0])
        self._starts = list(map(operator.add, self._starts, map(len, self._pending)))
        self._pending = [[] for _ in self._pending]

    def append_column(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> None:
        """Append one token to every row of the batch (batch,), and call the criteria as plain ``generate`` does."""
        length = self.length
        self._reserve(length + 1)
        if self.stops.pads:
            growing = torch.zeros_like(tokens, dtype=torch.bool)
            growing[self.rows] = True
            tokens = torch.where(growing, tokens, self._pad)
        self._ids[:, length] = tokens
        for row in self.rows:
            self.lengths[row] = self._starts[row] = length + 1
        self._stream()
        done = self.stops(self._ids[:, : length + 1].contiguous(), scores)  # as plain, for criteria that take a view
        self._unfinished = {row for row in self._unfinished if not done[row]}
        if self.stops.pads or not self._unfinished:
            self.rows = sorted(self._unfinished)

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            size = length + max(COLUMNS_ADDED, length // 2) - self._ids.shape[1]
            self._ids = torch.cat([self._ids, self._ids.new_zeros((len(self._ids), size))], dim=1)

    def _stream(self) -> None:
        """Give the streamer every new column that all growing rows have reached."""
        if self._streamer is None or self._streamed >= self._shared_length:
            return
        new = self.padded()[:, self._streamed : self._shared_length].cpu()  # in one transfer
        for column in new.unbind(1):
            self._streamed += 1  # before the call: a streamer that raises has seen the column
            self._streamer.put(column)

    def finish(self) -> Tensor:
        """Close the stream and return the padded output, (batch, length)."""
        if self._streamer is not None:
            self._streamer.end()
        return self.padded()

    def padded(self) -> Tensor:
        """Return all rows, padded after their end: (batch, length of the longest row)."""
        self._write()
        ids = self._ids[:, : self.length].clone()
        ends = to_device(self.lengths, ids.device)
        is_padding = torch.arange(self.length, device=ids.device) >= ends[:, None]
        return ids.masked_fill_(is_padding, self._pad)

    def unpadded(self, prompt_mask: Tensor) -> list[list[int]]:
        """Return prompt and output of every row as lists, without padding; ``prompt_mask`` (batch, prompt)."""
        start = self.prompt_length
        both = torch.cat([prompt_mask.to(self._ids), self._ids[:, : self.length]], dim=1).tolist()  # in one transfer
        rows = ((row[:start], row[start:], end) for row, end in zip(both, self.lengths, strict=True))
        return [[*compress(ids, mask), *ids[start:end]] for mask, ids, end in rows]
