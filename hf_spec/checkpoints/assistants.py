"""transformers' own assistants: which models they are, and the speculators that draft with them."""

from __future__ import annotations

import json
import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..drafts.base import Speculator
from ..drafts.dflash.formats import MUSE
from ..drafts.files import Checkpoint
from ..drafts.gemma4_assistant.speculator import MODEL_TYPES, Gemma4AssistantSpeculator
from ..untrusted import printable
from ..versions import INSTALLED, assistants_error
from .auto import load
from .kinds import UNFIT

# The draft that was made of each of Muse Glimmer's assistants, and where its weights were.
_made: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Speculator]] = WeakKeyDictionary()


def assistant_speculator(model: PreTrainedModel) -> Speculator | None:
    """Return what drafts with ``model``, one of transformers' assistants; ``None`` if it is another model."""
    if model.config.model_type in MODEL_TYPES:
        return Gemma4AssistantSpeculator(model)
    return _dflash_of(model) if model.config.model_type == MUSE else None


def load_gemma_assistant(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Load one of Gemma 4's assistants by transformers. Errors: a ValueError if this version cannot build it."""
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except UNFIT as error:
        raise ValueError(
            f"transformers {INSTALLED} cannot build the assistant of Gemma 4 at {os.fspath(path)!r} "
            f"({printable(error)}): {assistants_error()}"
        ) from error
    return loaded


def _dflash_of(model: PreTrainedModel) -> Speculator:
    """Make a DFlash draft of Muse Glimmer's assistant. It shares the weights, and is made once while they stay."""
    known = _made.get(model)
    if known is not None and known[:2] == (model.device, model.dtype):
        return known[2]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    config = json.loads(model.config.to_json_string(use_diff=False))
    checkpoint = Checkpoint(model.name_or_path or type(model).__name__, config, tensors)
    draft: Any = load(checkpoint, dtype=model.dtype, device_map={"": model.device})
    _made[model] = model.device, model.dtype, draft
    return draft  # type: ignore[no-any-return]
