"""Attention of one token at a time, whose kernel on a CPU takes long for a single query.

transformers' sdpa attention calls the kernel with one query for each head. In half precision that took 3 to 13 times
as long as with several, and in float32 no longer. So models with packed weights pass the query heads of a group as
queries of their one key head::

    query  (batch, heads, 1, width)   ->   (batch, key heads, group, width)

Heads that share no keys pass their query twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..wrappers import mark_wrapper, wraps
from .weight import PackedWeight

OTHERS = ("position_bias", "cache", "softcap", "s_aux")  # arguments that change more than which keys are seen
HALF = (torch.bfloat16, torch.float16)


def attend_together() -> None:
    """Let layers with packed weights attend so from now on; all others attend as before."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if wraps(original, __name__):
        return

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not _is_slow(module, query, key, attention_mask, kwargs):
            passed: tuple[Tensor, Tensor | None] = original(module, query, key, value, attention_mask, **kwargs)
            return passed
        is_alone = query.shape[1] == key.shape[1]
        queries = query.expand(-1, -1, 2, -1) if is_alone else query
        return folded(queries, key, value, attention_mask, kwargs.get("scaling"))[:, :1].contiguous(), None

    AttentionInterface.register("sdpa", mark_wrapper(attention, original, __name__))


def _is_slow(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, others: dict[str, Any]) -> bool:
    """Tell whether a packed layer would attend with one query for each head, and may do so otherwise."""
    if query.shape[2] != 1 or query.dtype not in HALF or query.device.type != "cpu" or not _is_packed(module):
        return False
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return False
    return shares_mask(module, query, key, mask, others)


def _is_packed(module: nn.Module) -> bool:
    """Tell whether a projection of ``module``, or one under an adapter of PEFT, is packed."""
    linear = (child._modules.get("base_layer", child) for child in module.children())
    return any(one is not None and isinstance(one._parameters.get("weight"), PackedWeight) for one in linear)


def shares_mask(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, others: dict[str, Any]) -> bool:
    """Tell whether all query heads of a group share one mask, and nothing but that mask changes the attention."""
    if mask is not None and (mask.ndim != 4 or mask.shape[1] != 1):
        return False
    if others.get("dropout") or any(others.get(name) is not None for name in OTHERS):
        return False
    return bool(getattr(module, "num_key_value_groups", 1) == query.shape[1] // key.shape[1])


def folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attend with the query heads of a group as further queries, and return (batch, nodes, heads, value width).

    ``mask`` is (batch, 1, group * nodes, slots), or has one row for all of them.
    """
    batch, heads, nodes, width = query.shape
    group = heads // key.shape[1]
    queries = query.reshape(batch, key.shape[1], group * nodes, width)
    seen = torch.nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scale)
    return seen.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()
