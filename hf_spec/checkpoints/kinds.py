"""All kinds of drafts with weights, and the formats that each can read. The only place that lists them.

Other packages add formats by entry points, see ``entry_points.py``.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..config_keys import warn_of_unknown
from ..configuration import SpeculatorConfig
from ..drafts.dflash.modeling import DFlashDraftModel
from ..drafts.dflash2.modeling import DFlash2DraftModel
from ..drafts.dspark.modeling import DSparkDraftModel
from ..drafts.eagle.modeling import EagleDraftModel
from ..drafts.eagle3.modeling import Eagle3DraftModel
from ..drafts.files import SPECULATORS, Checkpoint, Format, is_speculators
from ..drafts.gemma4_assistant.speculator import MODEL_TYPES as GEMMA_ASSISTANTS
from ..drafts.medusa.modeling import MedusaDraftModel
from ..drafts.modeling import DraftModel
from ..drafts.mtp.modeling import MTPDraftModel
from ..drafts.mtp.target import SCALES
from ..drafts.peagle.modeling import PEagleDraftModel
from ..untrusted import printable
from .entry_points import Added, EntryPointError, added_formats
from .neighbours import refuse_neighbours

# Errors that configs and tensors of no draft may cause while they are translated.
UNFIT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
DRAFT_MODELS: tuple[type[DraftModel], ...] = (
    DFlash2DraftModel,
    Eagle3DraftModel,
    DFlashDraftModel,
    DSparkDraftModel,
    PEagleDraftModel,
    EagleDraftModel,
    MedusaDraftModel,
    MTPDraftModel,
)


def kind_of(config: SpeculatorConfig) -> type[DraftModel]:
    """Return the class of the drafts that ``config`` describes."""
    return next(kind for kind in DRAFT_MODELS if kind.config_class is type(config))


def config_classes() -> dict[str, Any]:
    """Map ``speculators_model_type`` of files, which is also ``kind`` in recipes, to the config classes."""
    return {kind.config_class.speculators_model_type: kind.config_class for kind in DRAFT_MODELS}


def formats() -> list[Format]:
    """List the formats of all kinds, then those of other packages, and ours last."""
    return [*_formats_of_kinds(), *_added().formats, SPECULATORS]


def _formats_of_kinds() -> list[Format]:
    return [one for kind in DRAFT_MODELS for one in kind.formats]


def _added() -> Added:
    return added_formats(frozenset(one.name for one in (*_formats_of_kinds(), SPECULATORS)))


def is_added(one: Format) -> bool:
    """Tell whether another package added this format."""
    return one in _added().formats


def layouts() -> tuple[str, ...]:
    """List the layouts in which drafts can be written, ours first."""
    return tuple(dict.fromkeys((SPECULATORS.name, *(name for kind in DRAFT_MODELS for name in kind.layouts))))


def find_format(checkpoint: Checkpoint) -> Format:
    """Find the format of ``checkpoint``. Errors: a ValueError if it is unknown, or refused by name.

    Formats of other packages are asked last, so that they change nothing for files that hf_spec knows.
    """
    refuse_neighbours(checkpoint)
    config, names = checkpoint.config, checkpoint.tensors
    ours = is_speculators(config)  # our tensors may have the same names as those of other formats
    problems = [*_added().problems]
    for one in formats():
        try:
            if (one.name == SPECULATORS.name) == ours and one.recognises(config, names):
                return one
        except EntryPointError as error:
            problems.append(str(error))
        except UNFIT as error:
            raise ValueError(
                f"config.json of {checkpoint.path} has a value of the wrong type ({printable(error)}); copy or "
                "download it again"
            ) from error
    _refuse_unknown(checkpoint, problems)


def _refuse_unknown(checkpoint: Checkpoint, problems: list[str]) -> NoReturn:
    """Raise a ValueError that says what a checkpoint of no known format may be."""
    config, names = checkpoint.config, checkpoint.tensors
    if config.get("model_type") in GEMMA_ASSISTANTS:
        raise ValueError(
            f"{checkpoint.path} is an assistant of Gemma 4, which transformers itself loads: pass the path, or what "
            "AutoModelForCausalLM.from_pretrained gives, as speculator; there is nothing to convert, inspect or train"
        )
    if any(config.get(name) for name in ("num_nextn_predict_layers", "num_mtp_layers")):
        raise ValueError(
            f"{checkpoint.path} is a language model whose config counts multi-token-prediction layers: load it as the "
            "target and pass speculator='mtp'; there is nothing to convert"
        )
    if own := re.search(r"\w+ForCausalLM\b", str(config.get("architectures"))):
        raise ValueError(
            f"{checkpoint.path} is a language model by its config ({own[0]}), and none of the drafts that hf_spec "
            f"knows by its tensors ({printable(', '.join(sorted(names)[:2]))}...). A language model drafts as it is "
            "for larger ones of its tokenizer: pass it as speculator; there is nothing to convert"
        )
    others = "".join(f", {one.name} of {one.owner}" for one in _added().formats)
    raise ValueError(
        f"{checkpoint.path} is no draft that hf_spec knows (speculators, EAGLE-1/2/3, SpecForge, ModelOpt, Medusa, "
        f"MTP layers of Qwen and MiMo, DFlash, DFlash2, DSpark, P-EAGLE{others}): its tensors are "
        f"{sorted(names)[:4]}...{''.join(f' Note that {one}.' for one in problems)}"
    )


def translate(checkpoint: Checkpoint) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    """Return the config and the weights of our model for a checkpoint of any format.

    Errors: ValueError for an unknown format, or an incomplete or invalid config.
    """
    found = find_format(checkpoint)
    try:
        _check_values(checkpoint)
        warn_of_unknown(checkpoint.path, found.unknown(checkpoint.config, checkpoint.tensors))
        config, tensors = found.read(copy.deepcopy(checkpoint.config), dict(checkpoint.tensors))
        if type(config) not in config_classes().values():
            raise TypeError(f"it gave a {type(config).__name__}, which is the config of no kind of draft")
        return config, tensors
    except KeyError as error:
        raise ValueError(
            f"{checkpoint.path}, read as {found.name}: there is no {printable(error)}; complete the config or copy "
            "the weights again"
        ) from error
    except UNFIT as error:
        raise ValueError(f"{checkpoint.path}, read as {found.name}: {printable(error)}") from error


def is_saved_quantised(config: dict[str, Any]) -> bool:
    """Tell whether a config is one that ``save_pretrained`` of a quantised draft wrote."""
    return config.get("model_type") == SpeculatorConfig.model_type and bool(config.get("quantization_config"))


def _check_values(checkpoint: Checkpoint) -> None:
    parts = (checkpoint.config, checkpoint.config.get("text_config"))
    is_quantised = any(isinstance(one, dict) and one.get("quantization_config") for one in parts)
    for name, tensor in checkpoint.tensors.items():
        is_table = name.rpartition(".")[2] in ("d2t", "t2d", "token_map")
        is_integer = not (is_table or tensor.is_floating_point())
        if name.endswith(SCALES) or (is_quantised and is_integer):
            raise ValueError(
                f"{printable(name)} is part of weights that are stored quantised. hf_spec loads such files only where "
                "save_pretrained of a draft wrote them; take the weights of the unquantised checkpoint"
            )
        if tensor.is_complex() or tensor.is_floating_point() == is_table:
            raise ValueError(
                f"{printable(name)} holds values of type {tensor.dtype}; "
                f"{'tokens are integers' if is_table else 'weights are real'}; copy or convert the weights again"
            )
    for name in ("dtype", "torch_dtype"):
        dtype = checkpoint.config.get(name)
        if dtype is not None and not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
            raise ValueError(f"{name} is {dtype!r}; name a type of torch in config.json, such as 'bfloat16'")


def register_auto_classes() -> None:
    """Register our classes with AutoConfig and AutoModel, for what ``save_pretrained`` writes; may be repeated."""
    AutoConfig.register(SpeculatorConfig.model_type, SpeculatorConfig, exist_ok=True)
    for kind in DRAFT_MODELS:
        AutoModel.register(kind.config_class, kind, exist_ok=True)
        AutoModelForCausalLM.register(kind.config_class, NoLanguageModel, exist_ok=True)


class NoLanguageModel:
    """The class that ``AutoModelForCausalLM`` finds for a draft: loading it says that a draft is no language model."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise a ValueError that says how to load the draft at ``path``."""
        raise ValueError(
            f"{path} is a draft: it drafts for a language model and is none by itself. Load it with "
            "AutoModel.from_pretrained and pass it to the language model: target.generate(..., speculator=draft)"
        )

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls.from_pretrained(config.name_or_path or type(config).__name__)
