"""EAGLE-1 and EAGLE-2 drafts in the files of SafeAILab and of speculators 0.1 and 0.2; which engines serve them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...config_keys import Known, flat_keys, known
from ..files import (
    Checkpoint,
    Format,
    config_of,
    doubled_prefix,
    flat_layers,
    needed,
    renamed,
    shared_with_target,
    short_names,
    speculators_format,
    speculators_keys,
)
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


# Names of tensors in the first versions of the speculators library, and ours.
FIRST_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}


def _is_first(config: dict[str, Any], names: Collection[str]) -> bool:
    return config.get("speculators_model_type") == "eagle" and "fusion_fc.weight" in names


def _first_keys(config: dict[str, Any], names: Collection[str]) -> Known:
    own = known("fusion_bias", "layernorms", "transformer_layer_architecture")
    return {**speculators_keys(config, names), **own}


def _read_first(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[EagleSpeculatorConfig, dict[str, Tensor]]:
    """Read the same layers under other names. What the files lack is the target's, and there is one layer."""
    if raw.get("layernorms"):
        raise ValueError(
            "layernorms is true: the draft norms its embeddings and its output, which EAGLE-1 does not, and hf_spec "
            "does not read it: serve it with the speculators library of its time, or use another draft"
        )
    tensors = renamed(tensors, FIRST_NAMES)
    raw["transformer_layer_config"]["num_hidden_layers"] = 1
    raw |= {"fc_bias": "fc.bias" in tensors, "shared_with_target": shared_with_target(tensors)}
    return config_of(EagleSpeculatorConfig, raw | {"dtype": raw.get("dtype", raw.get("torch_dtype"))}), tensors


FORMATS = (
    replace(speculators_format("eagle", _read_first), recognises=_is_first, keys=_first_keys),
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
    bias = "fc.bias" in short_names(checkpoint.tensors) and not checkpoint.config.get("eagle_fc_bias")
    vllm = ["drops the bias of fc; set eagle_fc_bias: true in config.json"] if bias else []
    if (doubled := doubled_prefix(checkpoint.tensors)) is not None:
        vllm.append(f"{doubled}; rename them")
    sglang: list[str] = []
    if layout == "speculators":
        vllm, sglang = ["does not know speculators_model_type 'eagle'"], ["does not read this config"]
    return {"vLLM": vllm, "SGLang": sglang, "llama.cpp": ["reads EAGLE-3 only"]}


def unserved() -> dict[str, list[str]]:
    """List by engine why it cannot serve such a draft in any layout."""
    return {engine: ["reads EAGLE-1 drafts in the layout of SafeAILab only"] for engine in ("vLLM", "SGLang")}
