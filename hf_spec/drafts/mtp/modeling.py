"""A multi-token-prediction layer of any origin, for a target of any architecture. How it works: ``target.py``."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache, PreTrainedModel
from transformers import initialization as init

from ..base import DraftOutput
from ..files import Checkpoint
from ..modeling import DraftModel, only_one
from .configuration import MTPSpeculatorConfig
from .formats import FORMATS, in_the_way, unserved, why_not_native, write_native

if TYPE_CHECKING:
    from ...unroll.feedback import Unrolled, UnrollInput


class MTPDraftModel(DraftModel):
    """One MTP layer of any llama-like architecture; its parts have the speculators library's names."""

    config_class = MTPSpeculatorConfig
    ends_chains = True
    formats = FORMATS
    layouts = {"native": write_native}  # noqa: RUF012

    def __init__(self, config: MTPSpeculatorConfig) -> None:
        super().__init__(config, config.layers.vocab_size)
        self.post_init()

    def _add_ends(self, layers: Any, draft_vocab_size: int) -> None:
        self._add_own_ends(layers, draft_vocab_size)
        with torch.device("meta"):
            model = AutoModel.from_config(copy.deepcopy(layers), attn_implementation="eager")
        rope = getattr(layers, "rope_parameters", None) or {}
        is_plain = all(hasattr(model, part) for part in ("norm", "rotary_emb")) and hasattr(layers, "rms_norm_eps")
        if not is_plain or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(
                f"a layer of {layers.model_type} cannot stand by itself: it takes RMS norms and one rotary embedding "
                "for all layers. Use llama or qwen3 layers; the target may be any architecture"
            )
        norm, eps, size = type(model.norm), layers.rms_norm_eps, layers.hidden_size
        self.rotary_emb = type(model.rotary_emb)(layers)
        layer = type(model.layers[0])(layers, 0)
        layer.input_proj = nn.Linear(2 * size, size, bias=False)
        layer.token_layernorm, layer.hidden_layernorm = norm(size, eps=eps), norm(size, eps=eps)
        layer.final_layernorm = norm(size, eps=eps)
        self.mtp_layers = nn.ModuleList([layer])

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Experts and routers are bare parameters, which only their architecture's own model class initialises.
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
        """Run one step, as ``Eagle3DraftModel.forward``; both kinds of hidden state are (batch, length, hidden)."""
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

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return unserved(config) if checkpoint is None else in_the_way(config, layout)

    @classmethod
    def use_in_vllm(cls, config: Any, target: str, path: str) -> str:
        if why_not_native(config) is not None:
            return "vLLM serves MTP layers only within the checkpoints of targets that have some."
        return (
            "vLLM serves an MTP layer within the target's checkpoint, by the method `mtp`: "
            f"`hf-spec convert {path} layer --to native` writes it as such."
        )

    def unroll(self, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
        unrolled = super().unroll(given, steps, recompute)
        # A prediction of the state before the target's final norm cannot be compared with the one after it.
        return unrolled if self.config.features_after_norm else replace(unrolled, predicted_states=[])
