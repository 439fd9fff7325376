"""Measure how much longer a forward takes for more tokens, on the model's largest linear layers only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..packing.weight import PackedWeight
from .plain import input_device

PASSES = 5  # timed passes over the layers, for each number of tokens
SHARE = 1 / 4  # least share of the weights without embeddings that must be measured, to speak for the others


@torch.no_grad()
def costs_of_widths(model: PreTrainedModel, widths: Sequence[int]) -> list[float] | None:
    """Return the time of a forward of each width (in tokens), relative to the first; ``None`` if it is unknown.

    Measured on the largest linear layers of ``model``, one after the other. As in a forward, no layer finds its
    weights still cached from the last pass. It is unknown where most weights are experts', quantized, or split between
    devices: these layers would say nothing about the others.
    """
    weights, device = _largest_weights(model), input_device(model)
    taken: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(PASSES + 1 if weights else 0):
        for width, seconds in taken.items():
            states = torch.ones(width, weights[0].shape[1], dtype=weights[0].dtype, device=device)
            start = now(device)
            for weight in weights:
                functional.linear(states, weight)  # the layer itself may have hooks, which are others'
            seconds.append(now(device) - start)
    if not weights:
        return None
    first, *others = (median(seconds[1:]) for seconds in taken.values())
    return [1.0, *(other / first for other in others)]


def _largest_weights(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights of the largest linear layers, all of one shape; none if they are too small a part."""
    ends = {id(one) for layer in _ends(model) for one in layer.parameters()}
    weights = [layer.weight for layer in model.modules() if type(layer) is nn.Linear]
    weights = [one for one in weights if _is_plain(one, model) and id(one) not in ends]
    largest = max(weights, key=Tensor.numel, default=None)
    weights = [one for one in weights if largest is not None and one.shape == largest.shape]
    inner = sum(one.numel() for one in model.parameters() if id(one) not in ends)
    return weights if sum(map(Tensor.numel, weights)) >= SHARE * inner else []


def _ends(model: PreTrainedModel) -> list[nn.Module]:
    return [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]


def _is_plain(weight: Tensor, model: PreTrainedModel) -> bool:
    is_known = isinstance(weight, PackedWeight) or type(weight.data) is Tensor
    return is_known and weight.is_floating_point() and weight.device == input_device(model)


def now(device: torch.device) -> float:
    """Return the time in seconds, after all work queued on ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
