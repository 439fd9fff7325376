"""Targets that keep a recurrent state, which cannot take rejected guesses back: lazy commit.

The state is saved at the last point where everything read was text. When a block turns out wrong somewhere, the state
goes back there, and the tokens that did become text are *carried*: they are the head of the next block, so that no extra
forward is needed. ::

    saved state ┐
    block 1     [ x5 | a  b  c ]        root x5; a was right, b was not: text is x5 a x7
    block 2     [ x5 a | x7 | d  e ]    state went back; x5 and a are carried, x7 is the root
    block 3     [ x9 | ...              all of block 2 was right: its state is saved, nothing is carried

A row's carried tokens, its root and its guesses fill at most ``width`` columns, so a growing carry leaves room for fewer
guesses until a block of the width is all text. Trees would need a state per node and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .cache import States
from .proposal import ABSENT, Proposal
from .target import Scores, TargetRunner


class LazyRunner(TargetRunner):
    """Score chains behind a text whose recurrent state is committed late."""

    def __init__(
        self,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        hidden_states: bool = False,
        *,
        width: int,
    ) -> None:
        super().__init__(model, feature_layers, hidden_states)
        self._width = width
        self._states: States
        self._carried: list[list[int]] = []
        self._block: list[list[int]] = []  # per row: carried tokens, root and guesses of the open block
        self._batch_is_whole = True

    def _start(self, cache: DynamicCache, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._states = States(self.slots.cache)
        self._carried = [[] for _ in range(batch)]

    def fit(self, proposal: Proposal) -> Proposal:
        """Leave out the guesses that find no room behind a row's carried tokens: known before they were made."""
        room = [self._width - 1 - len(carried) for carried in self._carried]
        longest = max(0, min(max(room), proposal.max_depth))
        counts = torch.tensor(room, device=proposal.tokens.device)[:, None]
        steps = torch.arange(1 + longest, device=proposal.tokens.device)
        parents = proposal.parents[:, : 1 + longest].masked_fill(steps > counts, ABSENT)
        q = None if proposal.q is None else proposal.q[:, :longest]
        return Proposal(proposal.tokens[:, : 1 + longest], parents, longest, q, is_chain=True)

    def score(self, proposal: Proposal) -> Scores:
        """Read every row's carried tokens, root and guesses in one forward, and score its root and guesses."""
        lengths = proposal.present.sum(1).tolist()
        rows = zip(self._carried, proposal.tokens.tolist(), lengths, strict=True)
        self._block = [carried + tokens[:length] for carried, tokens, length in rows]
        width = max(map(len, self._block))
        tokens = torch.tensor([row + row[-1:] * (width - len(row)) for row in self._block], device=self.slots.device)
        lower = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        scores = self.extend(tokens, lower.expand(len(tokens), width, width))
        skip = torch.tensor([len(carried) for carried in self._carried], device=tokens.device)[:, None]
        columns = (skip + torch.arange(proposal.tokens.shape[1], device=tokens.device)).clamp(max=width - 1)
        return scores.at(columns)

    def commit(self, path: Tensor, counts: Sequence[int], in_place: bool = False) -> None:
        """Make ``counts[b]`` tokens behind the carried ones text; save the state of rows whose whole block is text."""
        width = max(map(len, self._block))
        text = [row[: len(carried) + count] for row, carried, count in zip(self._block, self._carried, counts, strict=True)]
        right = [len(row) == width for row in text]
        self._carried = [[] if all_text else row for row, all_text in zip(text, right, strict=True)]
        self._states.settle(right)
        self.slots.commit(path[:, :0], [width if all_text else 0 for all_text in right], in_place=True)

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; finished ones cannot be handed back, see ``release``."""
        super().keep_rows(rows)
        self._batch_is_whole = False
        self._carried = [self._carried[row] for row in rows.tolist()]
        self._states.keep_rows(rows)

    def release(self, committed: int) -> DynamicCache | None:
        """Give the host's cache back with all the text of a single row, reading what it carries.

        ``None`` for a larger batch: its rows end at different lengths, and a state cannot be padded.
        """
        if len(self._carried) != 1 or not self._batch_is_whole:
            return None
        if carried := self._carried[0]:
            tokens = torch.tensor([carried], device=self.slots.device)
            lower = torch.ones(len(carried), len(carried), dtype=torch.bool, device=tokens.device).tril()
            self.extend(tokens, lower[None])
            self.slots.commit(tokens, [len(carried)], in_place=True)
        return self.slots.release(committed)
