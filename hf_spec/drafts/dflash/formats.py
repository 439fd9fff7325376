"""DFlash drafts in files: of the speculators library, of z-lab, and of transformers (Muse Glimmer's assistant).

=============== ================================== ==================================================================
format          how it is recognised               what its files do not say
=============== ================================== ==================================================================
``speculators`` ``speculators_model_type`` dflash  nothing
``dflash``      ``DFlashDraftModel``, or            embeddings and head are the target's; the root's slot predicts
                ``dflash_config`` without keys of  nothing; windows end at each slot; without ``is_causal`` blocks
                DSpark, in a flat config           are causal in sliding layers, with JetSpec's ``causal_head`` in all
``muse``        ``model_type``                     as ``dflash``, but never causal; a window includes the token at its
                muse_glimmer_assistant             distance; the vocabulary, and the scales of ``q``, are the target's
=============== ================================== ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..block_files import (
    Read,
    block_format,
    flat_block_keys,
    looked_up,
    merged_keys,
    outputs_of_layers,
    read_flat,
    write_zlab,
)
from ..files import Files, Format, is_speculators, renamed, short_names
from .configuration import DFlashSpeculatorConfig


def _is_zlab(config: dict[str, Any], names: Collection[str]) -> bool:
    given, named = merged_keys(config), str(config.get("architectures"))
    names = short_names(names)
    others = any(name.startswith(("markov_", "candidate_selector.")) for name in names)
    others = others or bool(given.get("markov_rank"))  # parts of DSpark and DFlash2, under any name of an architecture
    others = others or given.get("projector_type") == "dspark"  # ModelOpt's, even without these parts
    is_deepspec = "DSpark" in named or "markov_rank" in given  # whose DFlash is DSpark without heads
    is_dflash = "DFlashDraftModel" in named or (isinstance(config.get("dflash_config"), dict) and not is_deepspec)
    return is_dflash and not others and "selector_rank" not in given and not is_speculators(config)


def _read_zlab(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw = looked_up(raw)
    return read_flat(
        DFlashSpeculatorConfig,
        raw,
        tensors,
        aux_hidden_state_layer_ids=outputs_of_layers(raw.get("target_layer_ids")),
        mask_token_id=raw.get("mask_token_id"),
        sliding_window_per_slot=True,
    )


MUSE = "muse_glimmer_assistant"
# transformers' names of tensors, and ours; and the values that it takes for keys that are not in a file.
MUSE_TENSORS = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
MUSE_DEFAULTS: dict[str, Any] = {
    **{"hidden_size": 6656, "intermediate_size": 19968, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "sliding_window": 2048},
    **{"block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49], "hidden_act": "silu"},
}
MUSE_THETA = 500_000.0


def _is_muse(config: dict[str, Any], names: Collection[str]) -> bool:
    return config.get("model_type") == MUSE


def _read_muse(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw = MUSE_DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    tensors = renamed(tensors, MUSE_TENSORS)
    layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    raw.setdefault("layer_types", ["sliding_attention"] * layers)
    rope = raw.setdefault("rope_parameters", {"rope_type": "default"})
    if "rope_theta" not in rope:
        raw["rope_parameters"] = {**rope, "rope_theta": raw.get("rope_theta", MUSE_THETA)}
    raw |= {"use_sliding_window": True, "sliding_window": raw["sliding_window"] + 1, "is_causal": False}
    return read_flat(
        DFlashSpeculatorConfig,
        {"vocab_size": raw["mask_token_id"] + 1} | raw,  # the target's, once it is known
        tensors,
        aux_hidden_state_layer_ids=outputs_of_layers(raw["target_layer_ids"]),
        mask_token_id=raw["mask_token_id"],
        sliding_window_per_slot=True,
        scored_as_target=True,
    )


def write_dflash(draft: Any) -> Files:
    """Write the layout of z-lab, for SGLang, vLLM and llama.cpp.

    Errors: a ValueError for what the layout cannot express.
    """
    if draft.config.scored_as_target:
        raise ValueError(
            "this flat layout cannot express scored_as_target: set output_multiplier and final_logit_softcapping in "
            "config.json to the target's, and scored_as_target to false"
        )
    return write_zlab(draft, "DFlashDraftModel")


FORMATS = (
    block_format(DFlashSpeculatorConfig),
    Format("dflash", _is_zlab, _read_zlab, owner="z-lab", keys=flat_block_keys),
    Format("muse", _is_muse, _read_muse, owner="transformers", keys=flat_block_keys),
)
