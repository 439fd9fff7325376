"""Score over a static cache, with the model compiled where plain ``generate`` would compile it.

A graph is compiled for each combination of batch size, nodes and slots. The batch is padded to 1, 2, 4, ... rows, see
``static.py``. Nodes are 1, those of a complete proposal, or else a power of two. Slots are powers of two. Masks,
positions and the slots of new nodes are computed outside and passed in, so that none of them causes a recompilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from ..device_tensors import to_device, to_list
from .graphs import Graphs, compiled_model, hooks_in_graphs, lasting, taking_turns, why_not_compiled
from .kept import KeptBuffers, buffers_of
from .kv_view import KVView
from .names import CACHE
from .plain import rounding_of_a_forward
from .rings import power_of_two
from .runner import ModelRunner, Scores
from .static import StaticKVView, StaticTreeKVCache
from .trials import in_evaluation

logger = logging.get_logger(__name__)

_not_compiled: WeakKeyDictionary[PreTrainedModel, set[Hashable]] = WeakKeyDictionary()  # by model, ways that failed
_masks_tried: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


class StaticCacheRunner(ModelRunner):
    """A runner over a ``StaticCache``: one forward of fixed shape between two commits.

    ``widest`` is the number of nodes of a complete proposal, if that is always the same.
    """

    slots: StaticKVView

    def __init__(
        self,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        hidden_states: bool = False,
        widest: int | None = None,
    ) -> None:
        super().__init__(model, feature_layers, hidden_states)
        self.compiled: CompiledForward | None = None  # from the prefill on, if the model is to be compiled
        self._kept = KeptBuffers()
        self._widest = widest or 1
        self._numbers: list[int] = []  # batch indices of the unfinished rows

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Scores:
        """Read the prompt by transformers' own prefill and score its last token; the features cover all of it."""
        if self.model._valid_auto_compile_criteria(model_kwargs, generation_config):
            self.compiled = CompiledForward(self.model, generation_config.compile_config, self.features.watched)
        with self._turn():  # a forward compiled meanwhile in another thread would run this prompt's hooks
            return super().prefill(input_ids, generation_config, model_kwargs)

    def verifies_with_prompt(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        """Return False: over a static cache a prompt is read as plain ``generate`` reads it."""
        return False

    def _slots_over(self, cache: Any, batch: int, device: torch.device, padding: Tensor | None, nodes: int) -> KVView:
        if self.compiled is not None:
            self._kept = buffers_of(self.model, self.compiled.config, device)
        slots = StaticTreeKVCache.adopt(cache, batch, device, self._widest, self.most_new_tokens, self._kept)
        return StaticKVView(slots, cache, padding, self.most_new_tokens)

    def _start(self, cache: Any, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._numbers = list(range(batch))
        self._place(self._numbers)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _place(self, indices: list[int]) -> None:
        """Keep the rows at these batch ``indices``, in a batch that is as small as possible."""
        slots, before = self.slots, len(self.slots.cache.rows.cpu_lengths)
        size = power_of_two(len(indices))
        if size != before:
            super().keep_rows(to_device(indices + indices[:1] * (size - len(indices)), slots.device))
            indices = list(range(len(indices)))
        slots.place(indices)

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for the returned cache."""
        kept = to_list(rows)
        if keep_finished:
            self._save(set(range(len(self._numbers))) - set(kept))
        self._numbers = [self._numbers[i] for i in kept]
        self._place([self.slots.indices[i] for i in kept])

    @property
    def growing_rows(self) -> Tensor | None:
        rows = super().growing_rows
        if self.slots.row_at_index is None:
            return rows
        return self.slots.index_of_row if rows is None else self.slots.index_of_row.index_select(0, rows)

    @property
    def compile_config(self) -> CompileConfig | None:
        return None if self.compiled is None else self.compiled.config

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.compiled is None else taking_turns

    @property
    def compilation(self) -> tuple[int, float]:
        """Return how many graphs were compiled since the prefill, and the seconds that took."""
        return (0, 0.0) if self.compiled is None else (self.compiled.graphs.made, self.compiled.graphs.seconds)

    def free_buffers(self) -> None:
        self._kept.free()

    def _save(self, rows: Iterable[int]) -> None:
        for i in rows:
            self.slots.cache.save(self.slots.indices[i], self._numbers[i])

    def release(self, committed: int) -> Cache | None:
        """Return transformers' cache with the prompt and at most ``committed`` tokens of every row."""
        self._save(range(len(self._numbers)))
        return super().release(committed)

    def abandon(self, committed: int) -> None:
        """Write back to transformers' cache, in the middle of a call, what all rows have committed.

        The sliding windows of a row that is ahead of others may have lost older columns. Then the cache is restored to
        its state before the prompt instead.
        """
        if len(set(self.slots.lengths)) > 1 and any(layer.window for layer in self.slots.cache.slot_layers):
            self.restore_prompt_cache()
        else:
            super().abandon(committed)

    # -- draft nodes --------------------------------------------------------------------------------------------------

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None, depth: int | None = None) -> Scores:
        """Score ``tokens`` (rows, nodes) after the committed ones, in a forward padded to a fixed shape."""
        count = tokens.shape[1]
        width = self._widest if 1 < count <= self._widest else power_of_two(count)
        self.slots.cache.make_room(width)
        tokens, ancestors = _filled(tokens.to(self.slots.device), ancestors, width)
        if (rows := self.slots.row_at_index) is not None:
            tokens = tokens.index_select(0, rows)
            ancestors = None if ancestors is None else ancestors.to(rows.device).index_select(0, rows)
        with self._turn():
            scores = super().extend(tokens.clone(memory_format=torch.contiguous_format), ancestors, depth)
            if self.compiled is not None:
                scores = scores.each(lasting)  # another thread may run the graph next
        if count < width:
            scores = scores.each(lambda states: states[:, :count])
        return scores if rows is None else scores.of(self.slots.index_of_row)

    def _of_these_rows(self, count: int) -> list[int]:
        rows = self.slots.row_at_index
        return [self._numbers[row] for row in (range(count) if rows is None else to_list(rows))]

    def _forward(self, inputs: dict[str, Any]) -> Any:
        if self.compiled is None or self.compiled.runs_eagerly:
            return super()._forward(inputs)
        return self.compiled(inputs)


class CompiledForward:
    """A model's forward, compiled as plain ``generate`` does it, with masks made outside the graph."""

    def __init__(self, model: Any, config: CompileConfig | None, watched: Sequence[int] = ()) -> None:
        self.config: CompileConfig = config or model._default_compile_config()
        text, hooks = model.config.get_text_config(decoder=True), hooks_in_graphs(model, watched)
        self._model, self._compiled = model, compiled_model(model, self.config, hooks)
        self.graphs = Graphs(self.config)
        self._way = repr(self.config.to_dict()), hooks, text._attn_implementation, model.training, model.dtype
        self.runs_eagerly = self._way in _not_compiled.get(model, ())

    def __call__(self, inputs: dict[str, Any]) -> Any:
        """Return the outputs of a forward, which runs eagerly where compiling has failed.

        A failure is warned of once, and holds for later calls. A lack of memory is silent, and holds for this call.
        """
        inputs = {**inputs, "return_dict": True}
        try:
            masks = {**inputs, "attention_mask": self._mask(inputs)}
            if reason := self._why_masks_differ(inputs, masks):
                return self._give_up(reason, inputs)
            return self._run(masks)
        except torch.OutOfMemoryError:  # in this call: a smaller one may have room for its graphs
            self.runs_eagerly = True
        except Exception as error:  # whatever torch.compile makes of an unforeseen architecture
            return self._give_up(why_not_compiled(error), inputs)
        return self._model(**inputs)  # out here, where the error holds no memory any more

    def _run(self, inputs: dict[str, Any]) -> Any:
        with self.graphs.counted():
            torch.compiler.cudagraph_mark_step_begin()
            return self._compiled(**inputs)

    def _mask(self, inputs: dict[str, Any]) -> Any:
        """Let the model make its masks: one (batch, 1, nodes, slots), or a dict with one per layer type."""
        model, tokens = self._model, inputs["input_ids"]
        make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
        mask = make(
            config=model.config,
            inputs_embeds=torch.empty((*tokens.shape, 0), dtype=model.dtype, device=tokens.device),
            attention_mask=inputs.get("attention_mask"),
            position_ids=inputs.get("position_ids"),
            **{name: inputs.get(name) for name in (CACHE, "token_type_ids", "mm_token_type_ids")},
            is_first_iteration=False,
        )
        if isinstance(mask, dict):
            return {name: None if one is None else one.contiguous() for name, one in mask.items()}
        return mask.contiguous()

    def _why_masks_differ(self, inputs: dict[str, Any], masks: dict[str, Any]) -> str | None:
        """Say why the model cannot take masks made outside, or return ``None`` if it can; tried once, in a real step.

        The forward may be repeated: it writes the same keys and values to the same slots.
        """
        implementation = self._model.config.get_text_config(decoder=True)._attn_implementation
        tried = _masks_tried.setdefault(self._model, set())
        if implementation in tried:
            return None
        given = masks["attention_mask"]
        if isinstance(given, Tensor) and given.ndim != 4:
            return "it makes its attention masks inside its forward"
        try:
            with in_evaluation(self._model):  # no two forwards agree with dropout
                asked = self._model(**inputs).logits.float()  # (batch, nodes, vocabulary)
                difference = (self._model(**masks).logits.float() - asked).abs().max() / asked.std()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it takes no masks made outside its forward ({error})"
        if not difference <= rounding_of_a_forward(self._model.dtype):
            return "it does something else with masks made outside its forward"
        tried.add(implementation)
        return None

    def _give_up(self, reason: str, inputs: dict[str, Any]) -> Any:
        outputs = self._model(**inputs)  # fails too if it is not the compiler that failed
        _not_compiled.setdefault(self._model, set()).add(self._way)
        self.runs_eagerly = True
        logger.warning(
            f"{type(self._model).__name__} is not compiled for scoring draft tokens, but runs as it is: {reason}."
        )
        return outputs


def _filled(tokens: Tensor, ancestors: Tensor | None, width: int) -> tuple[Tensor, Tensor | None]:
    """Pad ``tokens`` (rows, nodes) to ``width`` nodes; the added ones see themselves alone."""
    count = tokens.shape[1]
    missing = width - count
    if not missing:
        return tokens, ancestors
    tokens = torch.cat([tokens, tokens[:, :1].expand(-1, missing)], dim=1)
    if ancestors is not None:
        alone = torch.eye(width, dtype=torch.bool, device=ancestors.device).repeat(len(tokens), 1, 1)
        alone[:, :count, :count] = ancestors
        ancestors = alone
    return tokens, ancestors
