"""The user's logits processors, called at the nodes of a proposal instead of once per token.

Plain ``generate`` calls a processor once per emitted token, with the complete batch. A verified block has many nodes,
most of which are rejected. So processors are sorted by what their result depends on:

1. *stateless*: the logits alone. All nodes of all sequences are processed in one call.
2. *per sequence*: the sequence's own prefix too, its length included. Every node gets the prefix that it would have if
   it were emitted. Classes in ``prefixes.py`` take all nodes at once, others all prefixes of one length in a call.
3. *lockstep*: everything else, above all what users write (``prefix_allowed_tokens_fn`` too). Such a processor may
   count calls, keep a state or read other sequences. So it is called as plain ``generate`` calls it, and all sequences
   advance together. One difference remains: finished rows have the logits of one that grows, not their own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..device_tensors import to_device
from .prefixes import VECTORIZED, FirstTokenListener, Prefixes
from .warpers import for_graphs, in_less_time, lenient

P = TypeVar("P")

STATELESS: frozenset[type] = frozenset(
    {
        logits_process.BarkEosPrioritizerLogitsProcessor,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.LogitNormalization,
        logits_process.MinPLogitsWarper,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopHLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
    }
)

PER_SEQUENCE: frozenset[type] = frozenset(
    {
        logits_process.AlternatingCodebooksLogitsProcessor,
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
        logits_process.WatermarkLogitsProcessor,  # reseeds its generator from the prefix at every call
        logits_process.WhisperTimeStampLogitsProcessor,
        FirstTokenListener,
    }
)

# The other built-in processors need lockstep:
#   SynthIDTextWatermark, UnbatchedClassifierFreeGuidance, DiaEOSDelayPattern: keep a state between calls
#   EncoderNoRepeatNGram, EncoderRepetitionPenalty: depend on the position of a row in the batch
#   ClassifierFreeGuidance, DiaClassifierFreeGuidance, DiaEOSChannelFilter: mix rows

_PURE = "_hf_spec_pure"


def pure(processor: P) -> P:
    """Declare that a custom processor is a pure function of each row's own prefix and logits, and return it.

    It may then be called with any number of rows, in any order, and several times or never for one prefix. So
    sequences need not wait for each other. A ``prefix_allowed_tokens_fn`` can be declared, too: its tokens must then
    depend on the row's number and its prefix alone.

    Use it on an instance or a function, or as a decorator on a class. Subclasses have to declare it again. An object
    that takes no attributes, such as a bound method, is returned in a wrapper.
    """
    try:
        setattr(processor, _PURE, True)
    except AttributeError:
        return cast(P, pure(functools.partial(cast(Callable[..., Any], processor))))
    return processor


class Processors:
    """The user's ``LogitsProcessorList``, sorted into stateless, per-sequence and lockstep ones.

    ``rows`` is the batch size, if it is known. Errors: a ValueError for a processor made for another batch size.
    """

    def __init__(self, processors: LogitsProcessorList, rows: int | None = None) -> None:
        self._all = processors = LogitsProcessorList(map(_listening_once, processors))
        if rows is not None:
            _check_rows(processors, rows)
        self._stateless = [one for one in processors if type(one) in STATELESS]
        self._warpers = list(map(in_less_time, self._stateless))
        self._lenient_warpers = list(map(lenient, self._warpers))
        self.is_empty: bool = len(processors) == 0
        self.stateless: bool = len(self._warpers) == len(processors)
        self.vectorized: bool = all(type(one) in STATELESS or type(one) in VECTORIZED for one in processors)
        self.lockstep: bool = not all(type(one) in STATELESS or _is_per_sequence(one) for one in processors)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Call the complete list as ``generate`` does: (batch, length), (batch, vocab) -> (batch, vocab) float32."""
        return _call(self._all, input_ids, scores.to(dtype=torch.float32, copy=True))

    def warp(self, scores: Tensor, is_plain: bool = False) -> Tensor:
        """Apply the stateless processors alone to float32 ``scores`` (rows, vocab), which are not changed in place.

        ``is_plain``: there is no draft token, so what raises in plain ``generate`` raises here.
        """
        return _warped(self._warpers if is_plain else self._lenient_warpers, scores)

    def at_once(self, scores: Tensor, prefixes: Prefixes, is_plain: bool = False) -> Tensor:
        """Process float32 ``scores`` (prefixes, vocab), each after its own prefix, where ``vectorized`` is set."""
        warpers = iter(self._warpers if is_plain else self._lenient_warpers)
        for one in self._all:
            if type(one) in STATELESS:
                scores = _warped([next(warpers)], scores)
            else:
                scores = VECTORIZED[type(one)](one, prefixes, scores)
        return scores

    def draft_distribution(
        self, only_best: bool = False, graphs_on: torch.device | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the map from draft logits to float32 log-probabilities of draft tokens, both (..., vocab).

        Only stateless processors are applied. The others would need the prefix of every draft token; without them the
        acceptance rate changes, but not the output. ``only_best``: only the best token is used, so any scores in the
        same order will do. ``graphs_on``: the device of the graphs that it will be part of.
        """
        if only_best and not self._warpers:
            return lambda logits: logits
        known = self._stateless if graphs_on is None else [for_graphs(one, graphs_on) for one in self._stateless]
        warpers = [lenient(in_less_time(one, nearly=True)) for one in known]

        def distribution(logits: Tensor) -> Tensor:
            flat = logits.reshape(-1, logits.shape[-1]).float()
            return _warped(warpers, flat).log_softmax(-1).view(logits.shape)

        return distribution

    def scores_at(
        self, logits: Tensor, tokens: Tensor, lengths: list[int], rows: list[int], is_plain: bool = False
    ) -> Tensor:
        """Process float32 ``logits`` (pairs, vocab), each after its own prefix. Not for a list in lockstep.

        ``tokens`` (pairs, longest) are the right-padded prefixes and ``lengths`` their lengths. ``rows`` are the
        positions of the pairs in the batch of ``generate``, for processors that depend on them.
        """
        if self.stateless:
            return self.warp(logits, is_plain)
        known = self._all if is_plain else [lenient(one) for one in self._all]
        groups: dict[int, list[int]] = defaultdict(list)
        for pair, length in enumerate(lengths):
            groups[length].append(pair)
        scores = torch.empty_like(logits)
        for length, pairs in groups.items():
            index = to_device(pairs, logits.device)
            bound = LogitsProcessorList([_bind(one, [rows[pair] for pair in pairs]) for one in known])
            processed = _call(bound, tokens[index, :length], logits[index])
            if processed.shape != (len(pairs), logits.shape[-1]):
                raise ValueError(self._misshapen(processed.shape, len(pairs), logits.shape[-1]))
            scores[index] = processed.float()  # a user's processor may return any dtype
        return scores

    def _misshapen(self, shape: torch.Size, rows: int, vocabulary: int) -> str:
        theirs = [type(one).__name__ for one in self._all if is_declared_pure(one)]
        return (
            f"{', '.join(theirs)}: scores of shape {(rows, vocabulary)} became {tuple(shape)}. A processor that is "
            "declared pure has to return a score for every token: -inf for those that may not come"
        )


def _warped(stateless: Collection[Any], scores: Tensor) -> Tensor:
    """Call ``stateless`` processors without inspecting each one's signature, as transformers' list does."""
    nothing = scores.new_empty((scores.shape[0], 0), dtype=torch.long)  # stateless processors read no text
    for one in stateless:
        scores = one(nothing, scores)
    return scores


def _call(processors: LogitsProcessorList, input_ids: Tensor, scores: Tensor) -> Tensor:
    processed: Tensor = processors(cast(torch.LongTensor, input_ids), scores)
    return processed


def _check_rows(processors: LogitsProcessorList, rows: int) -> None:
    for one in processors:
        ignored = _ignored_by_row(one)
        if ignored is not None and len(ignored) != rows:
            raise ValueError(
                f"prompt_ignore_length of the RepetitionPenaltyLogitsProcessor is for {len(ignored)} rows, but "
                f"{rows} are generated; give one length for each of them, or one number for all"
            )


def _ignored_by_row(processor: Any) -> Tensor | None:
    """Return how much of each row's prompt a repetition penalty ignores, if rows differ in it."""
    is_penalty = type(processor) is logits_process.RepetitionPenaltyLogitsProcessor
    ignored = processor.prompt_ignore_length if is_penalty else None
    return ignored if isinstance(ignored, Tensor) else None


def _is_per_sequence(processor: Any) -> bool:
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        return is_declared_pure(processor._prefix_allowed_tokens_fn)  # the function is the user's
    return type(processor) in PER_SEQUENCE or is_declared_pure(processor)


def is_declared_pure(one: Any) -> bool:
    """Tell whether ``pure`` was called on ``one`` or its class."""
    return _PURE in vars(type(one)) or _PURE in getattr(one, "__dict__", {})


def _listening_once(processor: Any) -> Any:
    is_detection = type(processor) is logits_process.WhisperNoSpeechDetection
    return FirstTokenListener(processor) if is_detection else processor


def _bind(processor: Any, rows: list[int]) -> Any:
    """Restrict ``processor`` to some ``rows`` of the batch that it was made for."""
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        prompts = [row // processor._num_beams for row in rows]  # of num_return_sequences: beams are refused
        allowed = functools.partial(_allowed, processor._prefix_allowed_tokens_fn, prompts)
        return logits_process.PrefixConstrainedLogitsProcessor(allowed, 1)
    if (ignored := _ignored_by_row(processor)) is not None:
        return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[rows])
    return processor


def _allowed(function: Callable[[int, Tensor], list[int]], prompts: list[int], pair: int, prefix: Tensor) -> list[int]:
    tokens = function(prompts[pair], prefix)
    if len(tokens) == 0:
        raise ValueError(
            f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {prompts[pair]} behind {len(prefix)} "
            "tokens: nothing could follow. Let it allow at least one token, such as the end of the sequence"
        )
    return tokens
