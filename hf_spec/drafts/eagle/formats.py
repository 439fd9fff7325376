"""EAGLE-1 and EAGLE-2 drafts in the files of SafeAILab, and which engines serve them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...config_keys import flat_keys, known
from ..files import Checkpoint, Format, flat_layers, needed, shared_with_target, short_names
from .configuration import EagleSpeculatorConfig


def _read(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[EagleSpeculatorConfig, dict[str, Tensor]]:
    """Read a flat config, which does not say that features are after the final norm and the head is the target's."""
    tensors = needed(tensors)
    config = EagleSpeculatorConfig(
        transformer_layer_config=flat_layers(raw, tensors),
        shared_with_target=shared_with_target(tensors),
        fc_bias="fc.bias" in tensors,
        dtype=raw.get("dtype", raw.get("torch_dtype")),
    )
    return config, tensors


FORMATS = (
    Format(
        "eagle",
        lambda config, names: {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= short_names(names),
        _read,
        owner="SafeAILab",
        keys=lambda config, names: flat_keys(config, names, known("bias", "eagle_fc_bias")),
    ),
)


def in_the_way(checkpoint: Checkpoint, layout: str) -> dict[str, list[str]]:
    """List by engine why it cannot serve the files of ``checkpoint``; empty if it reads them as meant."""
    bias = "fc.bias" in checkpoint.tensors and not checkpoint.config.get("eagle_fc_bias")
    vllm = ["drops the bias of fc; set eagle_fc_bias: true in config.json"] if bias else []
    if layout == "speculators":
        vllm = ["does not know speculators_model_type 'eagle'"]
    return {"vLLM": vllm, "SGLang": [], "llama.cpp": ["reads EAGLE-3 only"]}


def unserved() -> dict[str, list[str]]:
    """List by engine why it cannot serve such a draft in any layout."""
    return {engine: ["reads EAGLE-1 drafts in the layout of SafeAILab only"] for engine in ("vLLM", "SGLang")}
