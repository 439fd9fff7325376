"""Attention of models that do not look theirs up among transformers' functions: computed by ours in the mode.

The forwards below do what those of Bloom, MPT and Falcon in transformers do, but for the order of their sums. ALiBi is
added by distance in the text; transformers counts columns from either end.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..scoring.hooks import mark_as_ours
from ..scoring.names import cache_among
from .columns import NAME


def attend_by_ours(model: Any) -> Callable[[Callable[[Any], Any]], None]:
    """Let attention modules of ``model`` that attend by themselves attend by our function; return what undoes that."""
    known = []
    for module in model.modules():
        forward: Any = FORWARDS.get(type(module).__name__)
        if forward is not None and _is_of_transformers(module) and not getattr(module, "slow_but_exact", False):
            module.forward = types.MethodType(mark_as_ours(forward), module)
            known.append(weakref.ref(module))

    def undo(of: Callable[[Any], Any]) -> None:
        for module in (one() for one in known):
            if module is not None:
                del of(module).forward

    return undo


def multiplies_rows(module: nn.Module) -> bool:
    """Tell whether ``module`` is Falcon's kind of linear layer, which adds its bias apart."""
    return type(module).__name__ == "FalconLinear" and _is_of_transformers(module)


def without_bias(module: nn.Module) -> nn.Module:
    """Return a layer like ``module`` without its bias, which would hide how a product was rounded."""
    found = copy.copy(module)
    found._parameters = module._parameters | {"bias": None}
    return found


def _is_of_transformers(module: nn.Module) -> bool:
    return "forward" not in vars(module) and type(module).__module__.startswith("transformers.models.")


def _seen(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    """Attend, and join the heads: (batch, nodes, heads * width)."""
    found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[NAME](module, query, key, value, mask, **kwargs)
    return found[0].flatten(2)


@functools.lru_cache(maxsize=64)
def _slopes(heads: int, module: str) -> Tensor:
    """Return by how much a key counts less for each token that it is away, (heads,), by the code of a ``module``."""
    code: Any = sys.modules[module]
    found: Tensor
    if hasattr(code, "build_mpt_alibi_tensor"):
        found = -code.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    else:
        found = code.build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    return found


def _bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if (cache := kwargs.get("layer_past")) is not None:
        key, value = cache.update(key, value, self.layer_idx)
    bias = _slopes(self.num_heads, type(self).__module__)
    seen = _seen(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, position_bias=bias)
    return self.dense(seen) + residual, None


def _mpt(
    self: Any, hidden_states: Tensor, position_bias: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    if (cache := cache_among(kwargs)) is not None:
        key, value = cache.update(key, value, self.layer_idx)
    bias = None if position_bias is None else _slopes(self.n_heads, type(self).__module__)
    seen = _seen(self, query, key, value, attention_mask, scaling=self.softmax_scale, position_bias=bias)
    return self.out_proj(seen), None


def _falcon(
    self: Any, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    parts = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        code: Any = sys.modules[type(self).__module__]
        query, key = code.apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
    if (cache := kwargs.get("layer_past")) is not None:
        key, value = cache.update(key, value, self.layer_idx)
    seen = _seen(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)
    return self.dense(seen), None


FORWARDS = {"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon}
