"""Run a model of transformers over forests of tokens: prefill, score, commit.

Everything this project knows about the insides of transformers is here and in ``cache.py``: masks, positions, features.
Drafts that are language models run through the same class.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function

from .cache import SlotCache, unsupported_layer

# Arguments of a model that are made anew for every forward.
PER_FORWARD = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "logits_to_keep")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class Scores:
    """What a forward says: ``logits`` (batch, nodes, vocabulary), ``features`` (batch, nodes, widths) or ``None``, and
    ``hidden_states``, one (batch, nodes, hidden) per layer, where they were asked for."""

    logits: Tensor
    features: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()

    def last(self) -> Scores:
        """Keep the last position only, as the one node that a prompt leaves to be followed."""
        features = None if self.features is None else self.features[:, -1:]
        return Scores(self.logits[:, -1:], features, tuple(state[:, -1:] for state in self.hidden_states))


@dataclass
class Block:
    """Say who sees whom among the new nodes of a forward.

    ``lengths`` (batch,) are the committed slots, ``depth`` (batch, forest) the depth of every open node, the new ones
    last, and ``ancestors`` (batch, nodes, forest) the forest as the new nodes see it. ``asked`` counts how often the
    model asked for a mask: a model that never asks would ignore the forest silently.
    """

    lengths: Tensor
    depth: Tensor
    ancestors: Tensor
    padding: Tensor | None
    width: int
    asked: int = 0

    @cached_property
    def _node(self) -> Tensor:
        """Which open node stands in a column, negative for committed ones: (batch, columns)."""
        return torch.arange(self.width, device=self.lengths.device) - self.lengths[:, None]

    @cached_property
    def query(self) -> Tensor:
        """The logical column of each new node, (batch, nodes)."""
        return self.lengths[:, None] + self.depth[:, -self.ancestors.shape[1] :]

    @cached_property
    def column(self) -> Tensor:
        """The logical column of each slot: itself in the text, the depth behind the text in the forest."""
        node = self._node
        depth = self.depth.gather(1, node.clamp(0, self.depth.shape[1] - 1))
        return torch.where(node < 0, node, depth) + self.lengths[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """History, but for the left padding, and ancestors: (batch, nodes, columns) bool."""
        node = self._node[:, None, :].expand(-1, self.ancestors.shape[1], -1)
        forest = self.ancestors.gather(2, node.clamp(0, self.depth.shape[1] - 1))
        seen = torch.where(node < 0, True, forest & (node < self.depth.shape[1]))
        if self.padding is not None:
            seen[:, :, : self.padding.shape[1]] &= self.padding[:, None, :]
        return seen

    def mask_function(self, inner: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
        """Let the model's own ``inner(batch, head, query, key)`` judge logical columns, then hide what is hidden."""

        def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if key.ndim == 0:  # the host maps over single indices
                seen = self.visible[batch, query, key]
                return seen & inner(batch, head, self.query[batch, query], self.column[batch, key])
            visible = self.visible[:, None, :, first:]  # (batch, 1, nodes, columns)
            if inner is causal_mask_function:  # implied: history and ancestors are never later
                return visible
            return visible & inner(batch, head, self.query[:, None, :, None], self.column[:, None, None, first:])

        return function


_block: ContextVar[Block | None] = ContextVar("hf_spec_block", default=None)


def _hook_masks(implementation: str) -> None:
    """Wrap the host's mask function once; without an open block the wrapper passes every call through."""
    original = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    if getattr(original, "_hf_spec", False):
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        block = _block.get()
        if block is None:
            return original(*args, **kwargs)
        block.asked += 1
        if implementation.startswith("flash"):  # takes no custom mask: only chains of one row come here
            return None
        function = block.mask_function(kwargs["mask_function"], kwargs["kv_offset"])
        changed = {"mask_function": function, "attention_mask": None, "q_offset": 0, "allow_is_causal_skip": False}
        return original(*args, **{**kwargs, **changed})

    mask._hf_spec = True  # type: ignore[attr-defined]
    mask._hf_spec_original = original  # type: ignore[attr-defined]
    AttentionMaskInterface.register(implementation, mask)


def unhook_masks() -> None:
    """Give the host back its own mask functions."""
    for name, function in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        if getattr(function, "_hf_spec", False):
            AttentionMaskInterface.register(name, function._hf_spec_original)


@dataclass
class _PrefillRecord:
    """What the forwards of a prefill, which the host may run in chunks, leave behind."""

    position: Tensor | None = None
    features: list[Tensor] = field(default_factory=list)


class TargetRunner:
    """Hold one model's text for one ``generate`` call and score guesses that may follow it."""

    def __init__(
        self, model: PreTrainedModel, feature_layers: Sequence[int] = (), hidden_states: bool = False
    ) -> None:
        self.model = model
        self.feature_layers = tuple(feature_layers)
        self.wants_hidden_states = hidden_states
        self.cache: SlotCache
        self._host_cache: DynamicCache
        self._padding: Tensor | None = None  # (batch, prompt) bool, False at left padding
        self._last_position: Tensor | None = None  # (..., batch or 1, 1) position of the prompt's last token
        self._prompt_slots = 0
        self._step_kwargs: dict[str, Any] = {}
        self._open_depth: Tensor | None = None  # (batch, open nodes)
        _hook_masks(model.config.get_text_config(decoder=True)._attn_implementation)

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Scores:
        """Read the prompt the host's way and score its last token; the features cover the whole prompt."""
        if self.wants_hidden_states or self.feature_layers:
            model_kwargs["output_hidden_states"] = self.wants_hidden_states or list(self.feature_layers)
        with self._recording() as record:
            outputs = self.model._prefill(input_ids, generation_config, model_kwargs)
        self._start(outputs.past_key_values, outputs.logits.shape[0], outputs.logits.device, model_kwargs)
        self._last_position = record.position
        features = torch.cat(record.features, dim=1) if record.features else None
        return Scores(outputs.logits[:, -1:], features, self._hidden_states(outputs))

    def prefill_tokens(self, input_ids: Tensor, attention_mask: Tensor) -> Scores | None:
        """Read a prompt outside ``generate``; ``None`` if it is empty, so that there is nothing to score."""
        model = self.model
        mask = None if bool(attention_mask.all()) else attention_mask
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        kwargs: dict[str, Any] = {"past_key_values": cache, "attention_mask": mask, "use_cache": True}
        if takes_positions := "position_ids" in inspect.signature(model.forward).parameters:
            known = {"attention_mask": attention_mask}
            kwargs["position_ids"] = model._prepare_position_ids_for_generation(input_ids, known)
        if input_ids.shape[1] == 0:
            self._start(cache, input_ids.shape[0], input_ids.device, {"use_cache": True})
            self._last_position = input_ids.new_full((1, 1), -1) if takes_positions else None
            return None
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        return self.prefill(input_ids, GenerationConfig(), kwargs)

    def _start(self, cache: DynamicCache, batch: int, device: torch.device, model_kwargs: dict[str, Any]) -> None:
        self._host_cache = cache
        self.cache = SlotCache.adopt(cache, batch, device)
        self._prompt_slots = self.cache.rows.longest
        mask = model_kwargs.get("attention_mask")
        self._padding = None if mask is None else mask.to(device, torch.bool)
        skipped = (*PER_FORWARD, *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        self._step_kwargs = {name: value for name, value in model_kwargs.items() if name not in skipped}

    def _hidden_states(self, outputs: Any) -> tuple[Tensor, ...]:
        return tuple(outputs.hidden_states) if self.wants_hidden_states else ()

    def _features(self, outputs: Any) -> Tensor | None:
        if not self.feature_layers:
            return None
        states = [outputs.hidden_states[layer] for layer in self.feature_layers]
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[_PrefillRecord]:
        """Note the positions and features of every forward of a prefill."""
        record = _PrefillRecord()

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            position = kwargs.get("position_ids")
            record.position = None if position is None else position[..., -1:]

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            if (features := self._features(outputs)) is not None:
                record.features.append(features)

        hooks = [
            self.model.register_forward_pre_hook(before, with_kwargs=True),
            self.model.register_forward_hook(after),
        ]
        try:
            yield record
        finally:
            for hook in hooks:
                hook.remove()

    # -- the forest ---------------------------------------------------------------------------------------------------

    def extend(self, tokens: Tensor, ancestors: Tensor) -> Scores:
        """Add ``tokens`` (batch, nodes) to the open forest and score them, all rows in one forward.

        ``ancestors`` (batch, nodes, forest) bool tells which nodes of the forest, these new ones last, lie on the path
        to each new node, itself included. A node without ancestors but itself follows the committed text.
        """
        rows = self.cache.rows
        tokens, ancestors = tokens.to(rows.lengths.device), ancestors.to(rows.lengths.device)
        depth = ancestors.sum(-1) - 1  # (batch, nodes)
        forest_depth = depth if self._open_depth is None else torch.cat([self._open_depth, depth], dim=1)
        width = rows.longest + rows.open + tokens.shape[1]
        block = Block(rows.lengths, forest_depth, ancestors, self._padding, width)
        token = _block.set(block)
        try:
            outputs = self.model(**self._inputs(tokens, depth, width), return_dict=True)
        finally:
            _block.reset(token)
        if not block.asked:
            raise ValueError(
                f"{type(self.model).__name__} builds its attention masks without transformers.masking_utils, so it "
                "cannot look at a tree or at rows of different lengths. Generate without `speculator`."
            )
        self._open_depth = forest_depth
        rows.open += tokens.shape[1]
        return Scores(outputs.logits, self._features(outputs), self._hidden_states(outputs))

    def _inputs(self, tokens: Tensor, depth: Tensor, width: int) -> dict[str, Any]:
        """Build the arguments of a forward over new nodes (batch, nodes)."""
        inputs = {**self._step_kwargs, "input_ids": tokens, "past_key_values": self.cache}
        if self._padding is not None:
            inputs["attention_mask"] = nn.functional.pad(
                self._padding.long(), (0, width - self._padding.shape[1]), value=1
            )
        if self._last_position is not None:
            advance = 1 + self.cache.rows.lengths[:, None] - self._prompt_slots + depth  # (batch, nodes)
            inputs["position_ids"] = self._last_position + advance
        for name in TOKEN_TYPES:
            if (types := inputs.get(name)) is not None:  # new tokens are text, of the prompt's last type
                last = types[:, -1:] if name == "token_type_ids" else torch.zeros_like(types[:, -1:])
                inputs[name] = last.expand_as(tokens)
        return inputs

    def commit(self, path: Tensor, counts: Sequence[int], in_place: bool = False) -> None:
        """Make ``counts[b]`` nodes of ``path[b]`` (batch, m) text, and forget the rest of the forest.

        ``in_place``: the forest is a chain, so that every path stands where it belongs.
        """
        self.cache.commit(path.to(self.cache.rows.lengths.device), counts, in_place)
        self._open_depth = None

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; ``keep_finished`` saves the others for ``release``."""
        batch = len(self.cache.rows.host_lengths)
        self.cache.keep_rows(rows, keep_finished)
        if self._padding is not None:
            self._padding = self._padding.index_select(0, rows)
        position = self._last_position
        if position is not None and position.shape[-2] == batch:
            self._last_position = position.index_select(-2, rows)
        self._step_kwargs = {
            name: value.index_select(0, rows.to(value.device)) if _has_rows(value, batch) else value
            for name, value in self._step_kwargs.items()
        }

    @property
    def cache_is_the_users(self) -> bool:
        """Tell whether the user handed the cache in, and so expects the text in it."""
        return bool(getattr(self._host_cache, "_is_user_defined", False))

    def release(self, committed: int) -> DynamicCache:
        """Give the host's cache back with the prompt and at most ``committed`` tokens of every row."""
        self.cache.release(self._host_cache, self._prompt_slots + committed)
        return self._host_cache


def _has_rows(value: object, batch: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch


def why_unsupported(model: PreTrainedModel, cache: object) -> str | None:
    """Say why ``model`` with the host's ``cache`` cannot be scored over slots, or return ``None`` if it can."""
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} keeps a recurrent state, which cannot take rejected guesses back"
    if cache is None:
        return f"{type(model).__name__} keeps no key-value cache of transformers"
    if (layer := unsupported_layer(cache)) is not None:
        return f"the cache of {type(model).__name__} is {layer}, not a DynamicCache of attention layers"
    return None
