"""The layers of Gemma 4 in drafts, as DeepSpec makes them: full attention of one shape, nothing shared by layers.

They have no experts, no per-layer embeddings and no shared keys, unlike Gemma's targets. Embeddings are scaled and
logits capped in ``DraftModel``.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import initialization as init
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)

from .fusing_layers import FusingLayer

__all__ = ["Gemma4DraftLayer", "Gemma4FusingLayer", "Gemma4RMSNorm", "Gemma4Rotary"]

KIND = "full_attention"


class Gemma4Rotary(Gemma4TextRotaryEmbedding):
    """The rotary embedding of Gemma 4's full attention, the only kind that drafts have."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (batch, length, head size) of ``position_ids`` (batch, length)."""
        return cast(tuple[Tensor, Tensor], super().forward(hidden, position_ids, KIND))

    def fill(self) -> None:
        """Compute the frequencies, which are in no file."""
        config: Any = self.config
        frequencies, _ = self.rope_init_fns[KIND](config.per_layer_config[KIND], layer_type=KIND)
        for name in ("inv_freq", "original_inv_freq"):
            init.copy_(getattr(self, f"{KIND}_{name}"), frequencies)


class Gemma4DraftLayer(Gemma4TextDecoderLayer):
    """A layer of a draft; its layers share no keys, but some versions of transformers write some all the same."""

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override, unused-ignore]
        """Run the layer on ``hidden`` (batch, length, hidden)."""
        hidden = super().forward(hidden, shared_kv_states={}, **kwargs)
        return hidden


class Gemma4FusingLayer(FusingLayer, Gemma4TextDecoderLayer):
    """The first layer of an EAGLE-3 draft made of Gemma 4 layers, which norm what they add."""

    def forward(self, hidden: Tensor, embeds: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override, unused-ignore]
        """Run the layer on ``hidden`` and ``embeds``, (batch, length, hidden) each."""
        return super().forward(hidden, embeds, shared_kv_states={}, **kwargs)  # layers of drafts share nothing

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output to the ``residual``, then the MLP's output."""
        hidden = residual + self.post_attention_layernorm(attended)
        made = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return cast(Tensor, (hidden + made) * self.layer_scalar)
