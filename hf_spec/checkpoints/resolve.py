"""From what a user passes as ``speculator=`` to a ``Speculator``."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..drafts.base import Speculator
from ..drafts.files import Checkpoint
from ..drafts.mtp.modeling import MTPDraftModel
from ..drafts.mtp.target import TargetMtp
from ..drafts.ngram.speculator import NgramSpeculator
from ..drafts.vanilla.speculator import VanillaSpeculator
from ..scoring.plain import input_device
from .auto import AutoDraftModel, load
from .files import read_checkpoint
from .kinds import find_format


def as_speculator(speculator: Any, target: PreTrainedModel) -> Speculator:
    """Turn a draft model, a causal language model, ``"ngram"``, ``"mtp"`` or a path or Hub id into a ``Speculator``.

    ``"mtp"`` and paths are read anew each time; keep ``as_speculator("mtp", target)`` for many calls.

    Errors: a TypeError for anything else; for a path what ``load_draft`` raises.
    """
    if isinstance(base := base_model(speculator), Speculator):
        return base
    if speculator == "ngram":
        return NgramSpeculator()
    if speculator == "mtp":
        return _own_layers(target)
    if isinstance(speculator, str | os.PathLike):
        return as_speculator(load_draft(speculator, target, **_beside(target)), target)
    if isinstance(base, PreTrainedModel) and base.can_generate() and not base.config.is_encoder_decoder:
        return VanillaSpeculator(base)
    raise TypeError(
        "speculator must be a draft model, a causal language model, 'ngram', 'mtp' or a path or Hub id of one, "
        f"got {type(speculator).__name__}. Load a draft with AutoModel.from_pretrained, or a language model with "
        "AutoModelForCausalLM.from_pretrained."
    )


def load_draft(path: str | os.PathLike[str], target: PreTrainedModel, **kwargs: Any) -> Any:
    """Load a draft of any format for ``target``, or else a causal language model.

    ``kwargs`` are those of ``from_pretrained``. Errors: a ValueError if there is neither at ``path``.
    """
    try:
        checkpoint = read_checkpoint(path, only_names=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no draft can be read at {os.fspath(path)!r}: {error}") from error
    if _is_draft(checkpoint, target):
        return AutoDraftModel.from_pretrained(path, target=target, **kwargs)
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def _is_draft(checkpoint: Checkpoint, target: PreTrainedModel) -> bool:
    try:
        found = find_format(checkpoint)
    except ValueError:  # none of the formats of drafts
        return False
    if found.name != "mtp":
        return True
    # The layer stands beside a whole model. If it cannot be this target's, that model is the draft.
    config = checkpoint.config.get("text_config") or checkpoint.config
    return bool(config.get("hidden_size") == target.config.get_text_config().hidden_size)


def _own_layers(target: PreTrainedModel) -> Speculator:
    """Read the MTP layers of ``target``, by transformers where it knows them, from where the target was loaded."""
    if getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return TargetMtp.of(target)
    path, found = target.config.name_or_path, None
    if path:
        with contextlib.suppress(OSError):  # a model that was only named
            found = read_checkpoint(path, inside_target=True)
    if found is None or not found.tensors or find_format(found).name != "mtp":
        raise ValueError(
            f"{type(target).__name__} has no multi-token-prediction layers: its config sets no num_mtp_layers, and "
            f"{path or 'a model made in memory'!r} holds no mtp.* tensors. Use another speculator, for example 'ngram'"
        )
    draft: MTPDraftModel = load(found, **_beside(target))
    draft.bind(target)
    return draft


def _beside(target: PreTrainedModel) -> dict[str, Any]:
    return {"dtype": target.dtype, "device_map": {"": input_device(target)}}


def base_model(model: Any) -> Any:
    """Look through a PEFT wrapper: its adapter layers sit inside the model and stay active."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
