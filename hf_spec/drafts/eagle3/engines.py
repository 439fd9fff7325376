"""Which engines serve an EAGLE-3 draft, and why not: vLLM 0.33, SGLang 0.5.23, llama.cpp's 2026 converter."""

from __future__ import annotations

import os

from ...configuration import GEMMA
from ..files import Checkpoint, applying, as_wide, doubled_prefix, head_in_part, in_speculators, names_target
from ..fusing_files import ANGELSLIM_IDS, IDS, features_in_vllm
from .configuration import Eagle3SpeculatorConfig

# A key that only hf_spec writes into a flat config: norm_output there is not that of an older SpecForge.
SERVED_FLAGS = "served_flags"

Obstacles = list[tuple[bool, str]]


def is_gemma(config: Eagle3SpeculatorConfig) -> bool:
    """Tell whether the draft is made of layers of Gemma 4."""
    return config.layers.model_type == GEMMA


def in_the_way(config: Eagle3SpeculatorConfig, checkpoint: Checkpoint, layout: str) -> dict[str, list[str]]:
    """List by engine why it cannot serve the files of ``checkpoint``; empty if it reads them as meant."""
    return {
        "vLLM": applying(_vllm(checkpoint, layout, config)),
        "SGLang": applying(_sglang(checkpoint, layout, config)),
        "llama.cpp": applying(_llama_cpp(checkpoint, config)),
        "speculators": ["has no layers of Gemma 4"] if is_gemma(config) else _speculators(layout, config),
    }


def _speculators(layout: str, config: Eagle3SpeculatorConfig) -> list[str]:
    beyond = [
        (not config.norm_before_lm_head, "always norms before the head"),
        (not names_target(config), "reads only drafts that name their target; convert with --verifier"),
        *as_wide(config),
    ]
    return in_speculators(config, layout, applying(beyond))


def unserved(config: Eagle3SpeculatorConfig) -> dict[str, list[str]]:
    """List by engine why it cannot serve such a draft in any layout."""
    trained = config.embed_requires_grad and config.feature_size == config.layers.hidden_size
    return {
        "vLLM": applying(_beyond_vllm(config)),
        "SGLang": beyond_flat(config) + ["replaces trained embeddings by the target's"] * trained,
        "llama.cpp": applying(_beyond_llama_cpp(config)),
    }


def beyond_flat(config: Eagle3SpeculatorConfig) -> list[str]:
    """List what no reader of a flat layout supports."""
    layers, ids = config.layers, config.eagle_aux_hidden_state_layer_ids or [1]
    return applying(
        [
            (layers.model_type != "llama", f"has llama layers only, not {layers.model_type}"),
            (layers.num_hidden_layers > 1, "norms the later layers of a draft differently"),
            (layers.attention_bias, "has no bias in the attention"),
            (getattr(layers, "mlp_bias", False), "has no bias in the MLP"),
            (
                config.num_features * config.feature_size == layers.hidden_size,
                "takes a single feature for a state fed back",
            ),
            *head_in_part(config),
            ("sliding_attention" in (getattr(layers, "layer_types", None) or ()), "has no sliding window"),
            (config.norm_before_residual, "does not know norm_before_residual"),
            (not config.norm_before_lm_head, "always norms before the head"),
            (min(ids) < 1, "reads outputs of layers, so not the embeddings (layer id 0)"),
        ]
    )


def beyond_eagle3(config: Eagle3SpeculatorConfig) -> list[str]:
    """List what readers of SafeAILab's layout do not support."""
    ids = config.eagle_aux_hidden_state_layer_ids
    flags = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    found = beyond_flat(config) + [f"does not know {name}" for name in flags]
    return found if _default_ids(ids) else [*found, f"always reads hidden_states[2, n // 2, n - 3], not {ids}"]


def _vllm(checkpoint: Checkpoint, layout: str, config: Eagle3SpeculatorConfig) -> Obstacles:
    raw, ids, nested = checkpoint.config, config.eagle_aux_hidden_state_layer_ids or [], layout == "speculators"
    given = raw.get(IDS) or (raw.get("eagle_config") or {}).get(IDS)  # which vLLM reads as they are
    name = (config.speculators_config or {})["verifier"].get("name_or_path")
    both = "speculators" if beyond_flat(config) else "sglang, which names both"
    return [
        (ids != sorted(ids), f"sorts the layer ids {ids} and so permutes the features; convert to speculators"),
        (
            nested and (not name or os.path.exists(name)),
            "needs --speculative-config: verifier.name_or_path is no Hub id",
        ),
        (nested and "norm_before_residual" not in raw, "takes the missing norm_before_residual for True"),
        (bool(given) and given != ids, f"reads the layer ids of eagle_config one too low; convert to {both}"),
        (
            ANGELSLIM_IDS in raw and not given and not _default_ids(ids),
            f"does not know {ANGELSLIM_IDS}; convert to {both}",
        ),
        ((doubled := doubled_prefix(checkpoint.tensors)) is not None, f"{doubled}; convert to {both}"),
        *(features_in_vllm(config) if nested else ()),
        *_beyond_vllm(config),
    ]


def _beyond_vllm(config: Eagle3SpeculatorConfig) -> Obstacles:
    biased = config.layers.model_type == "qwen3" and config.layers.attention_bias
    return [
        (is_gemma(config), "serves no EAGLE-3 of Gemma 4's layers"),
        (not config.norm_before_lm_head, "always norms before the head"),
        (biased, "has no bias in the output of qwen3's attention"),
        *head_in_part(config),
    ]


def _sglang(checkpoint: Checkpoint, layout: str, config: Eagle3SpeculatorConfig) -> Obstacles:
    raw, ids, nested = checkpoint.config, config.eagle_aux_hidden_state_layer_ids, layout == "speculators"
    outputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    cure = "" if beyond_flat(config) else "; convert to sglang"
    return [
        (nested, f"does not read this config{cure}"),
        (not nested and not outputs and not _default_ids(ids), f"reads layer ids from eagle_config only{cure}"),
        *((True, sentence) for sentence in unserved(config)["SGLang"]),
    ]


def _llama_cpp(checkpoint: Checkpoint, config: Eagle3SpeculatorConfig) -> Obstacles:
    missing = "draft_vocab_size" not in checkpoint.config
    return [
        (missing, "recognises EAGLE-3 by draft_vocab_size, which is missing"),
        *_beyond_llama_cpp(config),
    ]


def _beyond_llama_cpp(config: Eagle3SpeculatorConfig) -> Obstacles:
    ids, count = config.eagle_aux_hidden_state_layer_ids, config.layers.num_hidden_layers
    changed = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    return [
        (is_gemma(config), "has no layers of Gemma 4"),
        (count != 1, f"reads drafts with num_hidden_layers 1, not {count}"),
        (bool(changed), f"does not know {', '.join(changed)}"),
        (not _default_ids(ids), f"always reads hidden_states[2, n // 2, n - 3], not {ids}"),
        (not config.norm_before_lm_head, "always norms before the head"),
    ]


def _default_ids(ids: list[int] | None) -> bool:
    """Tell whether ``ids`` are the default for some number n of target layers: [2, n // 2, n - 3]."""
    return ids is None or (len(ids) == 3 and ids == [2, (ids[2] + 3) // 2, ids[2]])
