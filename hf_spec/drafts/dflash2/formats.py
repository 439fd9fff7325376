"""DFlash2 drafts in files: of the speculators library and of z-lab.

=============== =================================== =============================================================
format          how it is recognised                what its files do not say
=============== =================================== =============================================================
``speculators`` ``speculators_model_type`` dflash2  nothing
``dflash``      ``candidate_selector.*``, or keys   as of DFlash; codebooks may end in ``.weight``
                of the selector in a flat config
=============== =================================== =============================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ...config_keys import Known, flat_keys, known
from ..block_files import FLAT_KEYS, Read, block_format, looked_up, outputs_of_layers, read_flat, write_zlab
from ..files import Files, Format, is_speculators
from .configuration import SHAPE, DFlash2SpeculatorConfig


def _is_zlab(config: dict[str, Any], names: Collection[str]) -> bool:
    given = config | (config.get("dflash_config") or {})
    selects = "selector_rank" in given or any("candidate_selector." in name for name in names)
    return selects and not is_speculators(config)


def _keys(config: dict[str, Any], names: Collection[str]) -> Known:
    own = {**FLAT_KEYS, **known(*SHAPE), "projector_type": "dflash2"}  # ModelOpt's name of the kind
    return flat_keys(config, names, {**own, "dflash_config": own})


def _read_zlab(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw = looked_up(raw)
    return read_flat(
        DFlash2SpeculatorConfig,
        raw,
        {name.replace("codebook.weight", "codebook"): tensor for name, tensor in tensors.items()},
        aux_hidden_state_layer_ids=outputs_of_layers(raw.get("target_layer_ids")),
        mask_token_id=raw.get("mask_token_id"),
        sliding_window_per_slot=True,
        **{name: raw[name] for name in SHAPE},
    )


def write_flat_dflash2(draft: Any) -> Files:
    """Write the layout of z-lab, for vLLM, SGLang and llama.cpp, which share the target's embeddings and head."""
    shape = {name: getattr(draft.config, name) for name in SHAPE}
    return write_zlab(draft, "DFlash2DraftModel", **shape)


FORMATS = (
    block_format(DFlash2SpeculatorConfig),
    Format("dflash", _is_zlab, _read_zlab, owner="z-lab", keys=_keys),
)
