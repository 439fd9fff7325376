"""When a row is finished: the user's stopping criteria, asked at every token of a block."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria

BLOCKWISE: frozenset[type] = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})


class Stops:
    """Ask the user's ``StoppingCriteriaList`` at every emitted token.

    ``lockstep``: a criterion is not one of those known here, so it may count calls or look at scores and other rows;
    the list must then be called once per token with the whole batch, as plain ``generate`` does. ``pads``: finished
    rows are padded; otherwise they go on being generated until all are finished, and ``waits`` tells that this may be
    later than their own end. ``max_length``: no row gets longer.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._all = criteria
        self.lockstep: bool = not all(type(one) in BLOCKWISE for one in criteria)
        self.pads: bool = any(hasattr(one, "eos_token_id") for one in criteria)
        self.waits: bool = not self.pads and any(type(one) is not MaxLengthCriteria for one in criteria)
        limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        self.max_length: int | None = min(limits, default=None)

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        """Call the whole list as plain ``generate`` does: (batch, length) -> (batch,) bool."""
        finished: Tensor = self._all(input_ids, scores)
        return finished

    def first_stop(self, text: Tensor, before: list[int], after: list[int]) -> list[int | None]:
        """Find where each row of ``text`` (batch, capacity) ends, if it does. Not for a list in lockstep.

        Row b had ``before[b]`` tokens and has ``after[b]`` now. Return the length of its first prefix, longer than
        before, after which plain ``generate`` calls it finished. Maximum time is asked once, for the whole block.
        """
        width = max(new - old for old, new in zip(before, after, strict=True))
        if width == 0:
            return [None] * len(before)
        start = torch.tensor(before, device=text.device)[:, None]
        column = (start + torch.arange(width, device=text.device)).clamp(max=text.shape[1] - 1)
        block = text.gather(1, column)  # (batch, width), what lies behind after[b] included
        done = torch.zeros_like(block, dtype=torch.bool)
        for one in self._all:
            if isinstance(one, EosTokenCriteria):
                done |= torch.isin(block, one.eos_token_id.to(block.device))
            elif isinstance(one, MaxLengthCriteria):
                done |= start + torch.arange(1, width + 1, device=text.device) >= one.max_length
            elif isinstance(one, MaxTimeCriteria):
                done[:, 0] |= bool(one(torch.zeros(1, 1), None))
            elif isinstance(one, StopStringCriteria):
                _mark_stop_strings(one, text, before, after, done)
        marks = done.tolist()
        return [
            next((old + i + 1 for i in range(new - old) if mark[i]), None)
            for mark, old, new in zip(marks, before, after, strict=True)
        ]


def _mark_stop_strings(
    criterion: StopStringCriteria, text: Tensor, before: list[int], after: list[int], done: Tensor
) -> None:
    """Mark in ``done`` (batch, width) the prefixes that end with a stop string.

    The criterion looks at the last ``maximum_token_len`` tokens only, so all prefixes that have as many are asked in
    one call, and shorter ones by length.
    """
    windows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        for length in range(old + 1, new + 1):
            windows[min(length, criterion.maximum_token_len)].append((row, length, length - old - 1))
    for width, prefixes in windows.items():
        row, length, offset = torch.tensor(prefixes, device=text.device).T  # (prefixes,) each
        column = length[:, None] - width + torch.arange(width, device=text.device)
        done[row, offset] |= criterion(text[row[:, None], column], None)
