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
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .weight import PackedWeight

OTHERS = ("position_bias", "cache", "softcap", "s_aux")  # arguments that change more than which keys are seen
HALF = (torch.bfloat16, torch.float16)


def attend_together() -> None:
    """Let layers with packed weights attend so from now on; all others attend as before."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    function = original
    while function is not None:
        if getattr(function, "_hf_spec", None) == __name__:
            return
        function = getattr(function, "_hf_spec_original", None)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        rows = _queries(module, query, key, attention_mask, kwargs)
        if rows == 1:
            passed: tuple[Tensor, Tensor | None] = original(module, query, key, value, attention_mask, **kwargs)
            return passed
        return _attend(query, key, value, attention_mask, rows, kwargs.get("scaling")), None

    attention._hf_spec = __name__  # type: ignore[attr-defined]
    attention._hf_spec_original = original  # type: ignore[attr-defined]
    AttentionInterface.register("sdpa", attention)


def _queries(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, others: dict[str, Any]) -> int:
    """Return how many queries a key head gets: 1 where transformers attends."""
    if query.shape[2] != 1 or query.dtype not in HALF or query.device.type != "cpu" or not _is_packed(module):
        return 1
    if others.get("dropout") or any(others.get(name) is not None for name in OTHERS):
        return 1
    if mask is not None and (mask.ndim != 4 or mask.shape[1] != 1):
        return 1
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return 1
    group: int = getattr(module, "num_key_value_groups", 1)
    if group * key.shape[1] != query.shape[1]:
        return 1
    return max(2, group)


def _is_packed(module: nn.Module) -> bool:
    """Tell whether a projection of ``module``, or one under an adapter of PEFT, is packed."""
    linear = (child._modules.get("base_layer", child) for child in module.children())
    return any(one is not None and isinstance(one._parameters.get("weight"), PackedWeight) for one in linear)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: int, scale: float | None) -> Tensor:
    """Attend with ``rows`` queries of each key head; return (batch, 1, heads, value width)."""
    batch, heads, _, width = query.shape
    is_twice = heads == key.shape[1]
    queries = query.expand(-1, -1, rows, -1) if is_twice else query.reshape(batch, -1, rows, width)
    seen = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scale)
    return (seen[:, :, :1] if is_twice else seen).reshape(batch, 1, heads, -1).contiguous()
