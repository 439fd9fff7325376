"""The classes of transformers that drafts' decoder layers are made of, by the ``model_type`` of their config."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..configuration import GEMMA
from .fusing_layers import LlamaFusingLayer, Qwen3FusingLayer


class RMSNorm(nn.RMSNorm):
    """The RMS norm of transformers' layers, as one kernel of torch on CUDA instead of six."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm ``hidden`` (..., width) in the weights' dtype: under autocast, torch has no kernel for two dtypes."""
        return super().forward(hidden.to(self.weight.dtype))


def with_torch_norms(module: nn.Module) -> None:
    """Replace norms of transformers in ``module`` by torch's, which share the weights and compute the same."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, (LlamaRMSNorm, Qwen3RMSNorm)):
                norm = RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


class LayerClasses(NamedTuple):
    """The classes of a decoder layer, EAGLE-3's first layer (``fusing``), a norm and the rotary embedding."""

    layer: Any
    fusing: Any
    norm: Any
    rotary: Any


CLASSES = {  # of architectures with one rope for all layers
    "llama": LayerClasses(LlamaDecoderLayer, LlamaFusingLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": LayerClasses(Qwen3DecoderLayer, Qwen3FusingLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def classes_of(model_type: str) -> LayerClasses:
    """Return the classes for decoder layers of ``model_type``."""
    if model_type == GEMMA:
        from . import gemma4  # its module in transformers is large, and few drafts need it

        return LayerClasses(
            gemma4.Gemma4DraftLayer, gemma4.Gemma4FusingLayer, gemma4.Gemma4RMSNorm, gemma4.Gemma4Rotary
        )
    return CLASSES[model_type]
