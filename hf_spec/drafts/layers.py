"""Which classes of transformers the decoder layers of drafts are made of, by the ``model_type`` of their config."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..configuration import GEMMA
from .fusing_layers import LlamaFusingLayer, Qwen3FusingLayer


class RMSNorm(nn.RMSNorm):
    """Norm as the layers of transformers do: on CUDA one kernel of torch instead of six."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm ``hidden`` (..., width); under autocast in the weights' float32, as torch has no kernel for both."""
        return super().forward(hidden.to(self.weight.dtype))


def with_torch_norms(module: nn.Module) -> None:
    """Let torch's norm, with the same weights, stand in for transformers' inside ``module`` that compute the same."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, (LlamaRMSNorm, Qwen3RMSNorm)):
                norm = RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


class LayerClasses(NamedTuple):
    """Hold what builds a layer, one that reads two things side by side (EAGLE-3), a norm and the rotary embedding."""

    layer: Any
    fusing: Any
    norm: Any
    rotary: Any


CLASSES = {  # whose layers have one rope for all
    "llama": LayerClasses(LlamaDecoderLayer, LlamaFusingLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": LayerClasses(Qwen3DecoderLayer, Qwen3FusingLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def classes_of(model_type: str) -> LayerClasses:
    """Return the classes for decoder layers of ``model_type``."""
    if model_type == GEMMA:
        from . import gemma4  # whose module in transformers is large, and few drafts need it

        return LayerClasses(
            gemma4.Gemma4DraftLayer, gemma4.Gemma4FusingLayer, gemma4.Gemma4RMSNorm, gemma4.Gemma4Rotary
        )
    return CLASSES[model_type]
