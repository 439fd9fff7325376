"""Loading of a draft that is a language model: by the class that its config names, decoder-only or encoder-decoder."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
)

from .files import HUB_OPTIONS

# transformers' loaders of encoder-decoder models: of text, of speech, of images.
AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText")


def load_language_model(path: str | os.PathLike[str], target: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
    """Load the language model at ``path`` as a draft for ``target``; ``kwargs`` are those of ``from_pretrained``.

    Errors: a ValueError for an encoder-decoder model if the target is none.
    """
    hub = {name: kwargs[name] for name in (*HUB_OPTIONS, "trust_remote_code") if name in kwargs}
    config = AutoConfig.from_pretrained(path, **hub)
    kind: Any = AutoModelForCausalLM
    images, text = AutoModelForImageTextToText._model_mapping, AutoModelForCausalLM._model_mapping
    if type(config) in images and type(config) not in text:
        kind = AutoModelForImageTextToText
    if config.is_encoder_decoder:
        kind = class_of(config)
        if not target.config.is_encoder_decoder:
            raise ValueError(
                f"the draft {os.fspath(path)!r} is an encoder-decoder model ({config.model_type}), which drafts for "
                f"others of its kind alone, and {type(target).__name__} reads no source; use a decoder-only language "
                "model with the target's tokenizer, or 'ngram'"
            )
    model: PreTrainedModel = kind.from_pretrained(path, **kwargs)
    return model


def class_of(config: Any) -> Any:
    """Return the class of an encoder-decoder checkpoint: the one that its config names, or one for its type."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and issubclass(found, GenerationMixin):
            return found
    loaders = [getattr(transformers, name) for name in AUTO_CLASSES]
    return next((one for one in loaders if type(config) in one._model_mapping), loaders[0])
