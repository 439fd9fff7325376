"""The growing text of a batch: rows of different lengths, where each one ends, and who is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .stopping import Stops

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

GROWTH = 256  # columns added at least when the buffer is full


class Text:
    """Hold prompt and emitted tokens of every row, and stop rows where plain ``generate`` would.

    ``rows`` are the rows that still grow. Where plain ``generate`` knows an end-of-sequence token a row that is done is
    padded; where it does not, every row grows until all are done, and so it does here.
    """

    def __init__(
        self, input_ids: Tensor, stops: Stops, pad_token: Tensor | None, streamer: BaseStreamer | None
    ) -> None:
        self.prompt_length = input_ids.shape[1]
        self.lengths = [self.prompt_length] * input_ids.shape[0]
        self.rows = list(range(input_ids.shape[0]))
        self._ids = input_ids
        self.stops = stops
        self._done: dict[int, int] = {}  # row -> length of its text when it was done
        self._pad = 0 if pad_token is None else int(pad_token)
        self._streamer = streamer
        self._streamed = self.prompt_length

    @property
    def ids(self) -> Tensor:
        """Return the text of the growing rows, (rows, capacity); what lies beyond a row's length means nothing."""
        return self._ids if len(self.rows) == len(self._ids) else self._ids[self.rows]

    @property
    def row_lengths(self) -> list[int]:
        """Return the lengths of the growing rows."""
        return [self.lengths[row] for row in self.rows]

    @property
    def room(self) -> int:
        """Return how many tokens the shortest growing row may still emit."""
        if self.stops.max_length is None:
            return 1 << 30
        return max((self.stops.max_length - length for length in self.row_lengths), default=0)

    def extend(self, tokens: Tensor, counts: Sequence[int]) -> list[int]:
        """Append ``counts[b]`` of ``tokens[b]`` (rows, m) to each growing row; return how many were kept up to its end."""
        before = self.row_lengths
        after = [length + count for length, count in zip(before, counts, strict=True)]
        self._make_room(max(before) + tokens.shape[1])
        columns = torch.tensor(before, device=tokens.device)[:, None] + torch.arange(
            tokens.shape[1], device=tokens.device
        )
        self._ids[torch.tensor(self.rows, device=tokens.device)[:, None], columns] = tokens
        ends = self.stops.first_stop(self.ids, before, after)
        return self._advance(before, after, ends)

    def extend_together(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> list[int]:
        """Append one token to every row of the batch (batch,), ask the criteria the plain way; return the kept counts."""
        before = self.row_lengths
        length = max(before)
        self._make_room(length + 1)
        if self.stops.pads:
            growing = torch.zeros_like(tokens, dtype=torch.bool)
            growing[self.rows] = True
            tokens = torch.where(growing, tokens, self._pad)
        self._ids[:, length] = tokens
        done = self.stops(self._ids[:, : length + 1], scores).tolist()
        ends = [length + 1 if done[row] else None for row in self.rows]
        return self._advance(before, [length + 1] * len(self.rows), ends)

    def _advance(self, before: list[int], after: list[int], ends: list[int | None]) -> list[int]:
        """Note where rows were done, drop what lies behind their end, and let the rows grow that must."""
        for row, length, end in zip(self.rows, after, ends, strict=True):
            if end is not None:
                self._done.setdefault(row, end)
            self.lengths[row] = length if end is None or not self.stops.pads else end
        kept = [self.lengths[row] - length for row, length in zip(self.rows, before, strict=True)]
        self.rows = [row for row in self.rows if self._grows(row)]
        self._stream()
        return kept

    def _grows(self, row: int) -> bool:
        if self.stops.pads:
            return row not in self._done
        return len(self._done) < len(self.lengths) or self.lengths[row] < self.final_length

    @property
    def final_length(self) -> int:
        """Return the length of the output as far as it is known: all rows are padded or cut to it."""
        if self.stops.pads or len(self._done) < len(self.lengths):
            return max(self.lengths)
        return max(self._done.values())

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            size = length + max(GROWTH, length // 2) - self._ids.shape[1]
            self._ids = torch.cat([self._ids, self._ids.new_zeros((len(self._ids), size))], dim=1)

    def _stream(self) -> None:
        """Tell the streamer every column that all rows have reached."""
        if self._streamer is None:
            return
        reached = min((self.lengths[row] for row in self.rows), default=self.final_length)
        ids = self.padded()
        for column in range(self._streamed, min(reached, self.final_length)):
            self._streamer.put(ids[:, column].cpu())
        self._streamed = max(self._streamed, reached)

    def finish(self) -> Tensor:
        """Close the stream and return the padded output, (batch, length)."""
        if self._streamer is not None:
            self._streamer.end()
        return self.padded()

    def padded(self) -> Tensor:
        """Return all rows, padded behind their end: (batch, length of the longest row)."""
        length = self.final_length
        ids = self._ids[:, :length].clone()
        ends = torch.tensor(self.lengths, device=ids.device)
        behind = torch.arange(length, device=ids.device) >= ends[:, None]
        return ids.masked_fill_(behind, self._pad)
