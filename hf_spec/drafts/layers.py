"""Which classes of transformers the decoder layers of drafts are made of, by the ``model_type`` of their config."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..configuration import GEMMA
from .fusing_layers import LlamaFusingLayer, Qwen3FusingLayer


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
