"""Drafts of EAGLE-3's layers in files: what the formats of all kinds have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..settings import is_int
from .files import completed
from .fusing import FusingDraftModel, FusingSpeculatorConfig

IDS = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM_IDS = "aux_hidden_states_layer_ids"
# gpt-oss-120b has so many layers, so that no layer has this number: NVIDIA's Eagle3-v3 for it counts layers that have
# run (SGLang's PR 32334). Its other drafts name [1, 17, 32], ModelOpt's default, which are outputs of layers.
GPT_OSS_TOKENS, GPT_OSS_LAYERS = 201_088, 36

Read = tuple[FusingSpeculatorConfig, dict[str, Tensor]]


def aux_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Return which ``hidden_states[i]`` of the target a draft reads; None where its format leaves it to the reader.

    Only this function converts between the conventions. A top-level ``eagle_aux_hidden_state_layer_ids`` (speculators,
    vLLM) counts layers that have run: it is ``hidden_states[i]`` already. One inside ``eagle_config`` (SpecForge,
    ModelOpt, SGLang) names the layer whose output is read: ``hidden_states[i + 1]``. So does AngelSlim's
    ``aux_hidden_states_layer_ids``. EAGLE's own files name none.
    """
    inside = config.get("eagle_config") or {}
    places = ((IDS, config, 0), (IDS, inside, 1), (ANGELSLIM_IDS, config, 1))
    # ModelOpt writes an empty list for its default.
    found = next((one for one in places if one[1].get(one[0]) not in (None, [])), None)
    if found is None:
        return None
    name, place, later = found
    ids = place[name]
    if not isinstance(ids, list) or not all(map(is_int, ids)):
        raise ValueError(f"{name} is {ids!r}; list whole numbers, one per hidden state that the draft reads")
    if place is inside and config.get("vocab_size") == GPT_OSS_TOKENS and max(ids) >= GPT_OSS_LAYERS:
        later = 0
    return [i + later for i in ids]


def read_speculators(kind: type[FusingSpeculatorConfig], raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    """Read a draft of ``kind`` from files of the speculators library."""
    raw["speculators_model_type"] = kind.speculators_model_type
    if isinstance(raw.get("speculators_config"), dict):
        raw["speculators_config"]["algorithm"] = kind.speculators_model_type
    rope = raw["transformer_layer_config"].get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:  # of two ropes the library uses this one for all layers
        raw["transformer_layer_config"]["rope_parameters"] = rope["sliding_attention"]
    return with_layer_ids(kind, raw, raw["transformer_layer_config"]["vocab_size"], tensors)


def with_layer_ids(
    kind: type[FusingSpeculatorConfig], raw: dict[str, Any], vocabulary: int, tensors: dict[str, Tensor]
) -> Read:
    """Complete a config by the ``tensors``, and keep the order in which it lists the layers to read."""
    ids = aux_layer_ids(raw)
    raw["eagle_aux_hidden_state_layer_ids"] = ids and sorted(ids)
    config, tensors = completed(kind, raw, vocabulary, tensors)
    # Other projects' files may list ids in any order, on purpose. The constructor refuses that: vLLM would sort them.
    config.eagle_aux_hidden_state_layer_ids = ids
    return config, tensors


def features_in_vllm(config: FusingSpeculatorConfig) -> list[tuple[bool, str]]:
    """Return whether vLLM counts the features of a speculators file wrong, and what it has to say about that."""
    expected, count = config.layers.to_dict().get("num_aux_hidden_states", 3), config.num_features
    is_wrong = config.layers.model_type == "llama" and count != expected
    return [(is_wrong, f"expects {expected} features, not {count}; convert to speculators")]


def sort_features(draft: FusingDraftModel) -> None:
    """Sort the hidden states that the draft reads, in place, and permute the weights that read them accordingly."""
    ids, width = draft.config.eagle_aux_hidden_state_layer_ids, draft.config.feature_size
    if ids is None or ids == sorted(ids):
        return
    order = sorted(range(len(ids)), key=ids.__getitem__)
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order]).to(draft.fc.weight.device)
    with torch.no_grad():
        draft.fc.weight.copy_(draft.fc.weight[:, columns])
        if draft.input_norm is not None:
            draft.input_norm.weight.copy_(draft.input_norm.weight[columns])
    if draft.fc_norm is not None:
        draft.fc_norm = nn.ModuleList(draft.fc_norm[i] for i in order)
    draft.config.eagle_aux_hidden_state_layer_ids = sorted(ids)
