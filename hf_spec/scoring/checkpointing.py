"""Models in training mode with activation checkpointing, some of which then generate without their cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..sampling import other_random_numbers
from ..versions import CHECKPOINTING
from .architectures import cache_name, cross_attends
from .plain import input_device, new_cache
from .trials import tried_once


def drops_cache(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` now runs without its cache, because of transformers' activation checkpointing.

    The layers of transformers 5.24 drop it only where gradients are recorded, those of 5.17 always. Some models drop
    it by themselves. So one token is read to see.
    """
    return model.training and bool(getattr(model, CHECKPOINTING)) and (cross_attends(model) or _forgets(model))


@tried_once
def _forgets(model: PreTrainedModel) -> bool:
    cache, device = new_cache(model), input_device(model)
    if cache is None:
        return True
    given: dict[str, Any] = {cache_name(model): cache, "use_cache": True, "return_dict": True}
    with other_random_numbers(device):  # dropout draws some
        outputs = model(torch.zeros((1, 1), dtype=torch.long, device=device), **given)
    has_keys = any(getattr(layer, "is_initialized", False) for layer in cache.layers)
    return outputs.get(cache_name(model)) is None or not has_keys
