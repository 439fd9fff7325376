"""Built-in per-sequence processors, vectorized over prefixes of any lengths, without a device synchronization.

transformers' own calls take prefixes of one length. Each function here gives the same result per row as the call of
one class. Classes that are not in ``VECTORIZED`` are called as they are, once for each length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

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


class FirstTokenListener:
    """Whisper's detection of silence for one call: it hears the scores of every row's first token and changes none.

    Plain ``generate`` asks it once for each token, and it ignores all but the first. It may encode the sound again to
    find out, so it is asked once here.
    """

    def __init__(self, detection: logits_process.WhisperNoSpeechDetection) -> None:
        self.detection = detection
        self.has_heard = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.has_heard and input_ids.shape[1] == self.detection.begin_index:
            self.has_heard = True
            self.detection(cast(torch.LongTensor, input_ids), cast(torch.FloatTensor, scores))
        return scores


def _hear_first_tokens(one: FirstTokenListener, prefixes: Prefixes, scores: Tensor) -> Tensor:
    begin = one.detection.begin_index
    if not one.has_heard and prefixes.shortest == begin:  # all rows are there, and their roots end the prompt
        is_root = torch.ones_like(prefixes.rows, dtype=torch.bool)  # the first prefix of each row
        is_root[1:] = prefixes.rows[1:] != prefixes.rows[:-1]
        one(prefixes.tokens[is_root, :begin], scores[is_root])
    return scores


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
    more = 0 if hasattr(one, "multi_token_biases") else 1  # older ones ask for one token more than have to agree
    for before, last_tokens, biases in _biases_of_several(one, scores.device):
        if (needed := before.shape[1] + more) <= prefixes.longest:
            ends, long_enough = prefixes.ends(before.shape[1])[0], prefixes.lengths >= needed
            completed = (ends[:, None] == before).all(-1) & long_enough[:, None]  # (prefixes, sequences)
            bias.index_add_(1, last_tokens, torch.where(completed, biases, 0.0))
    return scores + bias


def _biases_of_several(one: Any, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the biased sequences of each length: tokens before the last, last tokens, and biases."""
    if (prepared := getattr(one, "multi_token_biases", None)) is not None:
        return cast(list[tuple[Tensor, Tensor, Tensor]], prepared)
    found: dict[int, dict[tuple[int, ...], float]] = {}  # older versions of transformers go through them one by one
    for tokens, bias in one.sequence_bias.items():
        if len(tokens) > 1:
            found.setdefault(len(tokens), {})[tokens] = bias
    tables = [(torch.tensor(list(biases), device=device), list(biases.values())) for biases in found.values()]
    return [(tokens[:, :-1], tokens[:, -1], torch.tensor(biases, device=device)) for tokens, biases in tables]


def _timestamps(one: Any, prefixes: Prefixes, scores: Tensor) -> Tensor:
    """Apply Whisper's rules: timestamps come in pairs, never decrease, and come first if they are likelier than text.

    Source: https://arxiv.org/abs/2212.04356, section 2.3 and the rules of its decoding.
    """
    first, begin = one.timestamp_begin, one.begin_index
    token = cached_arange(scores.shape[-1], scores.device)
    is_time = token >= first
    emitted = (prefixes.lengths - begin)[:, None]  # (prefixes, 1)
    before, last = prefixes.ends(2)[0].T[:, :, None]  # (prefixes, 1) each
    ends_in_time = (emitted >= 1) & (last >= first)
    ends_in_two = ends_in_time & ((emitted < 2) | (before >= first))
    opened = ends_in_time & ~ends_in_two  # the second one of the pair, or the end, has to follow
    banned = (token == one.no_timestamps_token_id) | (ends_in_two & is_time) | (opened & (token < one.eos_token_id))
    banned = banned | (is_time & (token < _earliest(first, begin, prefixes) + (~opened).long()))
    if prefixes.shortest <= begin <= prefixes.longest:
        outside = ~is_time
        if one.max_initial_timestamp_index is not None:
            outside = outside | (token > first + one.max_initial_timestamp_index)
        banned = banned | ((emitted == 0) & outside)
    scores = scores.masked_fill(banned, -math.inf)
    if one._detect_timestamp_from_logprob:
        logprobs = scores.log_softmax(-1)
        beats_text = logprobs[:, first:].logsumexp(-1) > logprobs[:, :first].amax(-1)
        scores = scores.masked_fill(beats_text[:, None] & ~is_time, -math.inf)
    return scores


def _earliest(first: int, begin: int, prefixes: Prefixes) -> Tensor:
    """Return the last timestamp that each prefix emitted, (prefixes, 1); without one, what precedes the ``first``."""
    column = prefixes.columns
    emitted = (column >= begin) & (column < prefixes.lengths[:, None])
    place = torch.where(emitted & (prefixes.tokens >= first), column, -1).amax(1, keepdim=True)  # (prefixes, 1)
    return torch.where(place >= 0, prefixes.tokens.gather(1, place.clamp(min=0)), first - 1)


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
    logits_process.WhisperTimeStampLogitsProcessor: _timestamps,
    FirstTokenListener: _hear_first_tokens,
}
