"""From what a user passes as ``speculator=`` to a ``Speculator``."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from .checkpoints import AutoDraftModel
from .drafts.base import Speculator
from .drafts.mtp import TargetMtp
from .drafts.ngram import NgramSpeculator
from .drafts.vanilla import VanillaSpeculator


def as_speculator(speculator: Any, target: PreTrainedModel) -> Speculator:
    """Turn a draft model, a causal language model, ``"ngram"``, ``"mtp"`` or a path or Hub id into a ``Speculator``.

    ``"mtp"`` reads the target's own layers anew each time; keep ``TargetMtp.of(target)`` for many calls.

    Errors: a TypeError for anything else; what ``AutoDraftModel.from_pretrained`` raises for a path.
    """
    if isinstance(base := base_model(speculator), Speculator):
        return base
    if speculator == "ngram":
        return NgramSpeculator()
    if speculator == "mtp":
        return TargetMtp.of(target)
    if isinstance(speculator, str | os.PathLike):
        place = {"dtype": target.dtype, "device_map": {"": target.device}}
        draft: Speculator = AutoDraftModel.from_pretrained(speculator, target=target, **place)
        return draft
    if isinstance(base, PreTrainedModel) and base.can_generate() and not base.config.is_encoder_decoder:
        return VanillaSpeculator(base)
    raise TypeError(
        "speculator must be a draft model, a causal language model, 'ngram', 'mtp' or a path or Hub id of a draft, "
        f"got {type(speculator).__name__}. Load a draft with AutoModel.from_pretrained, or a language model with "
        "AutoModelForCausalLM.from_pretrained."
    )


def base_model(model: Any) -> Any:
    """Look through a PEFT wrapper: its adapter layers sit inside the model and stay active."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
