"""Whether a draft's encoder is the target's: the source is then encoded once."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Settings of an encoder that its weights do not show, by parts of their names.
_BESIDE_WEIGHTS = ("head", "act", "feed_forward_proj", "eps", "scal", "bucket", "distance", "rope", "window")

_Found = tuple["weakref.ref[PreTrainedModel]", Hashable, bool]
_known: WeakKeyDictionary[PreTrainedModel, _Found] = WeakKeyDictionary()  # by draft, for its latest target


def shares_encoder(draft: Any, target: Any) -> bool:
    """Tell whether the encoder of ``draft`` is that of ``target``: the same module, or one with equal weights.

    Weights are compared once, and again when they have changed.
    """
    if not (draft.config.is_encoder_decoder and target.config.is_encoder_decoder):
        return False
    own, other = draft.get_encoder(), target.get_encoder()
    if own is other:
        return True
    key = _state(own), _state(other)
    if (found := _known.get(draft)) is not None and found[0]() is target and found[1] == key:
        return found[2]
    result = _is_equal(own, other)
    _known[draft] = weakref.ref(target), key, result
    return result


def encoder_width(model: Any) -> int | None:
    """Return the width of the states that the encoder of ``model`` returns; ``None`` if it does not say so."""
    width = getattr(getattr(model.get_encoder(), "config", None), "hidden_size", None)
    return width if isinstance(width, int) else None


def _state(encoder: nn.Module) -> Hashable:
    """Return a key that changes with the weights of ``encoder``: where they are, and how often they were written."""
    weights = chain(encoder.parameters(), encoder.buffers())
    return tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights)


@torch.no_grad()
def _is_equal(own: nn.Module, other: nn.Module) -> bool:
    weights, others = own.state_dict(), other.state_dict()
    return (
        type(own) is type(other)
        and weights.keys() == others.keys()
        and _settings(own) == _settings(other)
        and all(_same(weight, others[name]) for name, weight in weights.items())
    )


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if one.shape != other.shape or "meta" in (one.device.type, other.device.type):
        return False
    # In whatever precision each is: the draft may be the narrower one.
    low, high = sorted((one, other), key=lambda weight: weight.element_size())
    return torch.equal(low, high.to(low))


def _settings(encoder: Any) -> dict[str, Any]:
    settings = encoder.config.to_dict()
    return {
        name: value
        for name, value in settings.items()
        if "decoder" not in name and any(part in name for part in _BESIDE_WEIGHTS)
    }
