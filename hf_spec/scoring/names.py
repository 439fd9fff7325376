"""Names of arguments: the cache is ``cache`` since transformers 5.24, and an encoder-decoder's text has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..versions import CACHE as CACHE

CACHES = tuple(dict.fromkeys((CACHE, "past_key_values", "cache_params", "state")))


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the ``arguments`` of ``generate`` or of a forward, or ``None`` if there is none."""
    return next((arguments[name] for name in CACHES[:-1] if arguments.get(name) is not None), None)


class TextArguments(NamedTuple):
    """What a model's forward calls the text that it continues: token ids, their mask, positions and embeddings."""

    ids: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    embeds: str = "inputs_embeds"


OF_DECODER_ONLY = TextArguments()
OF_ENCODER_DECODER = TextArguments(*(f"decoder_{name}" for name in OF_DECODER_ONLY))


def text_arguments(model: Any) -> TextArguments:
    """Return the names in ``model``: without ``decoder_`` an encoder-decoder's arguments belong to its source."""
    return OF_ENCODER_DECODER if model.config.is_encoder_decoder else OF_DECODER_ONLY
