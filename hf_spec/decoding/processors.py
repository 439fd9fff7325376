"""The user's logits processors, asked at the nodes of a proposal instead of once per token.

Plain ``generate`` shows a processor the whole batch, once per emitted token. A verified block has many nodes, most of
which never become text, so processors are told apart by what their result depends on:

1. *memoryless*: on the logits alone. All nodes of all rows in one call.
2. *of the prefix*: on the row's own prefix too, its length included. Every node with the prefix it would have if it
   were text: at all nodes at once what ``prefixes.py`` knows, other prefixes of one length in one call.
3. *lockstep*: everything else, what the user wrote above all (``prefix_allowed_tokens_fn`` too). It may count calls,
   keep a state or look at the other rows, so it gets the contract of plain ``generate``, and rows advance together.
   But rows that have ended score zeros, where plain ``generate`` goes on scoring what is behind their end.
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

from ..counting import numbers, uploaded
from ..proposal import Proposal
from ..sampling import largest, likeliest
from .prefixes import TOGETHER, Prefixes
from .stopping import Stops
from .warpers import in_less_time

P = TypeVar("P")

MEMORYLESS: frozenset[type] = frozenset(
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

OF_THE_PREFIX: frozenset[type] = frozenset(
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
    }
)

# The other built-in ones stay in lockstep:
#   SynthIDTextWatermark, UnbatchedClassifierFreeGuidance, DiaEOSDelayPattern: keep a state from call to call
#   EncoderNoRepeatNGram, EncoderRepetitionPenalty: bound to the rows of the batch by their place in it
#   ClassifierFreeGuidance, DiaClassifierFreeGuidance, DiaEOSChannelFilter: mix rows
#   WhisperNoSpeechDetection, WhisperTimeStamp: belong to an encoder-decoder's own loop, which resets them from outside

_PURE = "_hf_spec_pure"


def pure(processor: P) -> P:
    """Declare that a custom processor is a pure function of each row's own prefix and logits, and return it.

    It may then be called with any number of rows, in any order, several times or never for one prefix, and rows need
    not wait for each other. The same goes for a ``prefix_allowed_tokens_fn``, whose list of tokens must then follow
    from the row's number and its prefix alone. Use it on an instance or a function, or as a decorator on a class;
    subclasses have to declare it again. What takes no attributes, such as a bound method, is returned in a wrapper.
    """
    try:
        setattr(processor, _PURE, True)
    except AttributeError:
        return cast(P, pure(functools.partial(cast(Callable[..., Any], processor))))
    return processor


class Processors:
    """Sort the user's ``LogitsProcessorList`` into memoryless, of the prefix and lockstep, and call it accordingly.

    ``rows`` are those of the batch, if they are known. Errors: a ValueError for a processor made for another number.
    """

    def __init__(self, processors: LogitsProcessorList, rows: int | None = None) -> None:
        self._all = processors
        if rows is not None:
            _check_rows(processors, rows)
        memoryless = [one for one in processors if type(one) in MEMORYLESS]
        self._warpers = list(map(in_less_time, memoryless))
        self._warpers_of_drafts = [in_less_time(one, nearly=True) for one in memoryless]
        self.is_empty: bool = len(processors) == 0
        self.memoryless: bool = len(self._warpers) == len(processors)
        self.together: bool = all(type(one) in MEMORYLESS or type(one) in TOGETHER for one in processors)
        self.lockstep: bool = not all(type(one) in MEMORYLESS or _is_of_the_prefix(one) for one in processors)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Call the whole list the plain way: (batch, length), (batch, vocab) -> (batch, vocab) float32."""
        return _call(self._all, input_ids, scores.to(dtype=torch.float32, copy=True))

    def warp(self, scores: Tensor) -> Tensor:
        """Apply the memoryless processors alone to float32 ``scores`` (rows, vocab), which are left as they are."""
        return _warped(self._warpers, scores)

    def at_once(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Process float32 ``scores`` (prefixes, vocab), each behind its own prefix, where ``together`` is set."""
        for one in self._all:
            if type(one) in MEMORYLESS:
                scores = _warped([in_less_time(one)], scores)
            else:
                scores = TOGETHER[type(one)](one, prefixes, scores)
        return scores

    def draft_distribution(self, only_best: bool = False) -> Callable[[Tensor], Tensor]:
        """Return the map from draft logits to float32 log-probabilities that guesses follow, both (..., vocab).

        The memoryless processors are applied once; the others would need the prefix of every guess, and leaving them
        out changes how often a guess is accepted but not what is accepted. ``only_best``: nobody looks at more than
        the best token, so that any scores in the same order will do.
        """

        if only_best and not self._warpers:
            return lambda logits: logits

        def distribution(logits: Tensor) -> Tensor:
            flat = logits.reshape(-1, logits.shape[-1]).float()
            return _warped(self._warpers_of_drafts, flat).log_softmax(-1).view(logits.shape)

        return distribution

    def scores_at(self, logits: Tensor, tokens: Tensor, lengths: list[int], rows: list[int]) -> Tensor:
        """Process float32 ``logits`` (pairs, vocab), each after a prefix of its own. Not for a list in lockstep.

        ``tokens`` (pairs, longest) are the right-padded prefixes, of which ``lengths`` count; ``rows`` are the places
        of the pairs in the batch that ``generate`` was called with, for the processors that know them.
        """
        if self.memoryless:
            return self.warp(logits)
        groups: dict[int, list[int]] = defaultdict(list)
        for pair, length in enumerate(lengths):
            groups[length].append(pair)
        scores = torch.empty_like(logits)
        for length, pairs in groups.items():
            index = uploaded(pairs, logits.device)
            bound = LogitsProcessorList([_bind(one, [rows[pair] for pair in pairs]) for one in self._all])
            processed = _call(bound, tokens[index, :length], logits[index])
            if processed.shape != (len(pairs), logits.shape[-1]):
                raise ValueError(self._misshapen(processed.shape, len(pairs), logits.shape[-1]))
            scores[index] = processed.float()  # theirs may be of any type
        return scores

    def _misshapen(self, shape: torch.Size, rows: int, vocabulary: int) -> str:
        theirs = [type(one).__name__ for one in self._all if is_declared_pure(one)]
        return (
            f"{', '.join(theirs)}: scores of shape {(rows, vocabulary)} became {tuple(shape)}. A processor that is "
            "declared pure has to return a score for every token: -inf for those that may not come"
        )


class NodeScores:
    """Give the processed scores at the nodes of a proposal, computed where they are asked for.

    ``logits`` (batch, nodes, vocab) are the target's, raw; ``text`` (batch, capacity) ends with the root of each row
    at ``lengths[b] - 1``, and is not needed by processors without memory; ``rows`` are the places of these rows in the
    batch that ``generate`` was called with; ``stops`` end a row: behind such a guess nobody is asked. Not for a list
    in lockstep.
    """

    def __init__(
        self,
        processors: Processors,
        logits: Tensor,
        proposal: Proposal,
        text: Tensor | None,
        lengths: list[int],
        rows: list[int],
        stops: Stops | None = None,
    ) -> None:
        self._processors = processors
        self._logits = logits
        self._proposal = proposal
        self._text = text
        self._lengths = lengths
        self._rows = rows
        self._stops = stops

    def at(self, node: Tensor) -> Tensor:
        """Return the scores at one ``node`` (batch,) per row: (batch, vocab) float32."""
        row = numbers(len(node), node.device)
        if self._processors.together and not self._processors.memoryless:
            return self._weighable[row, node]
        return self._score(row, node)

    def at_root(self) -> Tensor:
        """Return the scores behind the roots, (batch, vocab): float32, but for logits that are left as they are."""
        logits = self._logits[:, 0]
        if self._processors.is_empty:
            return logits
        if self._processors.memoryless:
            return self._processors.warp(logits.float())
        if self._processors.together:
            return self._processors.at_once(logits.float(), self._prefixes(self._text_so_far, self._text_lengths, 0))
        return self.at(torch.zeros_like(self._proposal.root))

    def best(self) -> Tensor:
        """Return the token with the highest score at every node, (batch, nodes)."""
        if self._processors.is_empty:  # spare the copies
            return self._largest[1]
        return likeliest(self._at_all_nodes if self._processors.together else self.every())

    def are_sound(self) -> Tensor:
        """Tell at which nodes the logits hold no nan and no inf, (batch, nodes) bool.

        A guess whose forward overflows spoils the other nodes too: attention gives it no weight, but 0 * nan is nan.
        """
        return self._largest[0] < torch.inf

    @functools.cached_property
    def _largest(self) -> tuple[Tensor, Tensor]:
        return largest(self._logits)

    def every(self) -> Tensor:
        """Return the scores at all nodes: (batch, nodes, vocab) float32.

        Nodes that are ABSENT, or that the target cannot reach because a token on their path has probability zero or
        ends the row, hold zeros or what processors make of them: one that is not built in never sees a prefix that
        could not have become text and gone on.
        """
        if self._processors.together:
            return self._weighable
        present = self._proposal.present
        scores = torch.zeros_like(self._logits, dtype=torch.float32)  # (batch, nodes, vocab)
        reachable = torch.zeros_like(present)
        for end in sorted(set(self._ends[present].tolist())):  # a parent's prefix is one shorter: its scores are there
            batch, node = (present & (self._ends == end)).nonzero(as_tuple=True)
            possible = self._is_possible(scores, reachable, batch, node)
            batch, node = batch[possible], node[possible]
            reachable[batch, node] = True
            scores[batch, node] = self._score(batch, node)
        return scores

    @functools.cached_property
    def _at_all_nodes(self) -> Tensor:
        scores = self._logits.float()
        if not self._proposal.is_whole:
            scores = scores.masked_fill(~self._proposal.present[:, :, None], 0.0)
        flat = scores.flatten(0, 1)
        if self._processors.memoryless:
            return self._processors.warp(flat).view(scores.shape)
        nodes, depth = scores.shape[1], self._proposal.max_depth
        text, spill = self._text_so_far, max(self._lengths) + depth
        text = torch.nn.functional.pad(text, (0, spill + 1 - text.shape[1]))
        guessed = self._proposal.ancestors & (numbers(nodes, text.device) > 0)  # the root stands in the text
        column = torch.where(guessed, self._ends[:, None] - 1, spill)
        guesses = self._proposal.tokens[:, None].expand(-1, nodes, -1)
        tokens = text[:, None].expand(-1, nodes, -1).scatter(2, column, guesses)[:, :, :spill]
        prefixes = self._prefixes(tokens.flatten(0, 1), self._ends.flatten(), depth)
        return self._processors.at_once(flat, prefixes).view(scores.shape)

    @functools.cached_property
    def _weighable(self) -> Tensor:
        """Let any token follow an end: processors may ban all, and a guess is weighed by what could follow it."""
        scores, stops = self._at_all_nodes, self._stops
        if stops is None or self._processors.memoryless:
            return scores
        if stops.reads_text and bool((scores.amax(-1) == -torch.inf).any()):  # a look at the texts takes long
            return scores.masked_fill(self._ended[:, :, None], 0.0)
        return scores.masked_fill(self._behind(self._are_last)[:, :, None], 0.0) if stops.last_tokens else scores

    def _prefixes(self, tokens: Tensor, lengths: Tensor, depth: int) -> Prefixes:
        """Take ``tokens`` (batch * nodes, n) for the prefixes of nodes that are at most ``depth`` deep."""
        shortest, longest, nodes = min(self._lengths), max(self._lengths) + depth, len(lengths) // len(self._rows)
        rows = self._rows_on_device.repeat_interleave(nodes)
        return Prefixes(tokens, lengths, rows, shortest, longest)

    @functools.cached_property
    def _rows_on_device(self) -> Tensor:
        if self._rows == list(range(len(self._rows))):
            return numbers(len(self._rows), self._logits.device)
        return uploaded(self._rows, self._logits.device)

    @property
    def _text_so_far(self) -> Tensor:
        assert self._text is not None
        return self._text[:, : max(self._lengths)]

    @functools.cached_property
    def _text_lengths(self) -> Tensor:
        device = self._logits.device
        if len(set(self._lengths)) == 1:
            return numbers(1, device, self._lengths[0]).expand(len(self._lengths))
        return uploaded(self._lengths, device)

    @functools.cached_property
    def _ends(self) -> Tensor:
        """Measure the prefix of each node, itself included: (batch, nodes)."""
        return self._text_lengths[:, None] + self._proposal.depth

    @functools.cached_property
    def _ended(self) -> Tensor:
        """Tell which nodes are guesses that end their row, or stand behind one: (batch, nodes) bool."""
        ends, stops = self._are_last, self._stops
        if stops is not None and stops.reads_text:
            batch, node = (self._proposal.present & (self._proposal.depth > 0)).nonzero(as_tuple=True)
            complete = stops.completes_string(self._prefixes_at(batch, node), self._ends[batch, node].tolist())
            ends[batch, node] |= torch.tensor(complete, dtype=torch.bool, device=ends.device)
        return self._behind(ends)

    @property
    def _are_last(self) -> Tensor:
        """Tell which guesses are tokens that end their row: (batch, nodes) bool."""
        tokens = self._proposal.tokens
        if self._stops is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        ends = self._stops.are_last(tokens)
        ends[:, 0] = False  # the root is text that goes on
        return ends

    def _behind(self, ends: Tensor) -> Tensor:
        return (self._proposal.ancestors & ends[:, None]).any(-1)

    def _is_possible(self, scores: Tensor, reachable: Tensor, batch: Tensor, node: Tensor) -> Tensor:
        """Tell which pairs (batch, node) have a reachable parent that gives them a chance: (pairs,) bool."""
        parent = self._proposal.parents[batch, node]
        distribution = scores[batch, parent]  # (pairs, vocab); the root has no parent and reads whatever stands at -1
        own = distribution.gather(1, self._proposal.tokens[batch, node][:, None])[:, 0]
        # A row of -inf alone gives nan here, which is not 0: greedy decoding goes on with token 0 there.
        chance = torch.exp(own - distribution.amax(1))
        return (parent < 0) | (reachable[batch, parent] & (chance != 0))

    def _score(self, batch: Tensor, node: Tensor) -> Tensor:
        """Process the logits of the pairs (batch, node): (pairs, vocab)."""
        logits = self._logits[batch, node].float()
        if self._processors.memoryless:
            return self._processors.warp(logits)
        goes_on = ~self._ended[batch, node]
        scores = torch.zeros_like(logits)
        scores[goes_on] = self._with_prefix(logits[goes_on], batch[goes_on], node[goes_on])
        return scores

    def _with_prefix(self, logits: Tensor, batch: Tensor, node: Tensor) -> Tensor:
        """Process float32 ``logits`` (pairs, vocab) at the pairs (batch, node), each after its own prefix."""
        rows, tokens = [self._rows[b] for b in batch.tolist()], self._prefixes_at(batch, node)
        return self._processors.scores_at(logits, tokens, self._ends[batch, node].tolist(), rows)

    def _prefixes_at(self, batch: Tensor, node: Tensor) -> Tensor:
        """Return the prefixes of the pairs (batch, node), right-padded: (pairs, longest)."""
        assert self._text is not None
        proposal, longest = self._proposal, max(self._lengths)
        spill = longest + proposal.max_depth
        guessed = proposal.ancestors[batch, node]  # (pairs, nodes)
        guessed[:, 0] = False  # the root stands in the text, or nowhere if the prompt is empty
        column = (self._ends[batch] - 1).masked_fill(~guessed, spill)
        tokens = self._text.new_zeros((len(batch), spill + 1))
        tokens[:, :longest] = self._text[batch, :longest]
        return tokens.scatter_(1, column, proposal.tokens[batch])


def _warped(memoryless: Collection[Any], scores: Tensor) -> Tensor:
    """Call ``memoryless`` processors, without the look that transformers' list takes at each one's signature."""
    nothing = scores.new_empty((scores.shape[0], 0), dtype=torch.long)  # of the text
    for one in memoryless:
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
    """Return how much of each row's prompt a repetition penalty leaves out, if that is not the same for all."""
    is_penalty = type(processor) is logits_process.RepetitionPenaltyLogitsProcessor
    ignored = processor.prompt_ignore_length if is_penalty else None
    return ignored if isinstance(ignored, Tensor) else None


def _is_of_the_prefix(processor: Any) -> bool:
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        one_text = processor._num_beams == 1  # it looks at all beams of a row together
        return one_text and is_declared_pure(processor._prefix_allowed_tokens_fn)  # the function is the user's
    return type(processor) in OF_THE_PREFIX or is_declared_pure(processor)


def is_declared_pure(one: Any) -> bool:
    """Tell whether ``pure`` was called on ``one`` or its class."""
    return _PURE in vars(type(one)) or _PURE in getattr(one, "__dict__", {})


def _bind(processor: Any, rows: list[int]) -> Any:
    """Return ``processor`` as it has to be called for some ``rows`` of the batch it was made for."""
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        allowed = functools.partial(_allowed, processor._prefix_allowed_tokens_fn, rows)
        return logits_process.PrefixConstrainedLogitsProcessor(allowed, 1)
    if (ignored := _ignored_by_row(processor)) is not None:
        return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[rows])
    return processor


def _allowed(function: Callable[[int, Tensor], list[int]], rows: list[int], pair: int, prefix: Tensor) -> list[int]:
    tokens = function(rows[pair], prefix)
    if len(tokens) == 0:
        raise ValueError(
            f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {rows[pair]} behind {len(prefix)} "
            "tokens: nothing could follow. Let it allow at least one token, such as the end of the sequence"
        )
    return tokens
