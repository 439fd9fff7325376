"""Multi-token-prediction layers (arXiv 2404.19737, 2412.19437): a decoder layer beside the target's state.

A layer reads a token beside the target's hidden state of the position before, both normed and projected together, and
guesses the token after it with the target's head. It was trained for one guess, or for as many as there are layers;
fed its own output it goes on from there::

    token ─ embed ─ norm ─┐
                          ├─ projection ─ decoder layer ─ norm ─ target's head
    state ───────── norm ─┘                             └──┴── fed back

``TargetMtp`` runs the layers that transformers loads for a target, ``MTPDraftModel`` one of any origin.
"""

from __future__ import annotations

import copy
import re
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import MtpModel

from ...configuration import SpeculationConfig
from ...scoring.architectures import why_unsupported
from ..base import Drafter, Request, Speculator
from ..feedback import FeedbackDrafter
from ..modeling import MASKS, DraftModel, DraftOutput, next_positions, only_one
from .configuration import MTPSpeculatorConfig

# Families whose layers are fed what they give before their last norm (as vLLM 0.33 does); others, after it.
FED_BEFORE_NORM = ("glm4_moe",)

# The mask of the running forward, on its way past transformers to where masks are made; every thread has its own.
_padding: ContextVar[Tensor | None] = ContextVar("hf_spec_mtp_padding", default=None)


class TargetMtp(MtpModel, Speculator):
    """Guess with a target's own MTP layers, as transformers reads them from the target's checkpoint."""

    feeds_normed: bool

    def __init__(self, target: PreTrainedModel, num_mtp_layers: int) -> None:
        super().__init__(target, num_mtp_layers)
        self.feeds_normed = self.config.model_type not in FED_BEFORE_NORM
        for layer in cast(Any, self.layers):
            layer.use_post_norm = False  # applied below: what is fed back may need to pass it by

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetMtp:
        """Read the MTP layers of ``target`` from where it was loaded from; a ValueError says why it cannot."""
        config = target.config.get_text_config(decoder=True)
        if not getattr(config, "num_mtp_layers", None):
            raise ValueError(
                f"{type(target).__name__} has no multi-token-prediction layers (num_mtp_layers is not set in its "
                "config); use another speculator, for example 'ngram'"
            )
        try:
            cache = DynamicCache(config=config.get_mtp_config())
        except ValueError as error:
            raise ValueError(
                f"the config of {type(target).__name__} counts MTP layers but does not say what they are ({error}); "
                "complete its config.json, or use another speculator"
            ) from error
        if (reason := why_unsupported(target, cache)) is not None:
            raise ValueError(f"the MTP layers of {type(target).__name__} cannot be a draft: {reason}")
        device = next(target.get_decoder().layers[-1].parameters()).device
        try:
            draft: Any = cls.from_pretrained(target, device_map={"": device})
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"the MTP layers of {type(target).__name__} are not in {target.name_or_path or 'any checkpoint'!r}, "
                f"which it was loaded from ({error}); use a checkpoint that has them, or another speculator"
            ) from error
        return cast(TargetMtp, draft.eval())

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """Recognise MTP layers behind any number of decoder layers: transformers knows those of published sizes."""
        config = main_model.config.get_text_config(decoder=True)
        first = config.num_hidden_layers
        patterns = list(getattr(main_model, "_keys_to_ignore_on_load_unexpected", None) or ())
        patterns = [pattern for pattern in patterns if not re.search(r"layers\\?\.\d", pattern)]
        numbers = "|".join(str(first + i) for i in range(config.num_mtp_layers))
        return re.compile("|".join([*(f"({pattern})" for pattern in patterns), rf"(\blayers\.({numbers})\.)"]))

    @property
    def layer_config(self) -> PreTrainedConfig:
        """Return the config that the layers, their masks and their cache are made from."""
        return self.config

    @property
    def num_readers(self) -> int:
        """Count the layers."""
        return len(self.layers)

    def forward(  # type: ignore[override]  # called as every draft is
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
        reader: int = 0,
    ) -> DraftOutput:
        """Take one step of layer ``reader``, as ``EagleDraftModel.forward``."""
        position_ids = next_positions(input_ids, past_key_values) if position_ids is None else position_ids
        state = only_one(features, hidden_states)
        token = _padding.set(attention_mask)
        try:
            hidden = self.forward_layer(reader, state, position_ids, cast(Any, past_key_values), input_ids=input_ids)
        finally:
            _padding.reset(token)
        norm = cast(Any, self.layers[reader]).post_norm
        normed = hidden if norm is None else norm(hidden)  # (batch, length, hidden)
        logits = self._project_to_logits(normed[:, -logits_to_keep:])
        return DraftOutput(logits, normed if self.feeds_normed else hidden, past_key_values)

    def create_masks_for_mtp_layer(
        self, layer_idx: int, inputs_embeds: Tensor, mtp_cache: Any, position_ids: Tensor
    ) -> dict[str, Any]:
        """Mask as transformers does, and the padding too, which it never has."""
        config = self.config.per_layer_config[layer_idx] if self.config.is_heterogeneous else self.config
        kinds = getattr(self.config, "layer_types", None)
        mask = MASKS[kinds[layer_idx] if kinds else "full_attention"](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=_padding.get(),
            past_key_values=mtp_cache,
            position_ids=position_ids,
            layer_idx=layer_idx,
        )
        return {"attention_mask": mask}

    def over_target(self, logits: Tensor) -> Tensor:
        """Return ``logits``, which are over the target's vocabulary."""
        return logits

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        if target.get_input_embeddings() is not self.embed_tokens:
            raise ValueError("these MTP layers belong to another target; pass speculator='mtp'")

    def defaults(self) -> SpeculationConfig:
        """Guess two tokens more than there are layers."""
        return SpeculationConfig(num_speculative_tokens=2 + len(self.layers))

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Read ``hidden_states[-1]``, the one after the final norm."""
        return (-1,)

    def drafter(self, request: Request) -> Drafter:
        return FeedbackDrafter(self, request)


class MTPDraftModel(DraftModel):
    """Guess with one MTP layer of any llama-like architecture, under the speculators library's names for its parts."""

    config_class = MTPSpeculatorConfig

    def __init__(self, config: MTPSpeculatorConfig) -> None:
        super().__init__(config, config.layers.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _add_ends(self, layers: Any, draft_vocab_size: int) -> None:
        shared, size = self.config.shared_with_target or (), layers.hidden_size
        self.embed_tokens = None if "embed_tokens" in shared else nn.Embedding(layers.vocab_size, size)
        self.lm_head = None if "lm_head" in shared else nn.Linear(size, draft_vocab_size, bias=False)
        with torch.device("meta"):
            model = AutoModel.from_config(copy.deepcopy(layers), attn_implementation="eager")
        rope = getattr(layers, "rope_parameters", None) or {}
        is_plain = all(hasattr(model, part) for part in ("norm", "rotary_emb")) and hasattr(layers, "rms_norm_eps")
        if not is_plain or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(
                f"a layer of {layers.model_type} cannot stand by itself: it takes RMS norms and one rotary embedding "
                "for all layers. Use llama or qwen3 layers; the target may be any architecture"
            )
        norm, eps = type(model.norm), layers.rms_norm_eps
        self.rotary_emb = type(model.rotary_emb)(layers)
        layer = type(model.layers[0])(layers, 0)
        layer.input_proj = nn.Linear(2 * size, size, bias=False)
        layer.token_layernorm, layer.hidden_layernorm = norm(size, eps=eps), norm(size, eps=eps)
        layer.final_layernorm = norm(size, eps=eps)
        self.mtp_layers = nn.ModuleList([layer])

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        # Experts and routers are bare parameters, which only the model of their architecture would know.
        if not type(module).__module__.startswith("torch."):
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1:
                    init.normal_(weight, std=getattr(self.config.layers, "initializer_range", None) or 0.02)

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """Return the layer, as a list."""
        return self.mtp_layers

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> DraftOutput:
        """Take one step, as ``Eagle3DraftModel.forward``; both kinds of hidden state are (batch, length, hidden)."""
        config, layer = self.config, cast(Any, self.mtp_layers[0])
        both = [layer.token_layernorm(self.embed(input_ids))]
        both.insert(0 if config.hidden_first else 1, layer.hidden_layernorm(only_one(features, hidden_states)))
        hidden = layer.input_proj(torch.cat(both, dim=-1))  # (batch, length, hidden)
        hidden = self.decode(hidden, (), position_ids, attention_mask, past_key_values)
        normed = layer.final_layernorm(hidden)
        logits = self.logits(normed[:, -logits_to_keep:])
        return DraftOutput(logits, normed if config.feedback_after_norm else hidden, past_key_values)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Read the target's last hidden state, after or before the final norm."""
        return (-1 if self.config.features_after_norm else target.config.get_text_config().num_hidden_layers,)

    def drafter(self, request: Request) -> Drafter:
        self.bind(request.target)
        return FeedbackDrafter(self, request)


# Names in checkpoints are translated by the name of the class.
register_checkpoint_conversion_mapping(
    TargetMtp.__name__, get_checkpoint_conversion_mapping(MtpModel.__name__), overwrite=True
)
