"""Built-in per-sequence processors, vectorized over prefixes of any lengths, without a device synchronization.

transformers' own calls take prefixes of one length. Each function here gives the same result per row as the call of
one class. Classes that are not in ``VECTORIZED`` are called as they are, once for each length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from ..device_tensors import cached_arange
from ..sampling import widest_float


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of different lengths: ``tokens`` (prefixes, longest), right-padded, and ``lengths`` (prefixes,).

    ``rows`` (prefixes,) are their positions in the batch that ``generate`` was called with. All lengths lie between
    ``shortest`` and ``longest``, which are known without asking the device.
    """

    tokens: Tensor
    lengths: Tensor
    rows: Tensor
    shortest: int
    longest: int

    @property
    def columns(self) -> Tensor:
        """Return the number of each column, (longest,)."""
        return cached_arange(self.tokens.shape[1], self.tokens.device)

    def ends(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the last ``count`` tokens of each prefix (prefixes, count), and whether it has that many."""
        column = (self.lengths[:, None] - count + cached_arange(count, self.tokens.device)).clamp(min=0)
        return self.tokens.gather(1, column), self.lengths >= count


def _min_length(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    return _no_end_before(one.min_length, one.eos_token_id, prefixes, scores)


def _min_new_tokens(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    return _no_end_before(one.prompt_length_to_skip + one.min_new_tokens, one.eos_token_id, prefixes, scores)


def _no_end_before(length: int, ends: Tensor, prefixes: Prefixes, scores: Tensor) -> Tensor:
    if prefixes.shortest >= length:
        return scores
    banned = _are(ends, scores)
    if prefixes.longest >= length:
        banned = banned & (prefixes.lengths < length)[:, None]
    return torch.where(banned, -math.inf, scores)


def _suppress_at_begin(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    if not prefixes.shortest <= one.begin_index <= prefixes.longest:
        return scores
    here = (prefixes.lengths == one.begin_index)[:, None]
    return torch.where(_are(one.begin_suppress_tokens, scores) & here, -math.inf, scores)


def _forced_bos(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    return _forced(1, one.bos_token_id, prefixes, scores)


def _forced_eos(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    return _forced(one.max_length - 1, one.eos_token_id, prefixes, scores)


def _forced(length: int, tokens: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    if not prefixes.shortest <= length <= prefixes.longest:
        return scores
    only = torch.full_like(scores[:1], -math.inf)
    only[:, tokens] = 0
    return torch.where((prefixes.lengths == length)[:, None], only, scores)


def _decay(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    if prefixes.longest <= one.regulation_start:
        return scores
    tokens = one.eos_token_id.to(scores.device)
    past = (prefixes.lengths - one.regulation_start).clamp(min=0).to(widest_float(scores.device))
    factor: Tensor = (torch.pow(one.regulation_factor, past) - 1).to(scores.dtype)  # 0 where the decay has not begun
    ends = scores[:, tokens]
    penalty = (ends.abs() * factor[:, None]).masked_fill(~ends.isfinite(), 0.0)
    decayed: Tensor = scores.index_copy(1, tokens.flatten(), ends + penalty)  # index_add would add twice
    return decayed


def _repetition(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    vocabulary, ignored = scores.shape[-1], one.prompt_ignore_length
    hidden = prefixes.columns >= prefixes.lengths[:, None]
    if isinstance(ignored, Tensor):
        hidden = hidden | (prefixes.columns < ignored.to(scores.device)[prefixes.rows, None])
    elif ignored:
        hidden = hidden | (prefixes.columns < ignored)
    tokens = prefixes.tokens.clamp(max=vocabulary).masked_fill(hidden, vocabulary)  # padding: a spare last column
    wide = torch.nn.functional.pad(scores, (0, 1))
    found = wide.gather(1, tokens)
    found = torch.where(found < 0, found * one.penalty, found / one.penalty)
    penalised: Tensor = wide.scatter(1, tokens, found)[:, :vocabulary]
    return penalised


def _no_repeat_ngram(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    size, vocabulary = one.ngram_size, scores.shape[-1]
    if prefixes.longest < size:
        return scores
    ends, _ = prefixes.ends(size - 1)
    windows = prefixes.tokens.unfold(1, size, 1)  # (prefixes, windows, size)
    repeats = (windows[..., :-1] == ends[:, None]).all(-1) & (prefixes.columns[size - 1 :] < prefixes.lengths[:, None])
    tokens = torch.where(repeats, windows[..., -1].clamp(max=vocabulary), vocabulary)
    banned = scores.new_zeros((len(scores), vocabulary + 1), dtype=torch.bool).scatter_(1, tokens, True)
    return scores.masked_fill(banned[:, :vocabulary], -math.inf)


def _sequence_bias(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    if not one.prepared_bias_variables:
        one._prepare_bias_variables(scores)
    bias: Tensor = one.length_1_bias.repeat(len(scores), 1)
    for before, last_tokens, biases in one.multi_token_biases:
        if before.shape[1] <= prefixes.longest:
            ends, long_enough = prefixes.ends(before.shape[1])
            completed = (ends[:, None] == before).all(-1) & long_enough[:, None]  # (prefixes, sequences)
            bias.index_add_(1, last_tokens, torch.where(completed, biases, 0.0))
    return scores + bias


def _are(tokens: Tensor, scores: Tensor) -> Tensor:
    """Tell which tokens of the vocabulary are among ``tokens``, (vocabulary,) bool."""
    return torch.isin(cached_arange(scores.shape[-1], scores.device), tokens.to(scores.device))


VECTORIZED: dict[type, Callable[[Any, Prefixes, Tensor], Tensor]] = {
    logits_process.ExponentialDecayLengthPenalty: _decay,
    logits_process.ForcedBOSTokenLogitsProcessor: _forced_bos,
    logits_process.ForcedEOSTokenLogitsProcessor: _forced_eos,
    logits_process.MinLengthLogitsProcessor: _min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    logits_process.NoBadWordsLogitsProcessor: _sequence_bias,
    logits_process.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    logits_process.RepetitionPenaltyLogitsProcessor: _repetition,
    logits_process.SequenceBiasLogitsProcessor: _sequence_bias,
    logits_process.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
}
