"""The first layer of EAGLE-3 drafts: a decoder layer whose attention reads two concatenated inputs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


class FusingLayer(nn.Module):
    """A mixin for decoder layers whose attention reads the concatenation of an embedding and a hidden state."""

    self_attn: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, config: Any, layer_idx: int, norm_before_residual: bool) -> None:
        super().__init__(config, layer_idx)  # of the decoder layer, next in the MRO
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = type(self.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            if (narrow := getattr(self.self_attn, name)) is not None:  # some layers use keys as values
                wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
                setattr(self.self_attn, name, wide)

    def forward(self, hidden: Tensor, embeds: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer on ``hidden`` and ``embeds``, (batch, length, hidden) each."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)  # (batch, length, 2 hidden)
        attended, _ = self.self_attn(both, **kwargs)
        return self.after_attention(normed if self.norm_before_residual else hidden, attended)

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output to the ``residual``, then the MLP's output."""
        hidden = residual + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class LlamaFusingLayer(FusingLayer, LlamaDecoderLayer):  # type: ignore[misc, unused-ignore]  # not from transformers 5.24 on
    """The first layer of an EAGLE-3 draft made of llama layers."""


class Qwen3FusingLayer(FusingLayer, Qwen3DecoderLayer):  # type: ignore[misc, unused-ignore]  # not from transformers 5.24 on
    """The first layer of an EAGLE-3 draft made of qwen3 layers."""
