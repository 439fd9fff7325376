"""Medusa heads in files, by themselves or within a target (``medusa_head.*``).

===============  ==============================================  =============================================
format           how it is recognised                            what its files do not say
===============  ==============================================  =============================================
``medusa``       ``0.0.linear.*``, also within a target          number of heads; whose output layers they end in
``medusa-vllm``  ``blocks.0.layers.0.*`` (vLLM before 0.33)      biases are zero; the same
===============  ==============================================  =============================================
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ...config_keys import Known, keys_of_layers, known
from ...configuration import default_speculators_config
from ..files import Format
from .configuration import MedusaSpeculatorConfig

# Head, layer and tensor.
NAME = re.compile(r"(?:medusa_heads?\.)?((\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight))")
# The number and shape of heads are taken from the tensors.
KEYS = known(
    "base_model_name_or_path", "medusa_num_heads", "medusa_num_layers", "version", "hidden_size", "vocab_size"
) | {
    **known("num_heads", "num_hidden_layers", "max_paths", "max_seq_len", "truncated_vocab_size"),  # vLLM's
    **known("medusa_fc_bias", "original_lm_head", "topk"),
}
VLLM_NAME = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def _is_published(config: dict[str, Any], names: Collection[str]) -> bool:
    return any(map(NAME.fullmatch, names))


def _is_vllm(config: dict[str, Any], names: Collection[str]) -> bool:
    return any(map(VLLM_NAME.fullmatch, names))


def _read(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[MedusaSpeculatorConfig, dict[str, Tensor]]:
    """Read heads as they are published, counting heads and blocks from the names of the tensors."""
    found = {match[0]: match for name in tensors if (match := NAME.fullmatch(name))}
    blocks = [match for match in found.values() if match[4].startswith("linear.")]
    if not blocks:
        raise ValueError(
            "there are ends of heads, but no residual block (0.0.linear.weight); copy the whole file of the heads"
        )
    ends = [tensor for name, tensor in tensors.items() if name in found and found[name][4] == "weight"]
    own_vocabulary = len(ends[0]) if ends else None
    speculators_config = default_speculators_config("medusa")
    speculators_config["verifier"]["name_or_path"] = raw.get("base_model_name_or_path")
    config = MedusaSpeculatorConfig(
        num_heads=1 + max(int(match[2]) for match in blocks),
        num_hidden_layers=1 + max(int(match[3]) for match in blocks),
        hidden_size=len(tensors[blocks[0][0]]),
        vocab_size=raw.get("vocab_size") or own_vocabulary,
        draft_vocab_size=own_vocabulary,
        shared_with_target=[] if ends else ["lm_head"],
        speculators_config=speculators_config,
        dtype=raw.get("dtype", raw.get("torch_dtype")),
    )
    # Blocks that shared a module in training share a storage in a pickled file. Clones separate them.
    renamed = {
        f"heads.{found[name][1]}" if name in found else name: tensor.clone() for name, tensor in tensors.items()
    }
    return config, renamed


def _read_vllm(raw: dict[str, Any], given: dict[str, Tensor]) -> tuple[MedusaSpeculatorConfig, dict[str, Tensor]]:
    """Rename the tensors of vLLM's own format, and sort the vocabulary that its ``token_map`` lists."""
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in given.items()}
    ids, lm_head = tensors.pop("token_map", None), tensors.pop("lm_head.weight", None)
    found = [match for name in tensors if (match := VLLM_NAME.fullmatch(name))]
    end = 1 + max(int(match[2]) for match in found)
    for match in found:
        place = f"{match[1]}.{match[2]}.linear"
        tensors[f"{place}.{match[3]}"] = tensor = tensors.pop(match[0])
        tensors.setdefault(f"{place}.bias", tensor.new_zeros(len(tensor)))
    for head in {match[1] for match in found}:
        weight = tensors.pop(f"lm_heads.{head}.weight", lm_head)  # all heads may share one output layer
        if weight is not None:
            tensors[f"{head}.{end}.weight"] = weight if ids is None else weight[ids.argsort()]
    if ids is not None and len(ids) < raw["vocab_size"]:
        ids = ids.sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(raw["vocab_size"]), ids)
    return _read(raw, tensors)


def _keys(config: dict[str, Any], names: Collection[str]) -> Known:
    """Return the known keys of heads and, since they may be in their target's checkpoint, of its config."""
    return {**keys_of_layers(str(config.get("model_type"))), **KEYS}


FORMATS = (
    Format(
        "medusa",
        _is_published,
        _read,
        owner="FasterDecoding",
        weight_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        inside_target=("medusa_head.",),
        keys=_keys,
    ),
    Format("medusa-vllm", _is_vllm, _read_vllm, keys=_keys),
)


def unserved() -> dict[str, list[str]]:
    """List by engine why it cannot serve such heads in any layout."""
    return {
        "vLLM": ["serves no Medusa heads since 0.33"],
        "SGLang": ["has no Medusa"],
        "llama.cpp": ["has no Medusa"],
    }
