"""DFlash drafts in files: of the speculators library and of z-lab.

=============== ================================== ==================================================================
format          how it is recognised               what its files do not say
=============== ================================== ==================================================================
``speculators`` ``speculators_model_type`` dflash  nothing
``dflash``      ``dflash_config`` in a flat config  embeddings and head are the target's; the root's slot predicts
                                                   nothing; windows end at each slot; without ``is_causal`` blocks
                                                   are causal in sliding layers, with JetSpec's ``causal_head`` in all
=============== ================================== ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..block_files import (
    SCALES,
    Read,
    flat_block_keys,
    layer_outputs,
    looked_up,
    outputs_of_layers,
    read_flat,
    speculators_format,
    write_flat,
)
from ..files import Files, Format, is_speculators
from .configuration import DFlashSpeculatorConfig


def _is_zlab(config: dict[str, Any], names: Collection[str]) -> bool:
    heads = any(name.startswith("markov_head.") for name in names)  # then it is a DSpark draft
    return isinstance(config.get("dflash_config"), dict) and not heads and not is_speculators(config)


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


def write_zlab(draft: Any) -> Files:
    """Write the layout of z-lab, for SGLang, vLLM and llama.cpp, which share the target's embeddings and head."""
    config: DFlashSpeculatorConfig = draft.config
    slides = "sliding_attention" in config.layer_kinds
    unsaid = [
        (config.sample_from_anchor, "guesses from the root's slot"),
        (slides and not config.sliding_window_per_slot, "ends its windows at the root"),
        (set(config.shared_with_target or ()) != {"embed_tokens", "lm_head"}, "has embeddings or a head of its own"),
    ]
    given: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": layer_outputs(config)}
    given |= {name: value for name in SCALES if (value := getattr(config, name)) not in (None, 1.0)}
    more: dict[str, Any] = {}
    if config.block_causal:
        given |= {"causal": True, "causal_head": True}  # for vLLM, and for JetSpec's own code
    if config.block_causal or config.sliding_window_non_causal or not slides:
        more = {"is_causal": config.block_causal}  # otherwise sliding layers are causal alone, which no key says
    return write_flat(draft, unsaid, architectures=["DFlashDraftModel"], dflash_config=given, **more)


FORMATS = (
    speculators_format(DFlashSpeculatorConfig),
    Format("dflash", _is_zlab, _read_zlab, owner="z-lab", keys=flat_block_keys),
)
