"""Which keys of a draft's config are known: all others are told to the user, so that no file is misread silently."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import logging

from .untrusted import printable

logger = logging.get_logger(__name__)

# A table of known keys maps each to ``ANY``, to the only value that is known, to a table for the keys inside, or to a
# list of one such table.
Known = Mapping[str, Any]
ANY: Any = object()

# What transformers writes, or wrote, into every config, and what describes no draft.
PASSING = frozenset(PreTrainedConfig().to_dict()) | {
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation"),
    *("add_cross_attention", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens"),
    *("bos_token_id", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "experts_implementation"),
    *("exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id"),
    *("is_decoder", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
    *("num_beams", "num_return_sequences", "output_scores", "pad_token_id", "prefix", "pretraining_tp"),
    *("pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id"),
    *("suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder"),
    *("tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "typical_p"),
    *("unk_token_id", "use_bfloat16", "use_cache"),
}
WINDOWS = ("max_window_layers", "sliding_window", "use_sliding_window")


def known(*names: str) -> dict[str, Any]:
    """Return a table in which these keys may have any value."""
    return dict.fromkeys(names, ANY)


def unknown_keys(given: Mapping[str, Any], table: Known, place: str = "") -> list[str]:
    """List what ``given``, a config's JSON, holds beyond ``table``, as ``key``, ``outer.key`` or ``key=value``.

    A key without a value (null) says nothing and is not listed.
    """
    found = []
    for name, value in given.items():
        here = f"{place}{name}"
        if value is None:
            continue
        if name not in table:
            found.append(here)
            continue
        meant = table[name]
        if isinstance(meant, Mapping):
            found += unknown_keys(value, meant, f"{here}.") if isinstance(value, Mapping) else []
        elif isinstance(meant, list):
            items: Iterable[Any] = value if isinstance(value, list) else ()
            inside = [unknown_keys(one, meant[0], f"{here}.") for one in items if isinstance(one, Mapping)]
            found += [one for group in inside for one in group]
        elif meant is not ANY and (meant != value or isinstance(meant, bool) is not isinstance(value, bool)):
            found.append(f"{here}={value!r}")
    return found


def warn_of_unknown(path: str, found: Collection[str]) -> None:
    """Warn once of the keys ``found`` in the config of the draft at ``path``."""
    if found:
        keys = printable(", ".join(sorted(found)))
        logger.warning_once(
            f"config.json of {path} has keys that hf_spec does not know: {keys}. The draft is read as if they were "
            "not there. The text stays the target's; if few draft tokens are accepted, the draft may be of a kind "
            "that hf_spec does not read"
        )


@functools.lru_cache
def keys_of_layers(model_type: str) -> Known:
    """Return the keys that transformers knows for layers of ``model_type``; only ``PASSING`` for an unknown one."""
    names = set(PASSING)
    if model_type in CONFIG_MAPPING:
        config = AutoConfig.for_model(model_type)
        names |= {*config.to_dict(), *config.attribute_map, "rope_scaling", "rope_theta"}
    return known(*names)


def flat_keys(config: Mapping[str, Any], names: Collection[str], own: Known) -> Known:
    """Return the known keys of a flat config: those of its decoder layers, and ``own`` of its format.

    ``names`` of the tensors tell what the layers are, as in ``flat_layers``.
    """
    kind = "qwen3" if any(name.endswith("layers.0.self_attn.q_norm.weight") for name in names) else "llama"
    more: dict[str, Any] = known("layer_types")
    if str(config.get("model_type")).startswith("gemma4"):
        kind = "gemma4_text"
        more = known("global_head_dim", "num_global_key_value_heads")
    elif kind == "llama" and not config.get("use_sliding_window", True):
        more |= known(*WINDOWS)  # which say that there is no window
    if "sliding_attention" in (config.get("layer_types") or ()):  # of llama, too: see ``flat_layers``
        more |= known("sliding_window")
    return {**keys_of_layers(kind), **more, **own}
