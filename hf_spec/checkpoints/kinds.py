"""Every kind of draft with weights, and whose files each one reads. The only place that lists them."""

from __future__ import annotations

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModel

from ..configuration import SpeculatorConfig
from ..drafts.eagle.modeling import EagleDraftModel
from ..drafts.eagle3.modeling import Eagle3DraftModel
from ..drafts.files import SPECULATORS, Checkpoint, Format, is_speculators
from ..drafts.medusa.modeling import MedusaDraftModel
from ..drafts.modeling import DraftModel
from ..drafts.mtp.modeling import MTPDraftModel

KINDS: tuple[type[DraftModel], ...] = (Eagle3DraftModel, EagleDraftModel, MedusaDraftModel, MTPDraftModel)


def kind_of(config: SpeculatorConfig) -> type[DraftModel]:
    """Return the class of the drafts that ``config`` describes."""
    return next(kind for kind in KINDS if kind.config_class is type(config))


def config_classes() -> dict[str, Any]:
    """Map what stands as ``speculators_model_type`` in files, and as ``kind`` in recipes, to the kinds' configs."""
    return {kind.config_class.speculators_model_type: kind.config_class for kind in KINDS}


def formats() -> list[Format]:
    """List the formats of all kinds, ours last."""
    return [*(one for kind in KINDS for one in kind.formats), SPECULATORS]


def layouts() -> tuple[str, ...]:
    """Name the layouts in which drafts are written: ours first."""
    return (SPECULATORS.name, *(name for kind in KINDS for name in kind.layouts))


def find_format(checkpoint: Checkpoint) -> Format:
    """Find the format of ``checkpoint``. Errors: a ValueError if it is of none that is known."""
    config, names = checkpoint.config, checkpoint.tensors
    ours = is_speculators(config)  # whose tensors may be called as those of others
    for one in formats():
        if (one.name == SPECULATORS.name) == ours and one.recognises(config, names):
            return one
    raise ValueError(
        f"{checkpoint.path} is no draft that hf_spec knows (speculators, EAGLE-1/2/3, SpecForge, ModelOpt, Medusa, "
        f"MTP layers of Qwen and MiMo): its tensors are {sorted(names)[:4]}..."
    )


def translate(checkpoint: Checkpoint) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    """Return the config and the weights of our model for a checkpoint of any format.

    Errors: ValueError for a format that is not known, or for a config that says too little or nonsense.
    """
    found = find_format(checkpoint)
    try:
        return found.read(copy.deepcopy(checkpoint.config), dict(checkpoint.tensors))
    except KeyError as error:
        raise ValueError(
            f"{checkpoint.path}, read as {found.name}: there is no {error}; complete the config or copy the weights "
            "again"
        ) from error
    except (ArithmeticError, AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{checkpoint.path}, read as {found.name}: {error}") from error


def register_auto_classes() -> None:
    """Teach AutoConfig and AutoModel what ``save_pretrained`` writes; harmless when repeated."""
    AutoConfig.register(SpeculatorConfig.model_type, SpeculatorConfig, exist_ok=True)
    for kind in KINDS:
        AutoModel.register(kind.config_class, kind, exist_ok=True)
