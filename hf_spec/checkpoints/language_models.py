"""Which class loads a language model: by its config, decoder-only, with images, or encoder-decoder."""

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
    config = _config(path, kwargs)
    kind = loader_of(config)
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


def load_decoder(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a decoder-only language model, which may read images; ``kwargs`` are those of ``from_pretrained``."""
    return loader_of(_config(path, kwargs)).from_pretrained(path, **kwargs)


def _config(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> Any:
    hub = {name: kwargs[name] for name in (*HUB_OPTIONS, "trust_remote_code") if name in kwargs}
    return AutoConfig.from_pretrained(path, **hub)


def loader_of(config: Any) -> Any:
    """Return the loader of a decoder-only checkpoint, which may read images as well as text."""
    images, text = AutoModelForImageTextToText._model_mapping, AutoModelForCausalLM._model_mapping
    reads_images = type(config) in images and type(config) not in text
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def class_of(config: Any) -> Any:
    """Return the class of an encoder-decoder checkpoint: the one that its config names, or one for its type."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and issubclass(found, GenerationMixin):
            return found
    loaders = [getattr(transformers, name) for name in AUTO_CLASSES]
    return next((one for one in loaders if type(config) in one._model_mapping), loaders[0])
