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
    Read,
    flat_block_keys,
    looked_up,
    outputs_of_layers,
    read_flat,
    speculators_format,
    write_zlab,
)
from ..files import Files, Format, is_speculators
from .configuration import DFlashSpeculatorConfig


def _is_zlab(config: dict[str, Any], names: Collection[str]) -> bool:
    others = any(name.startswith(("markov_head.", "candidate_selector.")) for name in names)  # of DSpark and DFlash2
    selects = "selector_rank" in (config.get("dflash_config") or config)
    is_flat = isinstance(config.get("dflash_config"), dict) and not is_speculators(config)
    return is_flat and not others and not selects


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


def write_dflash(draft: Any) -> Files:
    """Write the layout of z-lab, for SGLang, vLLM and llama.cpp."""
    return write_zlab(draft, "DFlashDraftModel")


FORMATS = (
    speculators_format(DFlashSpeculatorConfig),
    Format("dflash", _is_zlab, _read_zlab, owner="z-lab", keys=flat_block_keys),
)
