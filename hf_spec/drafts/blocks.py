"""Drafts that propose a block of tokens in one forward (DFlash, arXiv 2602.06036): what all kinds of them share.

The text is *context*: for every position before the root, each layer of the draft keeps a key and a value, made from
the target's features alone. The root and the mask tokens after it form a *block* of slots, which see the context and
each other::

    context   g0  g1  g2  g3 │ x4  [mask]  [mask]  [mask]        root x4 at position 4; its feature is not known yet
    position   0   1   2   3 │  4     5       6       7
    predicts                 │ x5    x6      x7      x8          ``sample_from_anchor``: each slot the next token
                             │       x5      x6      x7          otherwise its own token, and the root's slot nothing

Context grows with the text and is never recomputed: a feature passes one projection, and two more per layer. The keys
of a block depend on its mask tokens, so they are dropped after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from ..configuration import GEMMA, check_positive, default_speculators_config, one_layer
from ..policy.cost import ModelShape, shape_of
from ..scoring.cache import TreeKVCache
from ..settings import is_int
from ..versions import SubConfigSpec
from .base import DraftOutput
from .block_drafting import BlockDrafter, BlockGrowth
from .features import FeatureSpeculatorConfig, check_mask_token
from .layers import classes_of
from .modeling import DraftModel, softcapped

if TYPE_CHECKING:
    from ..unroll.feedback import Unrolled, UnrollInput

BLOCK_FLAGS = ("sample_from_anchor", "sliding_window_non_causal", "sliding_window_per_slot", "block_causal")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
UNLESS_DEFAULT = (
    "block_causal",
    "scored_as_target",
    "embeds_as_target",
    *SCALES,
)  # fields that only hf_spec knows, written where they say something


class BlockSpeculatorConfig(FeatureSpeculatorConfig):
    """The config of a draft that proposes a block at a time, with the flags of the speculators library, all saved.

    Args:
        aux_hidden_state_layer_ids: which ``hidden_states[i]`` of the target are read, in the order of the columns of
            ``fc``. The number of layers means the last one *before* the final norm. ``None``: ``[2, n // 2, n - 3]``.
        block_size: slots of a block: the root and ``block_size - 1`` mask tokens.
        mask_token_id: the input token of slots that are to be predicted; it must never occur in text.
        sample_from_anchor: every slot predicts the token after its own, ``block_size`` in all. ``False``: slots
            predict their own token, and the root's slot none.
        sliding_window_non_causal: in sliding layers, slots of a block see each other as in full ones, and not only
            earlier slots. Without a ``sliding_window``, sliding layers see all of the context. Then this field must
            be ``True``, or ``sliding_window_per_slot``.
        sliding_window_per_slot: a window ends at the slot that attends. ``False``: all slots of a block see the
            ``sliding_window`` positions before the root, as the speculators library trains. Only hf_spec knows this
            flag.
        block_causal: in every layer, slots of a block see earlier slots only (JetSpec, arXiv 2606.18394). Such a block
            may end anywhere: its first slots stay the same.
        input_embedding_scale: the embeddings of root and mask tokens are multiplied by it.
        embeds_as_target: ``bind`` sets ``input_embedding_scale`` to what the target multiplies its embeddings by, as
            Gemma does (JetSpec).
        output_multiplier: the logits are multiplied by it.
        final_logit_softcapping: then they are capped, ``cap * tanh(logits / cap)``. ``None`` for no cap.
    """

    method: ClassVar[str] = "a block draft"
    layer_ids_field: ClassVar[str] = "aux_hidden_state_layer_ids"
    flags: ClassVar[tuple[str, ...]] = BLOCK_FLAGS
    layer_model_types: ClassVar[tuple[str, ...]] = ("qwen3", GEMMA)
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "transformer_layer_config": SubConfigSpec(AutoConfig, "qwen3", {"num_hidden_layers": 5})
    }

    aux_hidden_state_layer_ids: list[int] | None = None
    block_size: int = 8
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    sliding_window_per_slot: bool = False
    block_causal: bool = False
    input_embedding_scale: float = 1.0
    embeds_as_target: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def scales(self) -> dict[str, float]:
        """Return those of ``SCALES`` that change something, by name."""
        return {name: value for name in SCALES if (value := getattr(self, name)) not in (None, 1.0)}

    @property
    def num_draft_tokens(self) -> int:
        """Count the draft tokens of a block."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def num_speculative_tokens(self) -> int:
        return min(self.num_draft_tokens, super().num_speculative_tokens)

    def describe(self) -> dict[str, str]:
        window = getattr(self.layers, "sliding_window", None) if "sliding_attention" in self.layer_kinds else None
        more = {"blocks": f"{self.num_draft_tokens} draft tokens per block, mask token {self.mask_token_id}"}
        return super().describe() | more | ({} if window is None else {"window": str(window)})

    @property
    def layer_kinds(self) -> list[str]:
        """Name the kind of each layer."""
        kinds: list[str] | None = getattr(self.layers, "layer_types", None)
        return kinds or ["full_attention"] * self.layers.num_hidden_layers

    @classmethod
    def for_target(cls, target: PreTrainedConfig, layers: dict[str, Any] | None = None, **flags: Any) -> Any:
        text = target.get_text_config()
        layer = one_layer(text)
        heads = getattr(layer, "num_attention_heads", None) or max(1, text.hidden_size // 64)
        shape: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 5}
        if not getattr(layer, "head_dim", None):
            shape["head_dim"] = text.hidden_size // heads
        shape |= layers or {}
        if shape.get("hidden_size", text.hidden_size) == text.hidden_size:  # share the target's embeddings and head
            whole = not (is_int(size := flags.get("draft_vocab_size")) and size < text.vocab_size)
            flags.setdefault("shared_with_target", ["embed_tokens"] + ["lm_head"] * whole)
        if not flags.get("block_causal") and "sliding_attention" not in (shape.get("layer_types") or ()):
            flags.setdefault("sliding_window_non_causal", True)  # vLLM takes False for causal blocks in every layer
        config = super().for_target(target, shape, **flags)
        if "speculators_config" not in flags:
            config._default_method()["speculative_tokens"] = config.num_draft_tokens
        return config

    def _fill_in(self) -> None:
        super()._fill_in()
        if (
            self.speculators_config == default_speculators_config(self.speculators_model_type)
            and self.num_draft_tokens
        ):
            self._default_method()["speculative_tokens"] = self.num_draft_tokens

    def to_diff_dict(self) -> dict[str, Any]:
        """Write the fields that other readers do not know only where they say something."""
        plain = {field.name: field.default for field in fields(self)}
        config = super().to_diff_dict()
        return {name: value for name, value in config.items() if name not in UNLESS_DEFAULT or value != plain[name]}

    def validate(self) -> None:
        if not (is_int(self.block_size) and self.block_size >= 1):
            raise ValueError(f"block_size is {self.block_size!r}; set a whole number of slots, the root's included")
        super().validate()
        if self.num_draft_tokens < 1:
            raise ValueError(
                "block_size is 1, and the root's slot predicts nothing; set at least 2, or sample_from_anchor=True"
            )
        check_mask_token(self.mask_token_id, self.layers.vocab_size)
        if self.block_causal and self.sliding_window_non_causal:
            raise ValueError(
                "block_causal and sliding_window_non_causal are both True: slots see earlier slots only, or all of "
                "them; set one to False"
            )
        for name in SCALES:
            check_positive(name, getattr(self, name))

    def _check_window(self, kinds: list[str]) -> None:
        """Allow sliding layers without a window, which see all of the context, if it is clear how the block is seen.

        z-lab's files, which have ``sliding_window_per_slot`` here, mean that slots see earlier ones only.
        """
        window = getattr(self.layers, "sliding_window", None)
        if "sliding_attention" not in kinds:
            return
        if window is not None and not (is_int(window) and window >= 1):
            raise ValueError(f"transformer_layer_config.sliding_window is {window!r}; set at least 1, or None")
        says_how = self.block_causal or self.sliding_window_non_causal or self.sliding_window_per_slot
        if window is None and not says_how:
            raise ValueError(
                "transformer_layer_config.sliding_window is not set, but a layer is sliding_attention. speculators "
                "lets slots of such layers see the whole block, vLLM earlier slots only. Set it. If there is none, "
                "set sliding_window_non_causal to true for a draft that speculators trained, and "
                "sliding_window_per_slot to true for one whose slots see earlier ones only"
            )


class BlockDraftModel(DraftModel):
    """A block draft; ``forward`` returns the logits of each slot, independent of the other draft tokens."""

    config: BlockSpeculatorConfig
    needs_anchors = True
    drafter_class = BlockDrafter
    growth: ClassVar[type[BlockGrowth]] = BlockGrowth  # the distributions of a block after the root and each node
    _supports_flash_attn = _supports_flex_attn = False  # few slots, and another mask in each step

    def __init__(self, config: BlockSpeculatorConfig) -> None:
        super().__init__(config, config.draft_vocab_size or config.layers.vocab_size)
        layers: Any = config.layers
        layer, _, norm, _ = classes_of(layers.model_type)
        self.layers = nn.ModuleList(layer(layers, i) for i in range(layers.num_hidden_layers))
        self.fc = nn.Linear(config.num_features * config.feature_size, layers.hidden_size, bias=False)
        self.hidden_norm = norm(layers.hidden_size, eps=layers.rms_norm_eps)
        self.norm = norm(layers.hidden_size, eps=layers.rms_norm_eps)

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List one forward, in which each layer also computes keys of the context: as many operators as a layer's."""
        shape = shape_of(self)
        shapes = [replace(shape, layers=2 * shape.layers - 1)]  # one of them is the head
        return lambda length: shapes * min(length, 1)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        num_draft_tokens: int | None = None,
    ) -> DraftOutput:
        """Draft a block after each of the roots ``input_ids`` (batch, blocks).

        ``features`` (batch, length, features x target width) are context that ``past_key_values`` does not hold yet,
        up to the position before the root. ``hidden_states`` are the same after ``fuse``. ``attention_mask`` (batch,
        context) is 0 where context is padding, or a dict of masks by kind of layer. ``position_ids`` (batch, blocks)
        are those of the roots. Blocks have ``config.num_draft_tokens`` draft tokens, or ``num_draft_tokens`` if that
        is fewer.

        Returns logits (batch, blocks x draft tokens, draft vocabulary), the hidden states of all slots, (batch, blocks
        x slots, hidden), and the cache with the context. Several blocks need masks that hide them from each other.
        """
        cache = self.new_cache(len(input_ids), input_ids.device) if past_key_values is None else past_key_values
        if features is not None:
            hidden_states = self.fuse(features)
        if hidden_states is not None and hidden_states.shape[1]:
            self.remember(hidden_states, cache, attention_mask)
            cast(TreeKVCache, cache).commit(input_ids[:, :0], [hidden_states.shape[1]] * len(input_ids), in_place=True)
        count = min(num_draft_tokens or self.config.num_draft_tokens, self.config.num_draft_tokens)
        unused = int(not self.config.sample_from_anchor)
        slots = torch.arange(count + unused, device=input_ids.device)
        if position_ids is None:
            position_ids = self._next_positions(cast(TreeKVCache, cache), attention_mask)
        if not isinstance(attention_mask, dict):
            attention_mask = self._block_masks(cast(TreeKVCache, cache), len(slots), attention_mask)
        tokens = input_ids[:, :, None].repeat(1, 1, len(slots))  # (batch, blocks, slots)
        tokens[:, :, 1:] = cast(int, self.config.mask_token_id)
        positions = (position_ids[:, :, None] + slots).flatten(1)  # (batch, blocks x slots)
        hidden = self.decode(self.embed(tokens.flatten(1)), (), positions, attention_mask, cache)
        hidden = self.norm(hidden)
        predicting = hidden.unflatten(1, (-1, len(slots)))[:, :, unused:].flatten(1, 2)
        return DraftOutput(self.logits(predicting), hidden, cache)

    def bind(self, target: PreTrainedModel) -> None:
        super().bind(target)
        if self.config.embeds_as_target and "embed_tokens" in (self.config.shared_with_target or ()):
            embeddings: Any = target.get_input_embeddings()
            scale = torch.tensor(getattr(embeddings, "scalar_embed_scale", 1.0), dtype=embeddings.weight.dtype)
            self.config.input_embedding_scale = float(scale)  # rounded as the target rounds it

    def embed(self, input_ids: Tensor) -> Tensor:
        embeds, scale = super().embed(input_ids), self.config.input_embedding_scale
        return embeds if scale == 1 else embeds * scale

    def logits(self, hidden: Tensor) -> Tensor:
        logits, factor = super().logits(hidden), self.config.output_multiplier
        return softcapped(logits if factor == 1 else logits * factor, self.config.final_logit_softcapping)

    # -- context ------------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Project the target's ``features`` (batch, length, features x width) to what all layers read."""
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def remember(self, context: Tensor, cache: Any, attention_mask: Tensor | None = None) -> None:
        """Write the keys and values of fused features ``context`` (batch, length, hidden) after what ``cache`` holds.

        The caller commits as many as each row has. ``attention_mask``: see ``forward``.
        """
        rotary = self.rotary_emb(context, self._next_positions(cache, attention_mask, context.shape[1]))
        self.write_context(context, rotary, cache)

    def write_context(self, context: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> None:
        """Write keys and values of ``context`` (batch, length, hidden), rotated by ``rotary``, into every layer."""
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*context.shape[:2], -1, attention.head_dim)
            keys = attention.k_proj(context).view(shape)
            values = keys if attention.v_proj is None else attention.v_proj(context).view(shape)
            if hasattr(attention, "v_norm"):  # Gemma's
                values = attention.v_norm(values)
            keys = attention.k_norm(keys).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys[:, :0], keys, *rotary)
            cache.update(keys, values.transpose(1, 2), attention.layer_idx)

    def new_cache(self, batch: int, device: torch.device) -> TreeKVCache:
        """Make an empty cache for the context of ``batch`` rows."""
        window = getattr(self.layer_config, "sliding_window", None)
        if window is not None and not self.config.sliding_window_per_slot:
            window += 1  # transformers counts the root itself; here the window is before the root
        empty = DynamicCache()
        empty.layers = [
            DynamicSlidingWindowLayer(window) if window and kind == "sliding_attention" else DynamicLayer()
            for kind in self.config.layer_kinds
        ]
        return TreeKVCache.adopt(empty, batch, device)

    def _next_positions(self, cache: TreeKVCache, attention_mask: Tensor | None, count: int = 1) -> Tensor:
        """Return the next positions after the context of each row, (batch, count); padding has no position."""
        before = cache.rows.lengths[:, None]
        positions = before + torch.arange(count, device=before.device)
        if isinstance(attention_mask, Tensor):
            positions = positions - (attention_mask == 0).sum(1, keepdim=True)
        return positions.clamp(min=0)

    # -- masks --------------------------------------------------------------------------------------------------------

    def _block_masks(self, cache: TreeKVCache, slots: int, padding: Tensor | None) -> dict[str, Any]:
        """Return the masks of one block per row after the context, by kind of layer."""
        config = self.layer_config
        masks: dict[str, Any] = {}
        for layer, kind in enumerate(self.config.layer_kinds):
            if kind in masks:
                continue
            length, first = cache.get_mask_sizes(slots, layer)
            seen = self.seen(
                cache.rows.lengths, slots, first + torch.arange(length, device=cache.rows.lengths.device), kind
            )
            if padding is not None:
                known = padding.to(seen.device, torch.bool)[:, first:]
                seen = seen & functional.pad(known, (0, length - known.shape[1]), value=True)[:, None]
            masks[kind] = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
                batch_size=len(seen),
                q_length=slots,
                kv_length=length,
                mask_function=lambda batch, head, query, key, seen=seen: seen[batch, query, key],
                attention_mask=None,
                allow_is_causal_skip=False,
                dtype=self.dtype,
                device=seen.device,
                config=config,
            )
        return masks

    def seen(self, lengths: Tensor, slots: int, column: Tensor, kind: str) -> Tensor:
        """Tell which columns of context and block each slot sees: (batch, slots, columns) bool."""
        slot = torch.arange(slots, device=column.device)[None, :, None]
        place = column - lengths[:, None, None]  # (batch, 1, columns); 0 is the root, negative is context
        seen = (place < slots).expand(-1, slots, -1)
        config, slides = self.config, kind != "full_attention"
        window: int | None = getattr(self.layer_config, "sliding_window", None)
        if config.block_causal or (slides and not config.sliding_window_non_causal):
            seen = seen & (place <= slot)
        if window is None or not slides:
            return seen
        if not config.sliding_window_per_slot:
            return seen & (place >= -window)
        return seen & ((place - slot).abs() < window)

    # -- training -----------------------------------------------------------------------------------------------------

    def unroll_steps(self, wanted: int) -> int:
        return self.config.num_draft_tokens

    def unroll(self, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
        """Draft a block after each anchor at once; step k is draft token k."""
        from ..unroll.blocks import by_position, unroll_blocks  # compiles kernels, which only training needs
        from ..unroll.feedback import Unrolled

        roots, hidden, counted = unroll_blocks(self, given, recompute)
        states = self.trained_states(hidden, given.input_ids, roots)
        laid = by_position(states, roots, counted, given.input_ids.shape[1])
        return Unrolled(
            laid,
            lambda step, states: self.trained_logits(states),
            self.trained_parameters,
            [],
            self.trained_confidence,
            self.trained_selector,
        )

    def trained_states(self, hidden: Tensor, input_ids: Tensor, roots: Tensor) -> Tensor:
        """Turn ``hidden`` (batch, blocks, slots, hidden) into the head's inputs, (batch, blocks, draft tokens, width).

        ``roots`` (batch, blocks) are indices into ``input_ids`` (batch, length), which hold the true next tokens.
        """
        return hidden[:, :, hidden.shape[2] - self.config.num_draft_tokens :]

    def trained_logits(self, states: Tensor) -> Tensor:
        """Turn trained states (..., width) into logits (..., draft vocabulary)."""
        return self.logits(states)

    @property
    def trained_confidence(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function from trained states to the confidence's logit (...); None if there is no such head."""
        return None

    @property
    def trained_selector(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Return the function ``selector`` of ``Unrolled``; None if there is no selector."""
        return None

    # -- drafting -----------------------------------------------------------------------------------------------------

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return self.config.feature_layers(target.config.get_text_config().num_hidden_layers)
