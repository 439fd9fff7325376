"""EAGLE-3 drafts in files: of the speculators library, SafeAILab, SpecForge, DeepSpec and ModelOpt.

=============== ================================================  ==========================================
format          how it is recognised                              what its files do not say
=============== ================================================  ==========================================
``speculators`` ``speculators_model_type`` eagle3                 nothing
``specforge``   ``LlamaForCausalLMEagle3`` and ``midlayer.*``     which of two meanings ``norm_output`` has
``eagle3``      other ``midlayer.*`` (SafeAILab's own)            the layers read, rope base, layer count
``deepspec``    ``target_layer_ids``, otherwise as ``modelopt``   nothing; ids are outputs of layers
``modelopt``    ``layers.0.hidden_norm`` in a flat config         no ``t2d``
=============== ================================================  ==========================================

Numbers of layers, biases, norms and vocabularies are taken from the tensors: some published configs are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from torch import Tensor
from transformers.utils import logging

from ...config_keys import Known, flat_keys, known
from ...configuration import default_speculators_config
from ..files import (
    Files,
    Format,
    flat_layers,
    is_speculators,
    needed,
    short_names,
    sort_vocabulary,
    speculators_format,
)
from ..fusing_files import ANGELSLIM_IDS, IDS, Read, aux_layer_ids, read_speculators, with_layer_ids
from .configuration import Eagle3SpeculatorConfig
from .engines import SERVED_FLAGS, beyond_eagle3, beyond_flat

logger = logging.get_logger(__name__)

FLAGS = known("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "draft_vocab_size", IDS)
# Keys of flat configs beyond those of the layers. ModelOpt's other flags are known with one value each.
FLAT_KEYS: Known = FLAGS | {
    **known("bias", "num_aux_hidden_states", "target_hidden_size", SERVED_FLAGS),
    **known("draft_num_hidden_layers", "num_target_layers", "step_loss_decay", "target_layer_ids"),  # DeepSpec's
    **known("target_model_name_or_path", "ttt_length", ANGELSLIM_IDS),
    **known("target_model_type", "reuse_target_lm_head"),  # SpecForge's, for its training
    "additional_fc": False,
    "eagle_config": FLAGS
    | {
        **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
        **{"next_layer_regular": True, "parallel_draft_step": 1, "use_mtp_layernorm": False},
    },
}

# -- reading ----------------------------------------------------------------------------------------------------------


def _is_specforge(config: dict[str, Any], names: Collection[str]) -> bool:
    return _is_safeailab(config, names) and "LlamaForCausalLMEagle3" in (config.get("architectures") or ())


def _is_safeailab(config: dict[str, Any], names: Collection[str]) -> bool:
    return "midlayer.hidden_norm.weight" in short_names(names)


def _is_modelopt(config: dict[str, Any], names: Collection[str]) -> bool:
    return "layers.0.hidden_norm.weight" in short_names(names) and not is_speculators(config)


def _read_speculators(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    return read_speculators(Eagle3SpeculatorConfig, raw, tensors)


def _read_flat(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    return _flat(raw, needed(tensors))


def _is_deepspec(config: dict[str, Any], names: Collection[str]) -> bool:
    return _is_modelopt(config, names) and "target_layer_ids" in config


def _read_deepspec(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": raw["target_layer_ids"]}  # outputs of layers as well
    config, tensors = _flat(raw, needed(tensors))
    if (length := raw.get("ttt_length")) is not None:
        (config.speculators_config or {})["proposal_methods"][0]["speculative_tokens"] = length
        config.validate()
    return config, tensors


def _read_specforge(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    written = raw.get("norm_output")
    if written is not None and SERVED_FLAGS not in raw:
        logger.warning_once(
            f"config.json says norm_output: {json.dumps(written)}, which is read as SGLang and vLLM do, and SpecForge "
            "since September 2026 (its PR 879). If an older SpecForge trained the draft, convert it (hf-spec convert) "
            f"and set {'norm_output' if written else 'norm_before_lm_head'} to false in the new config.json"
        )
    return _flat(raw, needed(tensors))


def _flat(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    flags = raw | (raw.get("eagle_config") or {})
    ids = aux_layer_ids(raw)
    norms = sum(name.startswith("fc_norm.") for name in tensors)
    count = norms or (len(ids) if ids else 3)
    layers = flat_layers(raw, tensors)
    sort_vocabulary(tensors)
    width = tensors["fc.weight"].shape[-1] // count if "fc.weight" in tensors else layers.hidden_size
    given = {
        "transformer_layer_config": layers,
        "speculators_config": default_speculators_config("eagle3"),
        "eagle_aux_hidden_state_layer_ids": ids,
        "target_hidden_size": None if width == layers.hidden_size else width,
        "norm_before_residual": bool(flags.get("norm_before_residual", False)),
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": norms > 0,
        "norm_output": bool(flags.get("norm_output", False)),
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
    }
    return with_layer_ids(Eagle3SpeculatorConfig, given, layers.vocab_size, tensors)


def _keys(config: dict[str, Any], names: Collection[str]) -> Known:
    return flat_keys(config, names, FLAT_KEYS)


FORMATS = (
    speculators_format("eagle3", _read_speculators),
    Format("specforge", _is_specforge, _read_specforge, keys=_keys),
    Format("eagle3", _is_safeailab, _read_flat, owner="SafeAILab", keys=_keys),
    Format("deepspec", _is_deepspec, _read_deepspec, owner="DeepSpec", keys=_keys),
    Format("modelopt", _is_modelopt, _read_flat, keys=_keys),
)


# -- writing ----------------------------------------------------------------------------------------------------------


def write_eagle3(draft: Any) -> Files:
    """Write the layout of SafeAILab, for llama.cpp and TensorRT-LLM."""
    _refuse("eagle3", beyond_eagle3(draft.config))
    return _written(draft, {"architectures": ["LlamaForCausalLM"]})


def write_sglang(draft: Any) -> Files:
    """Write the same with ``eagle_config``, for SGLang and vLLM."""
    config: Eagle3SpeculatorConfig = draft.config
    _refuse("sglang", beyond_flat(config))
    more: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], SERVED_FLAGS: True}
    more |= {name: getattr(config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    more["eagle_config"] = {"use_aux_hidden_state": True}
    if (ids := config.eagle_aux_hidden_state_layer_ids) is not None:
        more["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]
    if "lm_head" in (config.shared_with_target or ()):
        more["draft_vocab_size"] = None  # only then SGLang uses the target's output layer
    return _written(draft, more)


def _refuse(layout: str, found: list[str]) -> None:
    if found:
        raise ValueError(
            f"the {layout} layout cannot express this draft, because its readers: it {'; it '.join(found)}"
        )


def _written(draft: Any, more: dict[str, Any]) -> Files:
    config: Eagle3SpeculatorConfig = draft.config
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.state_dict().items()}
    ids, layers = config.eagle_aux_hidden_state_layer_ids, config.layers
    rope = layers.rope_parameters
    raw = layers.to_diff_dict() | {
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "bias": False,
        "rope_theta": rope["rope_theta"],  # for readers older than rope_parameters
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    if config.target_hidden_size is not None:
        raw["target_hidden_size"] = config.target_hidden_size
    if ids is not None:
        raw["eagle_aux_hidden_state_layer_ids"] = ids  # for vLLM
    return Files(tensors, config=raw | more)
