"""Run a model of transformers, a target or a draft, over trees of draft tokens: prefill, score, commit."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..device_tensors import to_device
from ..packing.packing import is_packed
from ..proposal import Proposal
from .adapters import adapted_layers, adapts_ends, with_adapters
from .architectures import arguments_of, cache_name
from .cache import TreeKVCache, has_states, keeps_everything, undo_reading
from .changes import foreign_hooks
from .features import Features
from .groups import Reading, groups_of, read_in_groups
from .hooks import NO_CONTEXT, hooked
from .kv_view import KVView
from .masks import PlainMasks, TreeMask, attending_in
from .names import CACHES, OF_DECODER_ONLY, map_tensors, text_arguments
from .plain import continued, prompt_kwargs, step_inputs
from .positions import OwnPositions
from .relative_bias import hook_biases

# Arguments that are rebuilt for each forward, with the names of the text, and those that have a column for each token.
PER_FORWARD = ("logits_to_keep", *CACHES)
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class Scores:
    """The outputs of a forward.

    ``logits`` (batch, nodes, vocabulary), ``features`` (batch, nodes, widths) or ``None``, and ``hidden_states``, one
    (batch, nodes, hidden) per layer where they were asked for.
    """

    logits: Tensor
    features: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()

    def last(self) -> Scores:
        """Keep the last position only: after a prompt, the next token follows that one."""
        features = None if self.features is None else self.features[:, -1:]
        return Scores(self.logits[:, -1:], features, tuple(state[:, -1:] for state in self.hidden_states))

    def at(self, columns: Tensor) -> Scores:
        """Keep some columns of each row, (batch, kept)."""

        def pick(states: Tensor) -> Tensor:
            index = columns.to(states.device)[:, :, None]
            return states.gather(1, index.expand(-1, -1, states.shape[-1]))

        return self.each(pick)

    def of(self, rows: Tensor) -> Scores:
        """Keep some rows."""
        return self.each(lambda states: states.index_select(0, rows.to(states.device)))

    def each(self, pick: Callable[[Tensor], Tensor]) -> Scores:
        """Apply ``pick`` to logits, features and hidden states, (batch, nodes, ...) each."""
        features = None if self.features is None else pick(self.features)
        return Scores(pick(self.logits), features, tuple(pick(state) for state in self.hidden_states))


@dataclass
class _PrefillRecord:
    """What is recorded of the forwards of a prefill, which transformers may run in chunks.

    ``by_token`` names the arguments that had a column for each token.
    """

    by_token: set[str] = field(default_factory=set)
    features: list[Tensor] = field(default_factory=list)


class _FinishedRows:
    """Rows that ended early, whose last token still has to be written to the returned KV cache.

    The next proposal has only the unfinished rows. It is widened by the ended ones, and its scores are narrowed. ::

        row 1 ended with x     proposal     widened      scores     committed     the next step
        row 0                  a b c        a b c        a b c      2 nodes       row 0
        row 1                               x x x                   1 node
        row 2                  d e f        d e f        d e f      3 nodes       row 2
    """

    def __init__(self, going_on: list[int], last_tokens: Tensor) -> None:
        self._going_on = going_on
        self._last_tokens = last_tokens  # (batch,)
        self.rows = to_device(going_on, last_tokens.device)  # (unfinished rows,)

    def widen(self, tokens: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Add rows of last tokens to ``tokens`` (rows, nodes), and nodes that see only themselves to ``ancestors``.

        The latter are (rows, nodes, draft nodes).
        """
        count = tokens.shape[1]
        wide = self._last_tokens[:, None].repeat(1, count).index_copy(0, self.rows, tokens)  # (batch, nodes)
        if ancestors is None:
            return wide, None
        alone = torch.eye(count, dtype=torch.bool, device=tokens.device)
        alone = torch.nn.functional.pad(alone, (ancestors.shape[2] - count, 0)).repeat(len(wide), 1, 1)
        return wide, alone.index_copy(0, self.rows, ancestors)

    def narrow(self, scores: Scores) -> Scores:
        """Keep the scores of the unfinished rows."""
        return scores.of(self.rows)

    def widen_path(self, path: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Add the ended rows, which commit one node each, to ``path`` (rows, m) and ``counts``."""
        wide = path.new_zeros((len(self._last_tokens), path.shape[1])).index_copy(0, self.rows, path)
        taken = dict(zip(self._going_on, counts, strict=True))
        return wide, [taken.get(row, 1) for row in range(len(wide))]


class ModelRunner:
    """One model and its KV cache in one ``generate`` call, to score draft tokens and commit the accepted ones.

    The model is a target, or a draft that is a language model. ``feature_layers`` name hidden states as ``Features``
    does; ``hidden_states`` asks for all of them.
    """

    def __init__(
        self, model: PreTrainedModel, feature_layers: Sequence[int] = (), hidden_states: bool = False
    ) -> None:
        self.model: Any = model  # its type lacks the methods of GenerationMixin
        self.features = Features(model, feature_layers, every=hidden_states)
        self.slots: KVView  # from the prefill on
        self._cache_name = cache_name(model)
        self._names = text_arguments(model)
        if model.config.is_encoder_decoder:
            hook_biases(model)
        self._text_config = model.config.get_text_config(decoder=True)
        self._origin: Tensor | None = None  # (..., batch or 1, 1), the position that column 0 has or would have
        self._adapted = adapted_layers(model)  # layers with an adapter per row
        self._positions: OwnPositions | None = None  # where the model's forward is given no position_ids
        self._step_kwargs: dict[str, Any] = {}  # arguments of every forward, from prepare_inputs_for_generation
        self._by_token: set[str] = set()  # those of them that have a column for each token
        self._finished: _FinishedRows | None = None  # rows to be read once more with the next proposal
        self.most_new_tokens: int | None = None  # that any row may get; set before the prefill
        self._undo_prompt: Callable[[], None] | None = None  # restores the cache to its state before the prompt
        # Scores a proposal of which a draft has run the first layers, or returns ``None`` for any other.
        self.begun: Callable[[Proposal], Scores | None] | None = None

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Scores:
        """Read the prompt by transformers' own prefill and score its last token; the features cover all of it."""
        if self.features.layers and model_kwargs.get("logits_to_keep") == 1:  # Gemma 4 then returns one state only
            model_kwargs["logits_to_keep"] = torch.tensor([-1], device="cpu")  # an index on any device's logits
        has_hooks = bool(self.features.layers or self.features.every)
        if has_hooks:
            model_kwargs |= self.features.asked
        # Of chunks: a graph keeps the hooks that it was compiled with, and transformers' read no packed weights.
        if has_hooks or (generation_config.prefill_chunk_size and is_packed(self.model)):
            generation_config = copy.copy(generation_config)
            generation_config.disable_compile = True
        self._undo_prompt = undo_reading(model_kwargs.get(self._cache_name))
        reading = self._read_prompt(input_ids, generation_config, model_kwargs)
        outputs = reading.outputs
        self._start_after(input_ids, outputs, model_kwargs)
        return Scores(outputs.logits[:, -1:], reading.features, self.features.all_hidden(outputs))

    def _read_prompt(
        self, ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any], last: int = 1, **changed: Any
    ) -> Reading:
        """Read ``ids`` by transformers' own prefill, in groups where that costs less; score ``last`` tokens or more.

        ``changed`` replaces arguments of each forward.
        """

        def read(ids: Tensor, kwargs: dict[str, Any]) -> Reading:
            with self._recording(**changed) as record:
                outputs = self.model._prefill(ids, config, kwargs)
            self._by_token = {*TOKEN_TYPES, *record.by_token}
            return Reading(outputs, torch.cat(record.features, dim=1) if record.features else None)

        has_padding = len(ids) > 1 and kwargs.get("attention_mask") is not None
        can_group = has_padding and not self._adapted and self._reads_text_alone(kwargs)
        if can_group and (groups := groups_of(self.model, ids, kwargs)):
            return read_in_groups(groups, ids, kwargs, self._cache_name, read, last)
        return read(ids, kwargs)

    def _reads_text_alone(self, model_kwargs: dict[str, Any]) -> bool:
        """Tell whether a prompt is tokens alone, read into an empty cache, and nobody asks how it is read.

        Hooks of other packages may act on prompts, and returned hidden states include the padding.
        """
        cache = model_kwargs.get(self._cache_name)
        text = (*OF_DECODER_ONLY, *PER_FORWARD)
        others = {name: value for name, value in model_kwargs.items() if name not in text}
        return (
            not self.features.every
            and model_kwargs.get("inputs_embeds") is None
            and not any(
                isinstance(value, Tensor) or (value and name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
                for name, value in others.items()
            )
            and isinstance(cache, DynamicCache)
            and not has_states(cache)  # which have no length
            and cache.get_seq_length() == 0
            and not foreign_hooks(self.model)
        )

    def free_buffers(self) -> None:
        """Leave buffers at fixed addresses to the next call, at the end of this one."""

    def verifies_with_prompt(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        """Tell whether ``prefill_with_draft_tokens`` can replace ``prefill``.

        It needs a prompt of tokens alone, read in one forward into an empty cache whose layers keep all of it. That
        leaves out encoder-decoder models, whose prompt is a token or two, after a source. Nobody may want the
        prompt's features, and the model has to read prompts causally. There must be no hooks of other packages: one
        that acts on prompts (a press that prunes the cache) would take draft tokens for a part of one.
        """
        return (
            not self.features.layers
            and generation_config.prefill_chunk_size is None
            and self._reads_text_alone(model_kwargs)
            and keeps_everything(model_kwargs[self._cache_name])
            and not adapts_ends(self._adapted)
        )

    def prefill_with_draft_tokens(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        proposal: Proposal,
    ) -> Scores:
        """Read the prompt and, in the same forward, the chains of ``proposal``, whose root is its last token."""
        count = proposal.tokens.shape[1] - 1
        kwargs = {**model_kwargs, **continued(model_kwargs, count)}
        # Passed to the forward itself: some models' prepare_inputs_for_generation always sets logits_to_keep to 1.
        kept = {"logits_to_keep": 1 + count} if self._takes_logits_to_keep else {}
        self._undo_prompt = undo_reading(model_kwargs.get(self._cache_name))
        ids = torch.cat([input_ids, proposal.tokens[:, 1:]], dim=1)
        outputs = self._read_prompt(ids, generation_config, kwargs, 1 + count, **kept).outputs
        self._start_after(input_ids, outputs, model_kwargs, 1 + count)
        return Scores(outputs.logits[:, -1 - count :])

    def prefill_tokens(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        source: dict[str, Any] | None = None,
    ) -> Scores | None:
        """Read a prompt outside ``generate``; return ``None`` if it is empty: there is nothing to score.

        ``source`` are the arguments of the encoder's states, where the model attends to some.
        """
        kwargs = prompt_kwargs(self.model, input_ids, attention_mask, source=source)
        if input_ids.shape[1] == 0:
            first = input_ids.new_zeros(1, 1) if "position_ids" in kwargs else None
            given = {"use_cache": True, "position_ids": first} | (source or {})
            self._start(kwargs[self._cache_name], len(input_ids), input_ids.device, None, given)
            return None
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = 1
        return self.prefill(input_ids, GenerationConfig(disable_compile=True), kwargs)

    @property
    def _takes_logits_to_keep(self) -> bool:
        """Tell the same as transformers' ``_supports_logits_to_keep``, which looks at the signature in every call."""
        return "logits_to_keep" in arguments_of(self.model)

    def restore_prompt_cache(self) -> None:
        """Restore transformers' cache to its state before the prompt."""
        if self._undo_prompt is not None:
            self._undo_prompt()

    def _start_after(
        self,
        input_ids: Tensor,
        outputs: Any,
        model_kwargs: dict[str, Any],
        open_nodes: int = 0,
    ) -> None:
        """Set up the slots after a prompt, and the arguments that the model itself prepares for the next forward."""
        batch, cache = len(outputs.logits), outputs[self._cache_name]
        prepared = step_inputs(self.model, input_ids, outputs, model_kwargs)
        padding = model_kwargs.get(self._names.mask)
        self._start(cache, batch, outputs.logits.device, padding, prepared, open_nodes)

    def _start(
        self,
        cache: DynamicCache,
        batch: int,
        device: torch.device,
        padding: Tensor | None,
        prepared: dict[str, Any],
        open_nodes: int = 0,
    ) -> None:
        """Replace ``cache`` by slots; ``prepared`` are the arguments of the first one-token forward after it."""
        position = prepared.get(self._names.positions)
        self._positions = OwnPositions(self.model) if position is None else None
        self.slots = self._slots_over(cache, batch, device, padding, open_nodes)
        self._origin = None if position is None else position[..., -1:] - self.slots.prompt
        rebuilt = (*self._names, *PER_FORWARD)
        self._step_kwargs = {name: value for name, value in prepared.items() if name not in rebuilt}

    def _slots_over(self, cache: Any, batch: int, device: torch.device, padding: Tensor | None, nodes: int) -> KVView:
        """Replace transformers' ``cache`` by slots; its last ``nodes`` columns are the draft region, a chain."""
        return KVView(TreeKVCache.adopt(cache, batch, device, nodes), cache, padding, self.most_new_tokens)

    @contextlib.contextmanager
    def _recording(self, **changed: Any) -> Iterator[_PrefillRecord]:
        """Record the features and arguments of each forward of a prefill, after some arguments are ``changed``."""
        record = _PrefillRecord()

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            record.by_token = self._named_by_token(kwargs)
            return args, kwargs | changed

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            if (features := self.features.joined(outputs, caught)) is not None:
                record.features.append(features)

        with self.features.watching() as caught, hooked([self.model], before, after):
            yield record

    # -- draft nodes --------------------------------------------------------------------------------------------------

    def clip(self, proposal: Proposal, limit: int) -> Proposal:
        """Drop the draft tokens, at most ``limit`` deep, that this runner cannot score in the next step: none here."""
        return proposal

    def score(self, proposal: Proposal) -> Scores:
        """Score the root and the draft tokens of ``proposal``, in one forward for all rows and nodes."""
        begun, self.begun = self.begun, None
        if begun is not None and (scores := begun(proposal)) is not None:
            return scores
        return self.score_nodes(proposal.tokens, None if proposal.is_chain else proposal.ancestors)

    def score_nodes(self, tokens: Tensor, ancestors: Tensor | None = None, depth: int | None = None) -> Scores:
        """Do as ``extend`` for the unfinished rows, while rows that have finished are still in the cache, too."""
        if self._finished is None:
            return self.extend(tokens, ancestors, depth)
        return self._finished.narrow(self.extend(*self._finished.widen(tokens, ancestors), depth))

    @property
    def scores_as_plain(self) -> bool:
        """Tell whether a plain step needs nothing of ours but the KV cache: its rows are equally long.

        Then transformers' own masks are right, and ``plain_steps`` can read tokens without our hooks.
        """
        return (
            type(self) is ModelRunner
            and self.slots.cache.rows.equal_lengths
            and self._positions is None
            and not self._adapted
            and self._finished is None
        )

    @contextlib.contextmanager
    def plain_steps(self) -> Iterator[Callable[[Proposal], Scores]]:
        """Score roots alone, one plain step per call, while ``scores_as_plain`` holds."""
        masks_of = PlainMasks(self._text_config._attn_implementation)
        with self.features.watching() as caught, masks_of as masks, self._experts_of_steps():
            yield functools.partial(self._score_as_plain, caught, masks)

    def _experts_of_steps(self) -> contextlib.AbstractContextManager[None]:
        """Compute experts as plain ``generate`` does after its prompt: on an accelerator, in a way for few tokens."""
        switch = None if self.slots.device.type == "cpu" else getattr(self.model, "_optimize_model_for_decode", None)
        return NO_CONTEXT if switch is None else switch()

    def _score_as_plain(self, caught: dict[int, Tensor], masks: PlainMasks, proposal: Proposal) -> Scores:
        slots, rows = self.slots, self.slots.cache.rows
        tokens = proposal.tokens.to(slots.device)  # a prompt may lie elsewhere
        inputs = {**self._step_kwargs, self._names.ids: tokens, self._cache_name: slots.cache.shown}
        if (mask := slots.mask_of(rows.longest + 1)) is not None:
            inputs[self._names.mask] = mask
        if self._origin is not None:
            inputs[self._names.positions] = slots.next_positions(self._origin, 0, 1)
        spans = slots.spans(1)
        rows.begin_forward(1)
        masks.show(slots.seen_by_one(mask))
        try:
            with attending_in(spans, self._text_config._attn_implementation) if spans else NO_CONTEXT:
                outputs = self._forward(inputs)
        finally:
            masks.show(None)
            rows.end_forward()
        rows.draft_nodes = 1
        return Scores(outputs.logits, self.features.joined(outputs, caught), self.features.all_hidden(outputs))

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit the first ``counts[b]`` nodes of ``path[b]`` (batch, m).

        ``in_place``: no node moves, as in a chain. ``on_device`` (batch,) are the same counts, if known there.
        """
        finished, self._finished = self._finished, None
        if finished is None:
            self.slots.commit(path, counts, in_place, on_device)
            return
        self.slots.commit(*finished.widen_path(path, counts), in_place)
        self.keep_rows(finished.rows, keep_finished=True)

    def shorten(self, lengths: Sequence[int]) -> None:
        """Keep ``lengths[b]`` committed tokens of each row, padding included, and drop the draft region.

        Where layers have a window, the oldest tokens in it may be lost. States cannot be taken back.
        """
        self.slots.shorten(lengths)

    def rollback(self) -> None:
        """Drop the draft region, also after a forward that failed; the committed tokens stay."""
        self.slots.rollback()

    def finish_rows(self, going_on: list[int], last_tokens: Tensor) -> None:
        """Keep the rows ``going_on``; read the ``last_tokens`` (batch,) of the others together with the next proposal.

        The others ended early, and plain ``generate`` has their last tokens in the cache that it returns.
        """
        self._finished = _FinishedRows(going_on, last_tokens)

    def read_last_tokens(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Read and commit the last tokens (batch,) of the rows that ``ended``, where no further proposal follows."""
        self.extend(tokens[:, None])
        self.commit(torch.zeros_like(tokens)[:, None], [int(end) for end in ended], in_place=True)

    def release(self, committed: int) -> Cache | None:
        """Return transformers' cache with the prompt and at most ``committed`` tokens of every row."""
        return self.slots.release(committed)

    def abandon(self, committed: int) -> None:
        """Write back to transformers' cache, in the middle of a call, what all rows have committed.

        That is at most ``committed`` tokens after the prompt, and nothing of a draft region.
        """
        self.rollback()
        in_slots = self.slots.committed
        self.release(committed if in_slots is None else min(committed, in_slots))

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None, depth: int | None = None) -> Scores:
        """Add ``tokens`` (batch, nodes) to the draft region and score them, all rows in one forward.

        ``ancestors`` (batch, nodes, draft nodes) bool: which draft nodes, these new ones last, lie on the path to each
        new node, itself included. A node with no other ancestor follows the last committed token. ``depth`` is the
        number of other ancestors, if it is known and the same for all new nodes. Without ``ancestors`` the draft
        region is a chain, which the tokens continue.
        """
        device, config = self.slots.device, self._text_config
        tokens, ancestors = tokens.to(device), None if ancestors is None else ancestors.to(device)
        with (
            self.features.watching() as caught,
            self.slots.scoring(tokens.shape[1], ancestors, config, depth) as block,
            self._reading_at(block),
            with_adapters(self._adapted, self._of_these_rows, are_steps=True),
        ):
            outputs = self._forward(self._inputs(tokens, block))
        return Scores(outputs.logits, self.features.joined(outputs, caught), self.features.all_hidden(outputs))

    def read(self, tokens: Tensor, columns: Sequence[int]) -> Tensor:
        """Do as ``extend`` with a chain, and return its logits at ``columns`` only: (batch, columns, vocabulary)."""
        place = to_device(columns, self.slots.device)
        if not self._takes_logits_to_keep:
            return self.extend(tokens).logits.index_select(1, place)
        self._step_kwargs["logits_to_keep"] = place
        try:
            return self.extend(tokens).logits
        finally:
            del self._step_kwargs["logits_to_keep"]

    def _named_by_token(self, kwargs: dict[str, Any]) -> set[str]:
        """Name the arguments of a forward that have a column for each token; none if there is only one token."""
        names = self._names
        tokens = kwargs.get(names.ids) if kwargs.get(names.embeds) is None else kwargs[names.embeds]
        count = 1 if tokens is None else tokens.shape[1]
        rebuilt = (*names, *PER_FORWARD)
        return {
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and name not in rebuilt and value.shape[1:2] == (count,) and count > 1
        }

    def _forward(self, inputs: dict[str, Any]) -> Any:
        return self.model(**inputs, return_dict=True)

    def _of_these_rows(self, count: int) -> list[int]:
        batch: list[int] = self.slots.cache.batch
        return batch

    def _reading_at(self, block: TreeMask) -> contextlib.AbstractContextManager[None]:
        rows = self._of_these_rows(len(self.slots.cache.rows.cpu_lengths))
        return NO_CONTEXT if self._positions is None else self._positions.reading(block, rows)

    def _inputs(self, tokens: Tensor, block: TreeMask) -> dict[str, Any]:
        """Build the arguments of a forward over new nodes (batch, nodes)."""
        inputs = {**self._step_kwargs, self._names.ids: tokens, self._cache_name: self.slots.cache.shown}
        if (mask := self.slots.mask(block)) is not None:
            inputs[self._names.mask] = mask
        if self._origin is not None:
            inputs[self._names.positions] = self.slots.positions(self._origin, block)
        for name in self._by_token:  # all new tokens get the value of the first one after the prompt
            if isinstance(value := inputs.get(name), Tensor) and value.shape[1] == 1:
                inputs[name] = value.expand(-1, tokens.shape[1], *value.shape[2:])
        return inputs

    # -- what drafts may read -----------------------------------------------------------------------------------------

    @property
    def origin(self) -> Tensor | None:
        """Return the position that column 0 has or would have, (..., batch or 1, 1); ``None`` without positions."""
        return self._origin

    @property
    def read_lengths(self) -> tuple[Tensor, list[int]]:
        """Return how many columns of accepted tokens the cache holds for each of its rows, here and on the CPU.

        The root of the next proposal is not among them.
        """
        rows = self.slots.cache.rows
        return rows.lengths, rows.cpu_lengths

    @property
    def growing_rows(self) -> Tensor | None:
        """Return which rows of the cache still grow, (rows,); ``None`` if all do, in their order."""
        return None if self._finished is None else self._finished.rows

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def compile_config(self) -> CompileConfig | None:
        """Return, from the prefill on, how plain ``generate`` would compile this call; ``None`` if it would not."""
        return None

    @property
    def compilation(self) -> tuple[int, float]:
        """Return how many graphs were compiled since the prefill, and the seconds that took."""
        return 0, 0.0

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for the returned cache."""
        batch = len(self.slots.cache.rows.cpu_lengths)
        self.slots.keep_rows(rows, keep_finished)
        origin = self._origin
        if origin is not None and origin.shape[-2] == batch:
            self._origin = origin.index_select(-2, rows.to(origin.device))
        if self._positions is not None:
            self._positions.keep_rows(rows)

        def kept(value: Tensor) -> Tensor:
            has_rows = value.ndim > 0 and len(value) == batch
            return value.index_select(0, rows.to(value.device)) if has_rows else value

        self._step_kwargs = {name: map_tensors(value, kept) for name, value in self._step_kwargs.items()}

    def align(self) -> None:
        """Shift all rows to end in the same column, where slots hold everything and positions are given separately."""
        origin, cache = self._origin, self.slots.cache
        if not cache.rows.equal_lengths and type(self) is ModelRunner and origin is not None and cache.can_join:
            self._origin = origin - self.slots.align().to(origin.device)

    def join(self, other: ModelRunner) -> bool:
        """Append the rows of ``other``, a runner of the same model, and tell whether that was possible.

        It is not where states or arguments belong to rows, or where rows are padded.
        """
        if type(self) is not ModelRunner or any(isinstance(value, Tensor) for value in self._step_kwargs.values()):
            return False
        sizes = [len(one.slots.cache.rows.cpu_lengths) for one in (self, other)]
        if not self.slots.join(other.slots):
            return False
        if self._origin is not None and other._origin is not None:
            origins = zip((self._origin, other._origin), sizes, strict=True)
            self._origin = torch.cat([one.expand(*one.shape[:-2], size, 1) for one, size in origins], dim=-2)
        return True
