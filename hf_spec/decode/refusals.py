"""Calls that are refused before anything runs; each error names the cause and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticCache

from ..drafts.base import Speculator, network_of
from ..drafts.source import Source
from ..scoring.architectures import (
    STATIC_BESIDE_AN_ENCODER,
    keeps_own_states,
    why_no_trees,
    why_refused,
    why_unsupported,
)
from ..scoring.cache import has_states
from ..scoring.checkpointing import drops_cache
from ..scoring.masks import takes_no_mask
from ..scoring.names import CACHES, cache_among, text_arguments
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from .sequences import Sequences

OTHER_WAYS = (  # options that ask transformers for another decoding method
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "constraints",
    "force_words_ids",
)


_OWN_ASSISTANT = "transformers' own assisted generation may take it: generate(..., assistant_model=...)"


class Refusal(ValueError):
    """Why a call cannot be decoded speculatively, and what to do; nothing of it has run yet. ``reason``: why alone."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message.rstrip(".") if reason is None else reason


@contextmanager
def refusing() -> Iterator[None]:
    """Turn every ValueError inside into a ``Refusal``."""
    try:
        yield
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(str(error)) from error


def refuse_call(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    config: SpeculationConfig,
    sequences: Sequences,
) -> None:
    """Raise a ``Refusal`` if this call of ``generate`` cannot be decoded speculatively; nothing has run yet."""
    _refuse_options(model, generation_config, model_kwargs)
    rows = len(sequences.lengths)
    _refuse_target(model, model_kwargs, config, rows)
    if config.row_seeds is not None and len(config.row_seeds) != rows:
        raise _refusal(f"row_seeds has {len(config.row_seeds)} seeds for {rows} rows; pass one for each row")
    if sequences.stops.max_length is not None:
        prompt = sequences.prompt_length
        if not model.config.is_encoder_decoder:  # whose mask is the source's
            prompt = _length_of_prompt(generation_config, model_kwargs, prompt)
        longest = prompt + sequences.stops.max_length - sequences.prompt_length
        refuse_growing_rope(model, model_kwargs, prompt, longest)
        _refuse_short_cache(cache_among(model_kwargs), longest - 1)


def _refuse_options(model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if getattr(type(model), "_sample", None) is not GenerationMixin._sample:
        raise _refusal(f"{type(model).__name__} decodes in a way of its own (it overrides _sample); drop `speculator`")
    if input_device(model).type == "meta":
        raise _refusal(f"{type(model).__name__} has no weights (device meta); load them with from_pretrained")
    asked = {"use_cache": False} if model_kwargs.get("use_cache") is False else {}
    _refuse_asked(lambda name: asked.get(name, getattr(generation_config, name, None)), OTHER_WAYS)
    if drops_cache(model):
        raise _refusal(
            f"{type(model).__name__} is in training mode with activation checkpointing, which drops the cache (plain "
            "generate writes other text then, too); call model.eval() first"
        )
    refuse_cache(generation_config.cache_implementation)


def _refuse_asked(asked: Callable[[str], Any], other_ways: Sequence[str]) -> None:
    """Raise a ``Refusal`` for what ``asked(name)``, the options of a call, cannot go together with draft tokens."""
    if (beams := asked("num_beams") or 1) > 1:
        raise _refusal(_why_no_beams(int(beams)))
    for name in filter(asked, other_ways):
        instead = ", or pass speculator='early-exit'" if name == "assistant_early_exit" else ""
        raise _refusal(f"{name} is another way of decoding; drop it or drop `speculator`{instead}")
    if asked("output_attentions"):
        raise _refusal(
            "output_attentions: a block's attention looks different from that of single steps; set it to False"
        )
    if asked("use_cache") is False:
        raise _refusal("use_cache=False: draft tokens are scored over a cache; leave use_cache at True")


def refuse_streams(arguments: dict[str, Any]) -> None:
    """Raise a ``Refusal`` for an input of a call that is read once, before anything has read a part of it."""
    for name, value in arguments.items():
        if isinstance(value, GeneratorType):
            raise _refusal(
                f"{name} is a generator, which gives its parts once, one a step, and draft tokens are scored several "
                "a step; generate without `speculator`"
            )


def refuse_sharing(speculator: Speculator, model_kwargs: dict[str, Any]) -> None:
    """Raise a ``Refusal`` if the draft shares the target's cache, and that is static."""
    if speculator.shares_target_cache and isinstance(cache_among(model_kwargs), StaticCache):
        raise _refusal(
            "early exit drafts over the target's own cache, and not over a static one, for which the target is "
            "compiled as a whole; leave cache_implementation unset and pass no StaticCache, or use another draft"
        )


def refuse_before_encoding(model: PreTrainedModel, asked: Callable[[str], Any]) -> None:
    """Raise a ``Refusal`` for a call of ``model`` that cannot be served, before it reads a source or images.

    ``asked(name)`` looks up an option of the call.
    """
    # The layer of an early exit belongs to a draft, which is refused by a reason of its own.
    _refuse_asked(asked, [name for name in OTHER_WAYS if name != "assistant_early_exit"])
    if not model.config.is_encoder_decoder:
        return
    if (reason := why_refused(model)) is not None:
        raise _refusal(f"{type(model).__name__} is not supported: {reason}; {_OWN_ASSISTANT}")
    if asked("cache_implementation") == "static":
        raise _refusal(f"the cache of {type(model).__name__} {STATIC_BESIDE_AN_ENCODER}")


def refuse_source(speculator: Speculator, model: PreTrainedModel, source: Source) -> None:
    """Raise a ``Refusal`` if ``speculator`` reads the ``source`` by an encoder of its own, and cannot."""
    if speculator.encodes(model) and (reason := source.why_not_encoded(network_of(speculator))) is not None:
        raise _refusal(f"the draft has an encoder of its own, and {reason}, or use 'ngram'")


def is_padded(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Tell whether the mask of a call hides any token of its text."""
    mask = model_kwargs.get(text_arguments(model).mask)
    return isinstance(mask, Tensor) and not bool(mask.all())


def refuse_draft(
    speculator: Speculator, model: PreTrainedModel, model_kwargs: dict[str, Any], config: SpeculationConfig, rows: int
) -> None:
    """Raise a ``Refusal`` for a draft whose attention takes no mask, where ``rows``, a tree or padding need one."""
    draft = network_of(speculator)
    if not isinstance(draft, PreTrainedModel):
        return
    implementation = draft.config._attn_implementation
    if not takes_no_mask(implementation) or not getattr(getattr(draft, "drafter_class", None), "attends", True):
        return
    needs = {
        "a tree": config.tree is not None,
        f"{rows} rows": rows > 1,
        "a padded prompt": is_padded(model, model_kwargs),
    }
    if why := next((what for what, needed in needs.items() if needed), None):
        raise _refusal(
            f"the draft attends by {implementation}, which takes no custom mask, and {why} would need one; load the "
            "draft with attn_implementation='sdpa'"
        )


def refuse_cache(implementation: str | None) -> None:
    """Raise a ``Refusal`` unless ``cache_implementation`` asks for a cache that can roll back draft tokens."""
    # "hybrid" occurs in old configuration files and means the default.
    if implementation not in (None, "dynamic", "static", "hybrid"):
        raise _refusal(
            f"cache_implementation={implementation!r}: only the dynamic and the static cache can take rejected "
            "draft tokens back; leave cache_implementation unset, or set it to 'static'"
        )


def _refuse_target(
    model: PreTrainedModel, model_kwargs: dict[str, Any], config: SpeculationConfig, batch: int
) -> None:
    cache = cache_among(model_kwargs)
    if isinstance(cache, StaticCache):
        _refuse_static(model, cache)
    if (reason := why_unsupported(model, cache, batch)) is not None:
        other = ", or leave the cache dynamic" if isinstance(cache, StaticCache) else ""
        raise _refusal(f"{reason}; generate without `speculator`{other}")
    if config.tree is not None and (reason := why_no_trees(model)) is not None:
        raise _refusal(f"{reason}; use a chain (tree=None)")
    if any(model_kwargs.get(name) is not None for name in CACHES) and keeps_own_states(model):
        raise _refusal(
            f"a state handed to {type(model).__name__}, which keeps it in its own way; pass the whole text instead"
        )
    if model_kwargs.get("cross_attention_mask") is not None:
        raise _refusal(
            f"some layers of {type(model).__name__} attend to images alone, which cannot be scored over slots; "
            "generate without `speculator`, or pass no images"
        )
    if batch > 1 and has_states(cache) and getattr(cache, "_is_user_defined", False):
        raise _refusal(
            "a cache with recurrent states cannot be handed back for several rows, which end at different "
            "lengths; pass one row, or no cache"
        )
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if not takes_no_mask(implementation):
        return
    if is_padded(model, model_kwargs):
        raise _refusal(
            f"{implementation} takes no custom mask, which padding needs; pass the prompt without padding, or load "
            "the model with attn_implementation='sdpa'"
        )
    if batch > 1 or config.tree is not None:
        asked = "a tree of draft tokens" if config.tree is not None else "rows that advance by different amounts"
        raise _refusal(
            f"{implementation} takes no custom mask, which {asked} needs; load the model with "
            "attn_implementation='sdpa'"
            + (" or use a chain (tree=None)" if config.tree is not None and batch == 1 else "")
        )


def _refuse_static(model: PreTrainedModel, cache: StaticCache) -> None:
    name = type(model).__name__
    if has_states(cache):
        raise _refusal(
            f"the recurrent states of {name} cannot be taken back in a static cache; leave cache_implementation "
            "unset, and pass no StaticCache"
        )
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if takes_no_mask(implementation):
        raise _refusal(
            f"{implementation} takes no custom mask, which a static cache needs; load the model with "
            "attn_implementation='sdpa', or leave the cache dynamic"
        )


def _refuse_short_cache(cache: object, columns: int) -> None:
    size = cache.get_max_length() if isinstance(cache, StaticCache) and not all(cache.is_sliding) else columns
    if size < columns:
        raise _refusal(
            f"the StaticCache has room for {size} tokens, and this call may put {columns} into it; make it with "
            f"max_cache_len={columns}, or ask for fewer new tokens"
        )


def _why_no_beams(count: int) -> str:
    return (
        f"num_beams={count}: one text per sequence is verified, not several beams. Saved generation configs and "
        "pipelines ask for beams, too; pass num_beams=1, or generate_kwargs={'num_beams': 1} to a speech pipeline"
    )


def _length_of_prompt(generation_config: GenerationConfig, model_kwargs: dict[str, Any], ids: int) -> int:
    """Count the prompt's positions, in ``ids``, embeddings or a cache: the attention mask covers them all."""
    mask = model_kwargs.get("attention_mask")
    return int(getattr(generation_config, "_mask_length", ids) if mask is None else mask.shape[1])


def refuse_growing_rope(
    model: PreTrainedModel, model_kwargs: dict[str, Any], prompt_length: int, max_length: int
) -> None:
    """Raise a ``Refusal`` if rotary frequencies change at a length between ``prompt_length`` and ``max_length``."""
    # Cached keys keep the old rotary frequencies, and new keys would get others.
    config, mask = model.config.get_text_config(decoder=True), model_kwargs.get(text_arguments(model).mask)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of all layers, or of each type of layer
        rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
        if rope_type not in ("dynamic", "longrope"):
            continue
        limit = config.max_position_embeddings if rope_type == "dynamic" else rope["original_max_position_embeddings"]
        shortest = prompt_length if mask is None else int(mask.sum(1).min())
        if max_length <= limit or (rope_type == "longrope" and shortest > limit):
            continue  # short to the end, or long from the start whichever row ends first: the frequencies stay
        cure = f"ask for at most {limit - prompt_length} new tokens"
        if prompt_length >= limit:
            cure = "generate without `speculator`"
            if rope_type == "longrope":
                cure = "pass prompts longer than that by themselves, and shorter ones with few new tokens"
        raise _refusal(
            f"rope_type={rope_type!r} changes its frequencies once the text is longer than {limit} tokens, and this "
            f"call may reach {max_length}; {cure}"
        )


def _refusal(reason: str) -> Refusal:
    return Refusal(f"Cannot generate with a speculator: {reason}.")
