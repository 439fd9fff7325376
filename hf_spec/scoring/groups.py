"""Prompts of unequal length, read in groups of similar length instead of all being padded to the longest. ::

    p p p p p p p p        p p p p p p p p       one forward of 1 x 8 places
    - - - - - - p p   →    p p                   one forward of 2 x 2 places
    - - - - - - - p        - p

A forward on a CPU costs about as much as its places, and in addition the reading of the weights. That is as long as
the arithmetic of 11 to 34 places (float32 and bfloat16, models of 20 million to 1.1 billion parameters, one and two
cores). An accelerator needs hundreds of places to be busy at all, so there all prompts are read at once.

What the groups have read is put together in the layout of the padded prefill. Columns before a prompt are zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..versions import DummyLayer
from .graphs import is_compiled
from .names import OF_DECODER_ONLY
from .parts import Extent, cheapest_parts
from .plain import difference, plain_logits, rounding_of
from .prompts import Prompt, tokens_for
from .trials import tried_once

FORWARD_PLACES = 32  # what a further forward costs, in places
LEAST_SAVED = 0.03  # share of the places that groups must save


@dataclass(frozen=True)
class Group:
    """The ``rows`` (n,) of a batch that are read together, from column ``first`` on."""

    rows: Tensor
    first: int

    def inputs(self, ids: Tensor, kwargs: dict[str, Any], cache_name: str) -> tuple[Tensor, dict[str, Any]]:
        """Take the tokens of this group, and the arguments of their prefill with an empty cache of their own."""
        by_token = {name: kwargs[name] for name in OF_DECODER_ONLY[1:3] if kwargs.get(name) is not None}
        taken = {name: value[..., self.rows, self.first :] for name, value in by_token.items()}
        return ids[self.rows, self.first :], {**kwargs, **taken, cache_name: copy.deepcopy(kwargs[cache_name])}


@dataclass(frozen=True)
class Reading:
    """What was read: the outputs of the last forward, and the features (batch, tokens, widths), if any."""

    outputs: Any
    features: Tensor | None


def groups_of(model: PreTrainedModel, ids: Tensor, kwargs: dict[str, Any]) -> list[Group]:
    """Divide the prompts ``ids`` (batch, length), text alone, into groups; none where one forward costs least."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if len(ids) < 2 or not isinstance(mask, Tensor) or mask.shape != ids.shape or not _is_on_cpu(model, ids):
        return []
    if positions is not None and positions.shape[-2:] != ids.shape:  # some models have several axes of positions
        return []
    width = ids.shape[1]
    firsts = (mask.cumsum(1) == 0).sum(1).clamp(max=width - 1).tolist()
    order = sorted(range(len(ids)), key=firsts.__getitem__)
    extents = [Extent(firsts[row], width) for row in order]
    parts = cheapest_parts(extents, FORWARD_PLACES)
    groups = [Group(torch.tensor([order[i] for i in part], device="cpu"), extents[part[0]].first) for part in parts]
    read = sum(len(group.rows) * (width - group.first) for group in groups) + FORWARD_PLACES * (len(groups) - 1)
    if read > (1 - LEAST_SAVED) * len(ids) * width or not _is_plain(kwargs) or not reads_rows_alone(model):
        return []
    return groups


def _is_on_cpu(model: PreTrainedModel, ids: Tensor) -> bool:
    """Tell whether all weights are in the memory of the CPU, and no graph wants one shape."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return ids.device.type == "cpu" == model.device.type and places <= {"cpu"} and not is_compiled(model)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Tell whether the cache of a prefill has only layers that can be put together from those of groups."""
    cache = next((value for value in kwargs.values() if isinstance(value, DynamicCache)), None)
    known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return type(cache) is DynamicCache and not cache.offloading and all(type(one) in known for one in cache.layers)


@tried_once
def reads_rows_alone(model: PreTrainedModel) -> bool:
    """Tell whether a row reads the same alone as when it is padded on the left next to a longer one; measured once.

    It does not where positions are columns, or where padding is read as text.
    """
    if model.training:
        return False
    padded = Prompt.of_text(model)
    if len(padded.ids) < 2 or padded.mask is None or (alone := padded.alone(model, 1)) is None or alone.mask is None:
        return False
    last, follows = padded.ids[:, -1:], tokens_for(model, 2, 2, draw=1)
    pieces = [last, *follows.split(1, dim=1)]
    together = plain_logits(model, padded.ids[:, :-1], padded.mask[:, :-1], pieces)[1:]
    by_itself = plain_logits(model, alone.ids[:, :-1], alone.mask[:, :-1], [piece[1:] for piece in pieces])
    return bool(difference(by_itself, together).max() <= rounding_of(model))


def read_in_groups(
    groups: Sequence[Group],
    ids: Tensor,
    kwargs: dict[str, Any],
    cache_name: str,
    read: Callable[[Tensor, dict[str, Any]], Reading],
    last: int,
) -> Reading:
    """Let ``read`` read each group, and put together the cache, the ``last`` logits of each row, and the features."""
    cache, (batch, width) = kwargs[cache_name], ids.shape
    caches, logits, features = [], [], []
    for group in groups:
        own_ids, own_kwargs = group.inputs(ids, kwargs, cache_name)
        reading = read(own_ids, own_kwargs)
        caches.append(own_kwargs[cache_name])
        logits.append(reading.outputs.logits[:, -last:])
        features.append(reading.features)
    outputs = reading.outputs
    outputs.logits = _together(groups, logits, batch, last, 1)
    outputs[cache_name] = cache
    _fill(cache, groups, caches, batch, width)
    captured = [one for one in features if one is not None]
    return Reading(outputs, _together(groups, captured, batch, width, 1) if captured else None)


def _together(groups: Sequence[Group], parts: Sequence[Tensor], batch: int, width: int, dim: int) -> Tensor:
    """Align the ``parts`` of the groups to the right of ``width`` columns, dimension ``dim``; zeros precede them."""
    like = parts[0]
    whole = like.new_zeros((batch, *like.shape[1:dim], width, *like.shape[dim + 1 :]))
    for group, part in zip(groups, parts, strict=True):
        end = whole.narrow(dim, width - part.shape[dim], part.shape[dim])
        end[group.rows] = part
    return whole


def _fill(
    cache: DynamicCache, groups: Sequence[Group], caches: Sequence[DynamicCache], batch: int, width: int
) -> None:
    """Put the layers of the ``caches`` of groups together in ``cache``, one after the other to save memory."""
    for number, layers in enumerate(zip(*(one.layers for one in caches), strict=True)):
        if number == len(cache.layers):  # made by the reading
            cache.layers.append(layers[-1])
        layer: Any = cache.layers[number]
        if isinstance(layer, DummyLayer) or not layers[-1].is_initialized:  # it reads the keys of another layer
            continue
        held = width if not layers[-1].is_sliding else min(width, layers[-1].sliding_window - 1)
        state = {name: value for name, value in vars(layers[-1]).items() if name not in ("keys", "values")}
        for name in ("keys", "values"):
            state[name] = _together(groups, [getattr(one, name) for one in layers], batch, held, 2)
            for one in layers:
                setattr(one, name, None)
        vars(layer).update(state)
        if layer.is_sliding:
            layer.cumulative_length = width
