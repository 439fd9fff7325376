"""DSpark drafts in files: of the speculators library, and of DeepSpec and ModelOpt.

DeepSpec's DFlash drafts are DSpark without heads. ModelOpt's tensors and keys of the heads have names of their own.

=============== ========================================== ===========================================================
format          how it is recognised                       what its files do not say
=============== ========================================== ===========================================================
``speculators`` ``speculators_model_type`` dspark          nothing
``deepspec``    ``block_size`` and ``target_layer_ids`` or  ids are outputs of layers; every slot predicts; keys of
                ``markov_*`` in a flat config              heads that are off
=============== ========================================== ===========================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ...config_keys import Known, known
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
from ..files import Files, Format, is_speculators, needed, renamed, short_names
from .configuration import DSparkSpeculatorConfig

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# ModelOpt's names of the heads' tensors, and ours.
FLAT_HEADS = {
    **{name: f"markov_head.{name}" for name in ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")},
    "confidence_proj.": "confidence_head.proj.",
}


def is_modelopt(names: Collection[str]) -> bool:
    """Tell whether the tensors of the heads have ModelOpt's names."""
    return "markov_w1.weight" in short_names(names)


def _is_deepspec(config: dict[str, Any], names: Collection[str]) -> bool:
    given, names = merged_keys(config), short_names(names)
    heads = "target_layer_ids" in given or any(name.startswith("markov_") for name in names)
    return "block_size" in given and "hidden_norm.weight" in names and heads and not is_speculators(config)


def _read_deepspec(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw = looked_up(raw)  # engines' repackaged files have a dflash_config, SpecForge's a dspark_config, too
    if raw.get("shift_label") is False:  # of ModelOpt, which itself writes true only
        raise ValueError(
            "shift_label is False, but in DSpark every slot predicts the token after it: ask who made the draft what "
            "its slots predict, or use another one"
        )
    if (head := raw.get("use_confidence_head")) is not None:  # ModelOpt's, whose head reads the previous token, too
        raw |= {"enable_confidence_head": head, "confidence_head_with_markov": head}
    tensors = renamed(needed(tensors), FLAT_HEADS)
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
    own = {"projector_type": "dspark", "shift_label": True, **known("use_confidence_head")}  # SpecForge's, ModelOpt's
    return flat_block_keys(config, names, **own)


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
