"""DSpark drafts in files: of the speculators library and of DeepSpec, whose DFlash drafts are DSpark without heads.

=============== ========================================== ===========================================================
format          how it is recognised                       what its files do not say
=============== ========================================== ===========================================================
``speculators`` ``speculators_model_type`` dspark          nothing
``deepspec``    ``block_size`` and ``target_layer_ids`` or  ids are outputs of layers; every slot predicts; keys of
                ``markov_head.*`` in a flat config         heads that are off
=============== ========================================== ===========================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ...config_keys import Known
from ...configuration import GEMMA
from ..block_files import (
    Read,
    block_format,
    flat_block_keys,
    layer_outputs,
    looked_up,
    merged_keys,
    outputs_of_layers,
    read_flat,
    write_flat,
)
from ..files import Files, Format, is_speculators, short_names
from .configuration import DSparkSpeculatorConfig

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def _is_deepspec(config: dict[str, Any], names: Collection[str]) -> bool:
    given, names = merged_keys(config), short_names(names)
    heads = "target_layer_ids" in given or any(name.startswith("markov_head.") for name in names)
    return "block_size" in given and "hidden_norm.weight" in names and heads and not is_speculators(config)


def _read_deepspec(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw = looked_up(raw)  # engines' repackaged files have a dflash_config, SpecForge's a dspark_config, too
    off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return read_flat(
        DSparkSpeculatorConfig,
        raw,
        tensors,
        aux_hidden_state_layer_ids=outputs_of_layers(raw.get("target_layer_ids")),
        mask_token_id=raw.get("mask_token_id"),
        sample_from_anchor=True,
        **off | {name: raw[name] for name in HEADS if name in raw},
    )


def _keys(config: dict[str, Any], names: Collection[str]) -> Known:
    return flat_block_keys(config, names, projector_type="dspark")  # SpecForge's name of the kind


def write_deepspec(draft: Any) -> Files:
    """Write the layout of DeepSpec, for SGLang, vLLM and llama.cpp."""
    config: DSparkSpeculatorConfig = draft.config
    unsaid = [
        (not config.sample_from_anchor, "does not predict from the root's slot"),
        ("sliding_attention" in config.layer_kinds, "has sliding layers"),
        (config.block_causal, "has causal blocks"),
        (bool(config.scales), "scales or caps its numbers"),
        (
            bool(config.shared_with_target),
            "has no embeddings or no head of its own (--self-contained TARGET writes them in)",
        ),
    ]
    heads = {name: getattr(config, name) for name in HEADS}
    ids = {"mask_token_id": config.mask_token_id, "target_layer_ids": layer_outputs(config)}
    kind = "Gemma4DSparkModel" if config.layers.model_type == GEMMA else "Qwen3DSparkModel"
    return write_flat(draft, unsaid, architectures=[kind], **ids, **heads)


FORMATS = (
    block_format(DSparkSpeculatorConfig),
    Format("deepspec", _is_deepspec, _read_deepspec, "DeepSpec", keys=_keys),
)
