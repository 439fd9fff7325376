"""Arguments of forwards: their names, and the tensors in them.

The cache is ``cache`` since transformers 5.24, and the text of an encoder-decoder model has names of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers.utils.generic import ModelOutput

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


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to an argument that is a tensor, or to the tensors that an encoder returned."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: map_tensors(one, change) for name, one in value.items()})
    if isinstance(value, tuple):
        return tuple(map_tensors(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value
