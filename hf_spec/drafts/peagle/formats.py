"""P-EAGLE drafts in files, which are those of the speculators library, and which engines serve them."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..files import (
    SPECULATORS,
    Checkpoint,
    applying,
    as_wide,
    head_in_part,
    in_speculators,
    names_target,
    speculators_format,
)
from ..fusing_files import Read, features_in_vllm, read_speculators
from .configuration import PEagleSpeculatorConfig


def _read(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    return read_speculators(PEagleSpeculatorConfig, raw, tensors)


FORMATS = (speculators_format("peagle", _read),)


def engines(config: PEagleSpeculatorConfig, checkpoint: Checkpoint | None) -> dict[str, list[str]]:
    """List why vLLM 0.33, SGLang 0.5.23 and llama.cpp's 2026 converter cannot serve such a draft."""
    name = (config.speculators_config or {})["verifier"].get("name_or_path")
    ids = config.eagle_aux_hidden_state_layer_ids or []
    vllm = applying(
        [
            (not config.norm_before_lm_head, "always norms before the head"),
            (config.fc_norm, "does not apply fc_norm to P-EAGLE"),
            *head_in_part(config),
            *(features_in_vllm(config) if checkpoint is not None else ()),
            (ids != sorted(ids), f"sorts the layer ids {ids} and so permutes the features; convert to speculators"),
            (
                checkpoint is not None and (not name or os.path.exists(name)),
                "needs --speculative-config: verifier.name_or_path is no Hub id",
            ),
        ]
    )
    speculators = applying(
        [
            (not config.norm_before_lm_head, "always norms before the head"),
            (not names_target(config), "reads only drafts that name their target; convert with --verifier"),
            *as_wide(config),
        ]
    )
    found = {"vLLM": vllm}
    if checkpoint is not None:
        found["speculators"] = in_speculators(config, SPECULATORS.name, speculators)
    return found | {engine: ["does not predict in parallel with EAGLE-3's layers"] for engine in OTHERS}


OTHERS = ("SGLang", "llama.cpp")
