"""What speculative continuous batching does not support: options that are refused, or switched off with a warning."""

from __future__ import annotations

import copy
import sys
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from ..decode.refusals import OTHER_WAYS, Refusal, refuse_draft, refuse_growing_rope
from ..drafts.base import Speculator
from ..invariance.mode import is_invariant
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from ..verify.processors import STATELESS
from ..versions import CONTINUOUS_BATCHING, older_than
from .sizes import longest_of

GENERATE = "generate(..., speculator=...)"
PADDED = f"pass the prompts, padded on the left, to {GENERATE}"
# Fields of a ContinuousBatchingConfig that users may set, the value that speculation sets, and why.
SWITCHED_OFF: dict[str, tuple[Any, str]] = {
    "use_async_batching": (False, "the next batch depends on which draft tokens of this one are accepted"),
    "use_cuda_graph": ((False, False), "a captured graph cannot contain verification"),
    "varlen_compile_config": (None, "verification follows the forward in the engine's step"),
    "decode_compile_config": (None, "verification follows the forward in the engine's step"),
    "default_compile_level": (0, "verification follows the forward in the engine's step"),
    "max_blocks_per_request": (0, "the fast path of decoding reads one token per request"),
    "cpu_offload_space": (0.0, "an offloaded request would come back with its draft tokens as text"),
}

# Model types that transformers' engine decodes wrongly: their keys and values have several widths, or their attention
# bypasses transformers' interface. Found by comparing plain ``generate_batch`` with ``generate`` on tiny models of all
# architectures. Models with latent keys (MLA) are wrong, too.
UNSUPPORTED_MODEL_TYPES = frozenset(
    """diffllama doge gemma4 gemma4_text gemma4_unified gemma4_unified_text hrm_text jetmoe mimo_v2_flash moshi
    nemotron paligemma""".split()
)
# Model types whose forward asks its cache for the length of the text, also where it is given positions. transformers'
# paged cache holds many texts and has no such method, so that every request fails.
ASK_FOR_LENGTH = frozenset(
    """bert bert-generation camembert ctrl data2vec-text electra ernie opt roberta
    roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod""".split()
)

logger = logging.get_logger(__name__)


def refuse_batch(
    model: Any,
    generation_config: GenerationConfig,
    config: SpeculationConfig,
    speculator: Speculator | None,
    hints: WorkloadHints | None = None,
) -> None:
    """Raise a Refusal if this model, these options or this draft cannot be batched continuously.

    ``hints`` may hold the length of the longest request.
    """
    if speculator is not None and speculator.shares_target_cache:
        raise _refusal(
            f"{type(speculator).__name__} drafts over the target's own cache, and the engine's is paged",
            f"use another draft, or {GENERATE}",
        )
    if speculator is not None and speculator.reads_target_keys:
        raise _refusal("the draft reads the target's keys and values, which the engine keeps in pages", PADDED)
    if speculator is not None:
        refuse_draft(speculator, model, {}, config, 2)  # requests come and go
    if config.row_seeds is not None:
        raise _refusal("row_seeds: all requests draw from one generator", f"use {GENERATE}")
    if (reason := why_not_batched(model)) is not None:
        raise _refusal(reason, PADDED)
    _refuse_growing_rope(model, hints)
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if config.tree is not None and is_flash_attention_requested(requested_attention_implementation=implementation):
        raise _refusal(
            f"tree={config.tree!r}: {implementation} takes no mask, and a tree needs one to hide other branches",
            "load the model with attn_implementation='sdpa', or use a chain (tree=None)",
        )
    if (generation_config.num_beams or 1) > 1:
        raise _refusal(f"num_beams={generation_config.num_beams}: the engine decodes one text per request", "use 1")
    for processor in processors_of(model, generation_config):
        if type(processor) not in STATELESS:
            raise _refusal(
                f"{type(processor).__name__} needs the text of each request, which the engine does not pass on",
                f"unset its option in the generation config, or use {GENERATE}",
            )


def _refuse_growing_rope(model: Any, hints: WorkloadHints | None) -> None:
    longest = longest_of(hints) or sys.maxsize
    try:
        refuse_growing_rope(model, {}, 0, longest)  # 0: nobody knows how short the shortest prompt is
    except Refusal as refusal:
        raise _refusal(
            "the longest text of a batch decides the rotary frequencies of all (rope_type 'dynamic' and 'longrope')",
            f"pass prompts to generate_batch that stay below the length at which these change, or {PADDED}",
        ) from refusal


def processors_of(model: Any, generation_config: GenerationConfig) -> LogitsProcessorList:
    """Return the processors that plain ``generate`` makes of the options; some need special tokens as tensors."""
    prepared = copy.deepcopy(generation_config)
    model._prepare_special_tokens(prepared, True, device=input_device(model))
    processors: LogitsProcessorList = model._get_logits_processor(prepared, input_ids_seq_length=1)  # 0: embeddings
    return processors


def refuse_dropped(generation_config: GenerationConfig, hints: WorkloadHints | None = None) -> None:
    """Raise a Refusal for options that the engine ignores, with a speculator or without.

    ``hints`` are those of ``generate_batch``. Requests of a manager may have lengths of their own.
    """
    for name in ("stop_strings", "max_time"):
        if getattr(generation_config, name, None):
            raise _refusal(
                f"{name}: the engine ends requests at end-of-sequence tokens and lengths alone",
                f"unset it, or use {GENERATE}",
            )
    for name in OTHER_WAYS:
        if getattr(generation_config, name, None):
            raise _refusal(f"{name} is another way of decoding, which the engine does not know", "unset it")
    if generation_config.use_cache is False:
        raise _refusal("use_cache=False: the engine decodes over a cache in any case", "leave use_cache at True")
    if hints is not None and not hints.max_generated_length and generation_config.max_length is not None:
        raise _refusal(f"max_length={generation_config.max_length}: the engine ignores it", "set max_new_tokens")


def why_not_batched(model: Any) -> str | None:
    """Say why continuous batching, plain or speculative, does not support ``model``; None if it does."""
    if (reason := older_than(CONTINUOUS_BATCHING)) is not None:
        return reason
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder or not hasattr(model, "init_continuous_batching"):
        return f"{name} is no decoder-only language model"
    try:
        group_layers_by_attn_type(config.get_text_config(decoder=True))
    except ValueError as error:
        return f"transformers' continuous batching does not take {name}: {error}"
    text = config.get_text_config(decoder=True)
    kinds = {config.model_type, text.model_type}
    if getattr(text, "kv_lora_rank", None) or kinds & UNSUPPORTED_MODEL_TYPES:
        return f"transformers' continuous batching decodes {name} wrongly, with a speculator or without"
    if kinds & ASK_FOR_LENGTH and not hasattr(PagedAttentionCache, "get_seq_length"):
        return f"{name} asks its cache for the length of the text, which transformers' paged cache does not tell"
    if not getattr(model, "_supports_attention_backend", False) or getattr(model, "_is_stateful", False):
        return f"{name} does not use transformers' attention interface alone, which the paged cache needs"
    return None


def refuse_plain(model: Any) -> None:
    """Raise a Refusal if ``model`` is in the mode of ``hf_spec.invariant``: transformers' engine ends it."""
    if is_invariant(model):
        raise Refusal(
            f"Cannot batch requests: {type(model).__name__} is in the mode of hf_spec.invariant, and transformers' "
            "own engine has another attention; pass speculator='plain', whose steps are plain, or a draft."
        )


def switch_off(config: ContinuousBatchingConfig, asked: ContinuousBatchingConfig | None, reads_features: bool) -> None:
    """Switch off what speculation excludes in a resolved ``config``; warn of options that the user ``asked`` for."""
    for name, (value, reason) in SWITCHED_OFF.items():
        wanted = getattr(asked, name, None)
        if wanted not in (None, False, 0, (False, False)):
            logger.warning_once(f"Continuous batching with a speculator switches {name}={wanted!r} off: {reason}.")
        setattr(config, name, value)
    if reads_features and config.allow_block_sharing:
        config.allow_block_sharing = False
        logger.info("Prefix sharing is off: the draft reads hidden states, which a shared prefix does not give.")


def _refusal(reason: str, instead: str) -> Refusal:
    return Refusal(f"Cannot batch requests with a speculator: {reason}; {instead}.", reason)
