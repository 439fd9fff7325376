"""Architectures of transformers with limits: what they cannot do, by model type, and why.

Everything else about an architecture is learnt from its code, or from the self-check.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache, StaticCache

from .cache import has_states, unsupported_layer
from .masks import why_no_masks
from .names import CACHES
from .static import unsupported_static_layer

# Model types that keep recurrent states in a cache of their own kind.
OWN_STATES = ("minimax", "rwkv", "xlstm")
# Unsupported model types and classes, and the reason.
REFUSED = {
    "cpmant": "it reads its prompt again in every forward",
    "dory": "its loops read keys from the layers of the cache, past what a block is shown",
    "fsmt": "its decoder builds masks of its own, which know no tree and no rows of different lengths",
    "led": "its decoder builds masks of its own, which know no tree and no rows of different lengths",
    "prophetnet": "it goes on from its cache with one token at a time only",
    "recurrent_gemma": "it keeps recurrent states in its modules and takes several tokens for a new prompt",
    "roformer": "it gives all rows the same positions",
}
REFUSED_CLASSES = {
    "BltForCausalLM": "it groups bytes into patches, and a block of them makes other patches than one byte at a time",
    "CsmForConditionalGeneration": "each of its tokens is a frame of sound, of several codebooks",
    "KyutaiSpeechToTextForConditionalGeneration": (
        "it reads each token together with the sound of that moment, which is encoded while the text grows"
    ),
    "MoshiForConditionalGeneration": (
        "it reads each token together with sound that a second model makes for it once the token is known"
    ),
    "VoxtralRealtimeForConditionalGeneration": "it reads each token together with the sound of that moment",
    "XLMWithLMHeadModel": "it keeps no key-value cache of transformers (its `cache` is a dictionary of its own)",
}
# Parts of models that make sound of a text. The models pass them what ``generate`` was given for the text.
MAKES_SOUND = (
    "Qwen2_5OmniTalkerForConditionalGeneration",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
    "SeamlessM4TTextToUnitForConditionalGeneration",
)
STATIC_BESIDE_AN_ENCODER = "is static, which is served for decoder-only models alone; leave cache_implementation unset"
_BIAS = "its relative position bias counts columns from one place for the whole batch"
# Model types that are supported at batch size 1 only, and the reason.
ONE_ROW = {
    "gpt_neo": "its causal mask counts columns from one place for the whole batch",
    "imagegpt": "its causal mask counts columns from one place for the whole batch",
    "inkling2_loop_text": _BIAS,
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "rwkv": "its own single steps mix the rows of a batch",
}


def arguments_of(model: nn.Module) -> Collection[str]:
    """Name the arguments of the forward of ``model``, also where somebody has replaced it."""
    if "forward" in vars(model):
        return inspect.signature(model.forward).parameters
    kind: Any = type(model)  # type checkers take the hash of a class for that of its instances
    return _arguments_of(kind, kind.forward)


@functools.lru_cache(maxsize=64)
def _arguments_of(kind: Any, forward: Any) -> Collection[str]:
    """Name the arguments of a class's forward, and of its base's where it passes on ``**kwargs`` without a cache.

    ``forward`` is that of the class: somebody may replace it there.
    """
    names: list[str] = []
    for forward in (vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one)):
        parameters = inspect.signature(forward).parameters
        names += parameters
        passes_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if not passes_on or not set(CACHES).isdisjoint(parameters):
            break
    return names


def cache_name(model: PreTrainedModel) -> str:
    """Name the cache argument of the forward of ``model``."""
    known = arguments_of(model)
    return next((name for name in CACHES if name in known), CACHES[0])


def cross_attends(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` attends to the states of an encoder: its own, or a target's (WhisperForCausalLM)."""
    return bool(model.config.is_encoder_decoder) or "encoder_outputs" in arguments_of(model)


def keeps_own_states(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` makes a cache of its own kind for its recurrent states."""
    return model.config.get_text_config(decoder=True).model_type in OWN_STATES


def why_one_row(model: PreTrainedModel) -> str | None:
    """Say why ``model`` can score draft tokens at batch size 1 only, or return ``None`` if it has no such limit."""
    return ONE_ROW.get(model.config.get_text_config(decoder=True).model_type)


def why_unsupported(
    model: PreTrainedModel, cache: object, batch: int = 2, *, beside_encoder: bool = False
) -> str | None:
    """Say why ``model`` with transformers' ``cache`` cannot be scored over slots, or return ``None`` if it can.

    ``beside_encoder``: a decoder without an encoder is given the states of another model's.
    """
    name = type(model).__name__
    if (reason := why_refused(model)) is not None:
        return f"{name} is not supported: {reason}"
    if batch > 1 and (reason := why_one_row(model)) is not None:
        return f"{name} is supported for one row at a time only: {reason}"
    if isinstance(cache, StaticCache) and (reason := why_one_row(model)) is not None:  # plain reads empty slots, too
        return f"{name} takes no static cache: {reason}"
    text = model.config.get_text_config(decoder=True)
    if (reason := why_no_masks(text._attn_implementation)) is not None:
        return f"{name} {reason}"
    if text.model_type in OWN_STATES:
        return None
    known = arguments_of(model)
    if cache is None or ("input_ids" in known and cache_name(model) not in known):  # a wrapper may name nothing
        return f"{name} keeps no key-value cache of transformers (its forward takes no {CACHES[0]})"
    if cross_attends(model) and not model.config.is_encoder_decoder and not beside_encoder:
        return f"{name} attends to the output of an encoder that is no part of it (use the complete model)"
    if cross_attends(model) and (reason := _why_not_beside_an_encoder(cache)) is not None:
        return f"the cache of {name} {reason}"
    if isinstance(cache, EncoderDecoderCache) and cross_attends(model):
        layers = map(unsupported_layer, (cache.self_attention_cache, cache.cross_attention_cache))
        layer = next(filter(None, layers), None)
    else:
        layer = unsupported_static_layer(cache) if isinstance(cache, StaticCache) else unsupported_layer(cache)
    if layer is not None:
        return f"the cache of {name} is {layer}, not one of attention and recurrent layers"
    knows_layers = getattr(text, "layer_types", None)  # and so does the cache
    if getattr(model, "_is_stateful", False) and not knows_layers and not has_states(cache):
        return f"{name} keeps recurrent states outside its cache, where they cannot be taken back"
    return None


def _why_not_beside_an_encoder(cache: object) -> str | None:
    """Say why slots cannot replace the part of ``cache`` that is the text's, or return ``None`` if they can."""
    if not isinstance(cache, EncoderDecoderCache):
        kind = type(cache).__name__
        return f"is a {kind}, in which the keys of the source have no place; pass an EncoderDecoderCache, or none"
    if isinstance(cache.self_attention_cache, StaticCache) or isinstance(cache.cross_attention_cache, StaticCache):
        return STATIC_BESIDE_AN_ENCODER
    return None


def why_refused(model: PreTrainedModel) -> str | None:
    """Say why ``model`` is refused whatever its cache is, or return ``None`` if it is not."""
    reasons = [REFUSED.get(model.config.get_text_config(decoder=True).model_type)]
    reasons += [REFUSED_CLASSES.get(kind.__name__) for kind in type(model).__mro__]
    return next(filter(None, reasons), None)


def why_no_trees(model: PreTrainedModel) -> str | None:
    """Say why ``model`` can score chains only, or return ``None`` if it can score trees."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return f"{name} measures distance (ALiBi) in slots, and no two draft tokens of a tree share a slot"
    if config.model_type == "qwen4_exp_text":
        return f"{name} pools the keys of neighbouring slots, which in a tree do not follow each other"
    if keeps_own_states(model):
        return f"{name} keeps recurrent states in a cache of its own kind, which takes back chains only"
    if (reason := why_one_row(model)) is not None:
        return f"{name} takes no trees: {reason}"
    return None
