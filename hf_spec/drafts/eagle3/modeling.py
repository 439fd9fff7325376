"""EAGLE-3 drafts (arXiv 2503.01840): one or a few decoder layers over the target's own hidden states.

A position reads its token and, beside it, one hidden state: at the first step the target's features of the position
before, later the draft's own output. The first layer attends over both, side by side; the residual carries only the
hidden state::

    features ─ fc ─┐                  ┌─ hidden_norm ─┐
                   ├─ hidden ─────────┤               ├─ attention ─ (+ hidden) ─ mlp ─ ... ─ norm ─ lm_head
    own output ────┘                  │               │                       │
    token ─ embed ──── input_layernorm ───────────────┘                       └─ fed back at the next step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ..feedback import FeedbackDrafter
from ..files import Checkpoint
from ..modeling import LAYERS, NORMS, DraftModel, DraftOutput, only_one
from .configuration import Eagle3SpeculatorConfig
from .engines import in_the_way, unserved
from .formats import FORMATS, sort_features, write_eagle3, write_sglang

if TYPE_CHECKING:
    from ..base import Drafter, Request


class _FusingLayer(nn.Module):
    """Turn a decoder layer into one whose attention reads an embedding and a hidden state side by side."""

    self_attn: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, config: Any, layer_idx: int, norm_before_residual: bool) -> None:
        super().__init__(config, layer_idx)  # the decoder layer's, next in line
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = type(self.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden: Tensor, embeds: Tensor, **kwargs: Any) -> Tensor:
        """Return what follows ``hidden`` beside ``embeds``, (batch, length, hidden) each."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)  # (batch, length, 2 hidden)
        attended, _ = self.self_attn(both, **kwargs)
        hidden = (normed if self.norm_before_residual else hidden) + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class LlamaFusingLayer(_FusingLayer, LlamaDecoderLayer):  # type: ignore[misc]
    """Be the first layer of an EAGLE-3 draft made of llama layers."""


class Qwen3FusingLayer(_FusingLayer, Qwen3DecoderLayer):  # type: ignore[misc]
    """Be the first layer of an EAGLE-3 draft made of qwen3 layers."""


FIRST_LAYERS: dict[str, Any] = {"llama": LlamaFusingLayer, "qwen3": Qwen3FusingLayer}


class Eagle3DraftModel(DraftModel):
    """Guess with an EAGLE-3 draft of any flags (see ``Eagle3SpeculatorConfig``)."""

    config_class = Eagle3SpeculatorConfig
    formats = FORMATS
    layouts = {"eagle3": write_eagle3, "sglang": write_sglang}  # noqa: RUF012
    vllm_method = "eagle3"
    _no_split_modules = [*DraftModel._no_split_modules, "LlamaFusingLayer", "Qwen3FusingLayer"]  # noqa: RUF012

    input_norm: Any
    fc_norm: nn.ModuleList | None

    def __init__(self, config: Eagle3SpeculatorConfig) -> None:
        super().__init__(config, config.draft_vocab_size or config.layers.vocab_size)
        layers, count, width = config.layers, config.num_features, config.feature_size
        kind, norm = layers.model_type, NORMS[layers.model_type]
        first = FIRST_LAYERS[kind](layers, 0, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(LAYERS[kind](layers, i) for i in range(1, layers.num_hidden_layers))])
        self.input_norm = norm(count * width, eps=layers.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(norm(width, eps=layers.rms_norm_eps) for _ in range(count)) if config.fc_norm else None
        )
        self.fc = nn.Linear(count * width, layers.hidden_size, bias=False)
        self.norm = norm(layers.hidden_size, eps=layers.rms_norm_eps)
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(config.embed_requires_grad)
        self.post_init()  # type: ignore[no-untyped-call]

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
        """Take one step: read ``input_ids`` (batch, length) beside either kind of hidden state.

        ``features`` (batch, length, features x target width) at the first step, ``features[:, i]`` of the position
        before ``input_ids[:, i]``; ``hidden_states`` (batch, length, hidden), an earlier output, at later ones.
        ``logits_to_keep`` > 0: only the last logits. The rest: see ``DraftModel.decode``.
        """
        hidden = only_one(features, hidden_states)
        hidden = hidden if features is None else self.fuse(features)
        hidden = self.decode(hidden, (self.embed(input_ids),), position_ids, attention_mask, past_key_values)
        normed = self.norm(hidden)
        read = normed if self.config.norm_before_lm_head else hidden
        logits = self.logits(read[:, -logits_to_keep:])  # (batch, length, draft vocabulary)
        return DraftOutput(logits, normed if self.config.norm_output else hidden, past_key_values)

    def fuse(self, features: Tensor) -> Tensor:
        """Shrink the target's ``features`` (batch, length, features x width) to (batch, length, hidden)."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(features))

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        config: Eagle3SpeculatorConfig = self.config
        return config.feature_layers(target.config.get_text_config().num_hidden_layers)

    def drafter(self, request: Request) -> Drafter:
        self.bind(request.target)
        return FeedbackDrafter(self, request)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return unserved(config) if checkpoint is None else in_the_way(config, checkpoint, layout)

    def sort_features(self) -> None:
        sort_features(self)
