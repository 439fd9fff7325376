"""Block drafts in files: what the formats of all kinds have in common, and which engines serve them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from ..config_keys import Known, flat_keys, known
from ..configuration import GEMMA, default_speculators_config
from ..settings import is_int
from .blocks import SCALES, BlockSpeculatorConfig
from .files import (
    SPECULATORS,
    Checkpoint,
    Files,
    Format,
    applying,
    as_wide,
    completed,
    doubled_prefix,
    flat_layers,
    head_in_part,
    in_speculators,
    is_speculators,
    names_target,
    needed,
    sort_vocabulary,
    speculators_format,
)

Read = tuple[BlockSpeculatorConfig, dict[str, Tensor]]

# Keys of flat configs that engines read and hf_spec does not, with the value that changes nothing.
NOT_DONE = {
    **{"attention_sink_bias": False, "attention_value_scale": 1.0, "is_neox_style": True, "use_swa": False},
    **{"rope_is_neox_style": True, "use_aux_hidden_state": True, "draft_shift": 0},
}
FLAT_KEYS: Known = known("block_size", "mask_token_id", "target_layer_ids", "is_causal", "causal", "causal_head") | {
    **known("draft_vocab_size"),  # which the tensors tell
    **known("num_target_layers", "target_hidden_size", "target_model_name_or_path", *SCALES, *NOT_DONE),
    **known("embeds_as_target"),  # which hf_spec writes for JetSpec's drafts
    **known("swa_window_size"),  # means something with use_swa only
    **known("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "num_anchors"),
    **known("confidence_head_alpha"),  # SpecForge's weight of a loss
    "attention_mode": "gqa",
}
# Where flat configs keep keys: z-lab, and for the heads of DSpark SpecForge.
INSIDE = ("dflash_config", "dspark_config")
# Engines have no default for these ids. Configs made by `for_target` hold them.
NAME_LAYERS = "write aux_hidden_state_layer_ids into config.json: [2, n // 2, n - 3] of the target's n layers"


def block_format(kind: type[BlockSpeculatorConfig]) -> Format:
    """Return the format of the speculators library for block drafts of one kind."""

    def read(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
        return completed(kind, raw, raw["transformer_layer_config"]["vocab_size"], tensors)

    return speculators_format(kind.speculators_model_type, read)


def read_flat(
    kind: type[BlockSpeculatorConfig], raw: dict[str, Any], tensors: dict[str, Tensor], **given: Any
) -> Read:
    """Read a flat config, in which the fields of the decoder layers are at the top level; ``given`` are the others."""
    tensors = needed(tensors)
    sort_vocabulary(tensors)
    layers = flat_layers(raw, tensors)
    scales = {name: float(raw[name]) for name in SCALES if raw.get(name)}
    if layers.model_type == GEMMA:  # whose layers have a cap of their own, by the same key
        scales.pop("final_logit_softcapping", None)
    given |= _causality(raw, layers.layer_types) | scales
    if layers.model_type != GEMMA:  # which scale themselves
        # JetSpec's own code, whose files have this key alone, calls the target's embeddings.
        says_more = any(raw.get(name) is not None for name in ("causal", "input_embedding_scale"))
        given["embeds_as_target"] = bool(raw.get("embeds_as_target", raw.get("causal_head") and not says_more))
    width = tensors["fc.weight"].shape[-1] // len(given["aux_hidden_state_layer_ids"])
    speculators_config = default_speculators_config(kind.speculators_model_type)
    speculators_config["verifier"]["name_or_path"] = raw.get("target_model_name_or_path")
    given |= {
        "transformer_layer_config": layers,
        "target_hidden_size": None if width == layers.hidden_size else width,
        "block_size": raw["block_size"],
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
    }
    config, tensors = completed(kind, given, layers.vocab_size, tensors)
    speculators_config["proposal_methods"][0]["speculative_tokens"] = config.num_draft_tokens
    config.speculators_config = speculators_config
    config.validate()
    return config, tensors


def merged_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge ``INSIDE`` into a flat config: their keys win over those at the top level, as z-lab reads them."""
    merged = dict(raw)
    for place in INSIDE:
        if isinstance(given := raw.get(place), dict):
            merged |= {name: one for name, one in given.items() if one is not None}
    return merged


def looked_up(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``merged_keys``. Errors: a ValueError for what hf_spec does not do."""
    merged = merged_keys(raw)
    for name, plain in NOT_DONE.items():
        if merged.get(name) not in (None, plain):
            raise ValueError(
                f"{name} is {merged[name]!r}, and hf_spec reads block drafts without it only: serve the draft in "
                "vLLM, or take another one"
            )
    if merged.get("target_hidden_size") not in (None, merged.get("hidden_size")):
        raise ValueError(
            f"target_hidden_size is {merged['target_hidden_size']!r}, but hidden_size {merged.get('hidden_size')!r}: "
            "JetSpec's adapter between two widths has random weights; train a draft for this target"
        )
    return merged


def _causality(raw: dict[str, Any], kinds: Sequence[str]) -> dict[str, bool]:
    """Tell which slots of a block see which, by z-lab's rule and its readers'.

    ``is_causal`` decides for every layer, otherwise NeMo's ``causal``, otherwise JetSpec's ``causal_head``. If the
    file says nothing, sliding layers are causal and full ones are not.
    """
    said = {name: raw[name] for name in ("is_causal", "causal") if raw.get(name) is not None}
    if raw.get("causal_head"):
        said["causal_head"] = True
    if len({bool(value) for value in said.values()}) > 1:
        raise ValueError(f"{said} contradict each other: ask who made the draft whether its blocks are causal")
    causal = next(iter(said.values()), None)
    if causal is None:
        return {"sliding_window_non_causal": "sliding_attention" not in kinds}
    return {"block_causal": bool(causal), "sliding_window_non_causal": not causal}


def flat_block_keys(config: dict[str, Any], names: Collection[str], **own: Any) -> Known:
    """Return the known keys of a flat config of a block draft, at the top level or inside ``INSIDE``; ``own`` too."""
    table = {**FLAT_KEYS, **own}
    return flat_keys(config, names, {**table, **dict.fromkeys(INSIDE, table)})


def outputs_of_layers(ids: Any) -> list[int]:
    """Turn ``target_layer_ids`` (layers whose output is read; -1 is the embedding) into ids of ``hidden_states``."""
    if not isinstance(ids, list) or not ids or not all(is_int(i) and i >= -1 for i in ids):
        raise ValueError(
            f"target_layer_ids is {ids!r}; list the layers of the target whose outputs the draft reads, as the "
            "draft's card or training recipe says: no rule gives them for all published drafts"
        )
    return [i + 1 for i in ids]


def write_flat(draft: Any, unsaid: Sequence[tuple[bool, str]], **more: Any) -> Files:
    """Write the layers' config at the top level, together with the fields in ``more``.

    Errors: a ValueError for what the layout cannot express. ``unsaid`` lists it in pairs: whether this draft has it,
    and what it is.
    """
    config: BlockSpeculatorConfig = draft.config
    found = applying(
        [
            (config.draft_vocab_size != config.layers.vocab_size, "has a vocabulary of its own"),
            (config.aux_hidden_state_layer_ids is None, f"does not name the layers it reads ({NAME_LAYERS})"),
            *unsaid,
        ]
    )
    if found:
        raise ValueError(f"this flat layout cannot express a draft that {', and '.join(found)}; use to='speculators'")
    raw = _flat_shape(config.layers) | {
        "block_size": config.block_size,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }
    return Files(draft.state_dict(), config=raw | more)


def write_zlab(draft: Any, architecture: str, **own: Any) -> Files:
    """Write the layout of z-lab, whose readers share the target's embeddings and head; ``own`` are further keys."""
    config: BlockSpeculatorConfig = draft.config
    slides = "sliding_attention" in config.layer_kinds
    unsaid = [
        (config.sample_from_anchor, "drafts from the root's slot"),
        (slides and not config.sliding_window_per_slot, "ends its windows at the root"),
        (set(config.shared_with_target or ()) != {"embed_tokens", "lm_head"}, "has embeddings or a head of its own"),
    ]
    given: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": layer_outputs(config)}
    given |= own | config.scales
    more: dict[str, Any] = {}
    if config.block_causal:
        given |= {"causal": True, "causal_head": True}  # for vLLM, and for JetSpec's own code
    if config.embeds_as_target:
        given["embeds_as_target"] = True
    if config.block_causal or config.sliding_window_non_causal or not slides:
        more = {"is_causal": config.block_causal}  # otherwise sliding layers are causal alone, which no key says
    return write_flat(draft, unsaid, architectures=[architecture], dflash_config=given, **more)


def _flat_shape(layers: Any) -> dict[str, Any]:
    """Return the fields of the decoder layers; for Gemma 4's full attention, the shape under both of its names."""
    raw: dict[str, Any] = layers.to_diff_dict()
    if layers.model_type == GEMMA:
        raw.pop("per_layer_config", None)
        raw |= {"global_head_dim": layers.head_dim, "num_global_key_value_heads": layers.num_key_value_heads}
    return raw


def layer_outputs(config: BlockSpeculatorConfig) -> list[int]:
    """Return the layers whose outputs the draft reads, numbered as in flat configs; -1 is the embedding."""
    return [i - 1 for i in config.aux_hidden_state_layer_ids or ()]


# -- which engines serve them: vLLM 0.33, SGLang 0.5.23 and llama.cpp's 2026 converter -------------------------------


def engines(
    config: BlockSpeculatorConfig, checkpoint: Checkpoint | None, unserved: list[str], layout: str
) -> dict[str, list[str]]:
    """List by engine why it cannot serve this draft: the reasons in ``unserved``, and what these files do not say.

    ``unserved`` holds for all engines. ``layout`` is the flat one that SGLang and llama.cpp read.
    """
    found = {engine: list(unserved) for engine in ("vLLM", "SGLang", "llama.cpp")}
    nested = checkpoint is not None and is_speculators(checkpoint.config)
    if config.layers.model_type == GEMMA:
        found["vLLM"] += [f"reads layers of Gemma 4 in another layout only; convert to {layout}"] * nested
        for engine in ("SGLang", "llama.cpp"):
            found[engine].append("is not known to serve drafts of Gemma 4's layers")
    window = "sliding_attention" in config.layer_kinds and getattr(config.layers, "sliding_window", None)
    if window and not config.sliding_window_per_slot:
        found["vLLM"].append("ends windows at each slot, where the draft was trained to end them at the root")
    if config.block_causal:
        found["llama.cpp"].append("is not known to have causal blocks")
    found["vLLM"] += applying([*head_in_part(config), *_scales_in_vllm(config, nested)])
    causal = config.block_causal and "full_attention" in config.layer_kinds  # vLLM takes sliding layers for causal
    if checkpoint is not None and not nested and causal and not _tells_vllm(checkpoint.config):
        cure = "convert to dflash" if layout == "dflash" else "set is_causal to true"
        found["vLLM"].append(f"is not told is_causal and lets slots see later ones; {cure}")
    if checkpoint is not None and (doubled := doubled_prefix(checkpoint.tensors)) is not None:
        found["vLLM"].append(f"{doubled}; convert to {layout}")
    if not nested:
        return found
    if not (config.block_causal or config.sliding_window_non_causal) and "full_attention" in config.layer_kinds:
        cure = "" if window else "; set it to true"
        found["vLLM"].append(f"takes sliding_window_non_causal: false for causal blocks in full layers too{cure}")
    name = (config.speculators_config or {})["verifier"].get("name_or_path")
    if not name or os.path.exists(name):
        found["vLLM"].append("needs --speculative-config: verifier.name_or_path is no Hub id")
    if config.aux_hidden_state_layer_ids is None:
        found["vLLM"].append(f"is not told the layers to read; {NAME_LAYERS}")
    for engine in ("SGLang", "llama.cpp"):
        found[engine].append(f"does not read this config; convert to {layout}")
    return found | {"speculators": in_speculators(config, SPECULATORS.name, applying(_beyond_speculators(config)))}


def _scales_in_vllm(config: BlockSpeculatorConfig, nested: bool) -> list[tuple[bool, str]]:
    scales, applied = config.scales, config.speculators_model_type == "dflash2"  # of which vLLM applies z-lab's
    return [
        (bool(scales) and not applied, f"leaves out {', '.join(scales)}"),
        (bool(scales) and applied and nested, "reads scales and caps in another layout only; convert to dflash"),
        (
            config.embeds_as_target and config.input_embedding_scale == 1,
            "leaves out embeds_as_target, which matters if the target scales its embeddings (Gemma)",
        ),
    ]


def _tells_vllm(raw: dict[str, Any]) -> bool:
    """Tell whether a flat config says in vLLM's words which slots see which."""
    inside = raw.get("dflash_config")
    return raw.get("is_causal") is not None or (isinstance(inside, dict) and inside.get("causal") is not None)


def _beyond_speculators(config: BlockSpeculatorConfig) -> list[tuple[bool, str]]:
    window = getattr(config.layers, "sliding_window", None)
    slides, lent = "sliding_attention" in config.layer_kinds, config.shared_with_target or ()
    whole = config.draft_vocab_size in (None, config.layers.vocab_size)  # the head of a part of it is kept
    own = [name for name in ("embed_tokens", *["lm_head"] * whole) if name not in lent]
    return [
        (config.layers.model_type == GEMMA, "has no layers of Gemma 4"),
        (
            config.block_causal and "full_attention" in config.layer_kinds,
            "lets the slots of full layers see later ones",
        ),
        (
            slides and not window and not config.sliding_window_non_causal,
            "takes sliding layers without a window for full ones",
        ),
        (bool(slides and window and config.sliding_window_per_slot), "ends windows at the root"),
        (bool(config.scales), f"does not know {', '.join(config.scales)}"),
        (getattr(config, "scored_as_target", False), "does not look the vocabulary and scales of the target up"),
        (
            bool(own) and names_target(config),
            f"replaces {' and '.join(own)} by the target's, which must be the same",
        ),
        (config.aux_hidden_state_layer_ids is None, f"is not told the layers to read; {NAME_LAYERS}"),
        *as_wide(config),
    ]
