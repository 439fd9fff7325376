"""When a sequence is finished: the user's stopping criteria, checked at every token of a block."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria

from ..device_tensors import to_device
from ..parallel import ModelParallelGroup

# Criteria that need no lockstep: they depend on a sequence's own tokens, or on time.
BLOCKWISE: frozenset[type] = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})


class StopChecker:
    """The user's ``StoppingCriteriaList``, checked at every emitted token.

    - ``lockstep``: a criterion is not built in, so it may count calls or read scores and other sequences. The list is
      then called once per token with the complete batch, as plain ``generate`` does.
    - ``pads``: finished sequences are padded. Otherwise they are generated until all are finished.
    - ``runs_until_all_stop``: without padding, a sequence may thus run beyond its own end.
    - ``max_length``: no sequence gets longer.
    - ``last_tokens``: each of them ends a sequence.

    Criteria that depend on time, or on what only one process sees, are decided by the first of ``ranks``.
    """

    def __init__(self, criteria: StoppingCriteriaList, ranks: ModelParallelGroup | None = None) -> None:
        self._all = criteria
        self._ranks = ranks or ModelParallelGroup()
        self.lockstep: bool = not all(type(one) in BLOCKWISE for one in criteria)
        self.reads_text: bool = any(isinstance(one, StopStringCriteria) for one in criteria)
        self.pads: bool = any(hasattr(one, "eos_token_id") for one in criteria)
        self.runs_until_all_stop: bool = not self.pads and any(type(one) is not MaxLengthCriteria for one in criteria)
        eos = [one.eos_token_id.flatten().tolist() for one in criteria if isinstance(one, EosTokenCriteria)]
        self.last_tokens = frozenset(chain.from_iterable(eos))
        self._last: Tensor | None = None  # ``last_tokens`` on the device, from the first call of ``are_last`` on
        limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        self.max_length: int | None = min(limits, default=None)
        self._reminded = False

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Call the complete list as plain ``generate`` does: (batch, length) -> batch times bool."""
        finished: list[bool] = self._all(input_ids, scores).tolist()
        return self._ranks.broadcast(finished)

    def first_stop(self, text: Tensor, before: Sequence[int], emitted: Sequence[Sequence[int]]) -> list[int | None]:
        """Find where each row of ``text`` (batch, capacity) ends, if it does. Not for a list in lockstep.

        Row b had ``before[b]`` tokens, and ``emitted[b]`` follow them in ``text``. Return the length of its shortest
        prefix, longer than before, that plain ``generate`` calls finished. The time limit is checked once per block.
        """
        ends: list[int | None] = [None] * len(before)
        for one in self._all:
            found: list[int] = []
            if isinstance(one, EosTokenCriteria):
                last = self.last_tokens
                if not all(map(last.isdisjoint, emitted)):
                    found = [next((i for i, token in enumerate(new, 1) if token in last), 0) for new in emitted]
            elif isinstance(one, MaxLengthCriteria):
                longest = max(map(operator.add, before, map(len, emitted)))
                self._remind(one, longest)
                if longest >= one.max_length:
                    found = [max(1, one.max_length - old) for old in before]
            elif isinstance(one, MaxTimeCriteria):
                found = [int(self._ranks.broadcast(bool(one(torch.zeros(1, 1), None))))] * len(before)
            elif isinstance(one, StopStringCriteria):
                found = _first_stop_string(one, text, before, emitted)
            for row, count in enumerate(found):
                if 1 <= count <= len(emitted[row]):
                    end, earlier = before[row] + count, ends[row]
                    ends[row] = end if earlier is None else min(end, earlier)
        return ends

    def are_last(self, tokens: Tensor) -> Tensor:
        """Tell which ``tokens``, of any shape and always on the same device, end a sequence."""
        if self._last is None:
            self._last = torch.tensor(sorted(self.last_tokens), dtype=torch.long, device=tokens.device)
        return torch.isin(tokens, self._last)

    def completes_string(self, text: Tensor, lengths: Sequence[int]) -> list[bool]:
        """Tell which prefixes, the first ``lengths`` of ``text`` (prefixes, capacity), end in a stop string."""
        before, one_token = [length - 1 for length in lengths], [[0]] * len(lengths)
        strings = [one for one in self._all if isinstance(one, StopStringCriteria)]
        return list(map(any, zip(*(_first_stop_string(one, text, before, one_token) for one in strings), strict=True)))

    def _remind(self, criterion: MaxLengthCriteria, length: int) -> None:
        """Let ``criterion`` warn, as in plain ``generate``, if ``length`` is more than the model is made for."""
        length, most = min(length, criterion.max_length - 1), criterion.max_position_embeddings
        if most is not None and length > most and not self._reminded:
            criterion(torch.zeros((1, length), dtype=torch.long), None)
            self._reminded = True


def _first_stop_string(
    criterion: StopStringCriteria, text: Tensor, before: Sequence[int], emitted: Sequence[Sequence[int]]
) -> list[int]:
    """Count the emitted tokens up to the first one that completes a stop string, 0 where none does.

    The criterion reads the last ``maximum_token_len`` tokens only. So all prefixes with at least as many are checked
    in one call, and shorter ones in one call per length.
    """
    windows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, (old, new) in enumerate(zip(before, emitted, strict=True)):
        for length in range(old + 1, old + len(new) + 1):
            windows[min(length, criterion.maximum_token_len)].append((row, length))
    first = [0] * len(before)
    for width, prefixes in windows.items():
        row, length = to_device(prefixes, text.device).T  # (prefixes,) each
        column = length[:, None] - width + torch.arange(width, device=text.device)
        done = criterion(text[row[:, None], column], None).tolist()
        for (index, end), complete in zip(prefixes, done, strict=True):
            if complete and (not first[index] or end - before[index] < first[index]):
                first[index] = end - before[index]
    return first
