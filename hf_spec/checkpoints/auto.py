"""Load a draft of any known format as one of our models."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration import SpeculatorConfig, max_positions
from ..drafts.files import Checkpoint
from ..untrusted import printable
from .files import HUB_OPTIONS, read_checkpoint
from .kinds import UNFIT, find_format, is_saved_quantised, kind_of, translate


class AutoDraftModel:
    """The loader of drafts of any known format; see ``from_pretrained``."""

    def __init__(self) -> None:
        raise TypeError("use AutoDraftModel.from_pretrained(path_or_id)")

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
        """Load the draft at ``path``, a directory or Hub id, in any known format.

        ``target`` is checked against the draft and lends the weights that the file lacks; on the meta device, without
        weights, it is only checked. ``kwargs`` are those of any ``from_pretrained`` of transformers (dtype,
        device_map, revision, ...), without ``config`` and ``state_dict``, which are read. No code of the checkpoint is
        executed.

        Errors: TypeError for these two; OSError for missing, damaged or half-written files. ValueError for an unknown
        format, or weights or a target that do not fit.
        """
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        checkpoint = read_checkpoint(path, **hub)
        if is_saved_quantised(checkpoint.config):  # only transformers knows what its tensors mean
            kind = kind_of(SpeculatorConfig.from_dict(checkpoint.config))
            loaded = kind.from_pretrained(path, **hub, **kwargs)
        else:
            loaded = load(checkpoint, **kwargs)
        if target is not None:
            draft = loaded[0] if kwargs.get("output_loading_info") else loaded
            raise_positions(draft.config, target)
            draft.check(target) if target.device.type == "meta" else draft.bind(target)
        return loaded


def load(checkpoint: Checkpoint, **kwargs: Any) -> Any:
    """Build our model from a checkpoint of any format; ``kwargs`` and errors are those of ``AutoDraftModel``."""
    if own := next((name for name in ("config", "state_dict") if name in kwargs), None):
        raise TypeError(
            f"{own} is read from the files of {checkpoint.path}, whatever their format: leave it out, or call "
            "from_pretrained of the draft's class"
        )
    config, tensors = translate(checkpoint)
    model = kind_of(config)
    try:
        loaded = model.from_pretrained(None, config=config, state_dict=tensors, **kwargs)
    except torch.OutOfMemoryError:  # a RuntimeError too, but not the file's fault
        raise
    except UNFIT as error:
        raise ValueError(f"{checkpoint.path}, read as {find_format(checkpoint).name}: {printable(error)}") from error
    draft = loaded[0] if kwargs.get("output_loading_info") else loaded
    draft.config.name_or_path = draft.name_or_path = checkpoint.path
    return loaded


def raise_positions(config: SpeculatorConfig, target: PreTrainedModel) -> None:
    """Raise the draft's ``max_position_embeddings`` to the target's if its RoPE type does not depend on the number.

    Public drafts say 2048, where other engines stop or fail.
    """
    if config.transformer_layer_config is None:
        return
    layers, rope = config.layers, config.layers.rope_parameters.get("rope_type")
    if rope in ("default", "linear", "llama3"):
        layers.max_position_embeddings = max(layers.max_position_embeddings, max_positions(target.config))
