"""MTP layers in files: of the speculators library, and in the checkpoints of Qwen3-Next, Qwen3.5 and MiMo.

transformers drops the MTP layers of those targets. It loads those of other targets itself (``TargetMtp``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ...config_keys import Known, keys_of_layers, known
from ...configuration import TARGET_SIZES, default_speculators_config
from ..files import Files, Format, applying, config_of, in_speculators, renamed, shared_with_target, speculators_format
from .configuration import MTP_FLAGS, MTPSpeculatorConfig

# Prefixes of tensor names: in the target's checkpoint -> in our files, which use those of speculators.
NATIVE_NAMES = {
    "qwen": {
        "mtp.fc.": "mtp_layers.0.input_proj.",
        "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
        "mtp.norm.": "mtp_layers.0.final_layernorm.",
        "mtp.layers.0.": "mtp_layers.0.",
    },
    "mimo": {"model.mtp_layers.0.": "mtp_layers.0."},
}
# How vLLM 0.33 runs them: whether features are after the target's final norm, whether feedback is after the layer's
# own norm, and whether the hidden state comes before the embedding.
NATIVE_FLAGS: dict[str, dict[str, Any]] = {
    "qwen": dict(zip(MTP_FLAGS, (True, True, False), strict=True)),
    "mimo": dict(zip(MTP_FLAGS, (False, False, True), strict=True)),
}
NATIVE_KEYS = known("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers", "quantization_config") | {
    **known("full_attention_interval", "mamba_ssm_dtype", "partial_rotary_factor"),
    **{"attn_output_gate": True, "mtp_use_dedicated_embeddings": False},  # other values would be another layer
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _read_speculators(
    raw: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[MTPSpeculatorConfig, dict[str, Tensor]]:
    """Read a draft of the speculators library, whose config describes the target's layers and not the draft's one.

    By default the features are those that the library trains with: before the final norm.
    """
    is_dense = "mtp_layers.0.mlp.gate_proj.weight" in tensors
    raw["transformer_layer_config"] = _one_layer(raw["transformer_layer_config"], is_dense)
    raw.setdefault("features_after_norm", False)
    raw["shared_with_target"] = shared_with_target(tensors)
    return config_of(MTPSpeculatorConfig, raw), _stack_experts(tensors)


def _read_native(raw: dict[str, Any], given: dict[str, Tensor]) -> tuple[MTPSpeculatorConfig, dict[str, Tensor]]:
    """Read the MTP layer in a target's checkpoint; ``raw`` is the config of the target."""
    family = "qwen" if "mtp.fc.weight" in given else "mimo"
    names = NATIVE_NAMES[family]
    tensors = _stack_experts(renamed(given, names))
    speculators_config = default_speculators_config("mtp")
    text = raw.get("text_config") or raw
    sizes = {name: text[name] for name in TARGET_SIZES if name in text}
    speculators_config["verifier"] |= {"architectures": raw.get("architectures") or [], **sizes}
    config = MTPSpeculatorConfig(
        transformer_layer_config=_one_layer(raw, is_dense="mtp_layers.0.mlp.gate_proj.weight" in tensors),
        speculators_config=speculators_config,
        shared_with_target=["embed_tokens", "lm_head"],
        dtype=raw.get("dtype", raw.get("torch_dtype")),
        **NATIVE_FLAGS[family],
    )
    return config, tensors


def _native_keys(config: dict[str, Any], names: Collection[str]) -> Known:
    """Return the known keys of a target's config, which may have one of its text decoder inside."""
    kind = str(config.get("model_type"))
    own = {**keys_of_layers("qwen2" if kind == "mimo" else kind), **NATIVE_KEYS}
    text = config.get("text_config")
    inside = keys_of_layers(str(text.get("model_type"))) if isinstance(text, dict) else {}
    return own | {"text_config": {**inside, **NATIVE_KEYS}}


FORMATS = (
    speculators_format("mtp", _read_speculators),
    Format(
        "mtp",
        lambda config, names: "mtp.fc.weight" in names or "model.mtp_layers.0.input_proj.weight" in names,
        _read_native,
        inside_target=("mtp.", "model.mtp_layers."),
        keys=_native_keys,
    ),
)


def write_native(draft: Any) -> Files:
    """Write our layer under the names of its target, to be added to its files and their index.

    Errors: a ValueError for targets without such a layer.
    """
    config: MTPSpeculatorConfig = draft.config
    tensors: dict[str, Tensor] = draft.state_dict()
    if (reason := why_not_native(config)) is not None:
        raise ValueError(reason)
    names = {ours: native for native, ours in NATIVE_NAMES[_family(config)].items()}
    if config.layers.model_type == "qwen3_next":
        tensors = _unstack_experts(tensors)
    return Files(renamed(tensors, names), "mtp.safetensors")


def _family(config: MTPSpeculatorConfig) -> str:
    """Return the family of targets with such a layer; empty if there is none."""
    kind = config.layers.model_type
    return "qwen" if kind.startswith(("qwen3_next", "qwen3_5")) else "mimo" if kind == "qwen2" else ""


def why_not_native(config: MTPSpeculatorConfig) -> str | None:
    """Return why the layer cannot be written as in its target, or ``None`` if it can."""
    if not (family := _family(config)):
        return (
            f"the layer is one of {config.layers.model_type}; only those of Qwen3-Next, Qwen3.5 and MiMo are written "
            "as in their targets"
        )
    for name, expected in NATIVE_FLAGS[family].items():
        if getattr(config, name) != expected:
            return f"{name} is {getattr(config, name)}, but the engines run such a layer as if {expected}"
    return None


def in_the_way(config: MTPSpeculatorConfig, layout: str) -> dict[str, list[str]]:
    """List by engine why it cannot serve files in ``layout``; empty if it reads them as meant."""
    kind, known = config.layers.model_type, ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    beyond = applying(
        [
            (kind not in known, f"has layers of {', '.join(known)} only, not of {kind}"),
            (config.hidden_first, "projects the embedding before the hidden state"),
            (not config.feedback_after_norm, "feeds the output back after the last norm"),
        ]
    )
    found = {"vLLM": []} if layout == "mtp" else unserved(config)
    return found | {"speculators": in_speculators(config, layout, beyond)}


def unserved(config: MTPSpeculatorConfig) -> dict[str, list[str]]:
    """List by engine why it cannot serve such a layer outside its target."""
    cure = "; convert to native" if why_not_native(config) is None else ""
    return {"vLLM": [f"reads such a layer only as a part of its target{cure}"]}


def _one_layer(raw: dict[str, Any], is_dense: bool) -> Any:
    """Return the config of one full-attention layer of the target with config ``raw``, at whatever depth it is."""
    kind = "qwen2" if raw["model_type"] == "mimo" else raw["model_type"]  # MiMo's layers are those of Qwen2
    given = {name: value for name, value in raw.items() if name != "model_type"}
    layers = copy.deepcopy(AutoConfig.for_model(kind, **given).get_text_config(decoder=True))
    one_layer = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_only_layers": [0] if is_dense else [],
        "decoder_sparse_step": 1,
    }
    for name, value in one_layer.items():
        if hasattr(layers, name):
            setattr(layers, name, value)
    return layers


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of experts: files may hold one tensor per expert, transformers' layers hold one for all."""
    found = [match for name in tensors if (match := EXPERT.fullmatch(name))]
    stacked = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for place in {match[1] for match in found}:
        count = 1 + max(int(match[2]) for match in found if match[1] == place)
        parts = {
            part: [tensors[f"{place}.{expert}.{part}_proj.weight"] for expert in range(count)]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        stacked[f"{place}.gate_up_proj"] = torch.stack(both)  # (experts, 2 x expert width, hidden)
        stacked[f"{place}.down_proj"] = torch.stack(parts["down"])
    return stacked


def _unstack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        if not place.endswith(".experts"):
            single[name] = tensor
        elif part == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                single |= {f"{place}.{expert}.gate_proj.weight": gate, f"{place}.{expert}.up_proj.weight": up}
        else:
            single |= {f"{place}.{expert}.{part}.weight": weight for expert, weight in enumerate(tensor)}
    return single
