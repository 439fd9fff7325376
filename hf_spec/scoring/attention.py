"""Grouped-query attention over a block without repeated keys and values.

Where a mask is given, transformers' sdpa attention copies the keys and values of a group once per query head. While a
block is scored, the query heads of a group become further queries of their one key head instead::

    query  (batch, key heads * group, nodes, width)   →   (batch, key heads, group * nodes, width)
    mask   (batch, 1, nodes, slots)                   →   (batch, 1, group * nodes, slots)

Each query still meets the same keys in the same order, so that the result is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_folding: ContextVar[bool] = ContextVar("hf_spec_folding", default=False)
_folding_in_graphs = False  # torch.compile cannot look into a context variable


@contextlib.contextmanager
def folding() -> Iterator[None]:
    """Fold groups in this thread's forwards of this context."""
    _hook_attention()
    token = _folding.set(True)
    try:
        yield
    finally:
        _folding.reset(token)


@contextlib.contextmanager
def folding_in_graphs() -> Iterator[None]:
    """Fold groups in the compiled forward of this context; one thread at a time."""
    global _folding_in_graphs
    _folding_in_graphs = True
    try:
        yield
    finally:
        _folding_in_graphs = False


def _hook_attention() -> None:
    """Wrap transformers' sdpa attention once; outside ``folding`` the wrapper passes every call through."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(original, "_hf_spec", False):
        return

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        active = _folding_in_graphs if torch.compiler.is_compiling() else _folding.get()
        if not active or not _can_fold(module, query, key, value, attention_mask, kwargs):
            passed: tuple[Tensor, Tensor | None] = original(module, query, key, value, attention_mask, **kwargs)
            return passed
        assert attention_mask is not None
        return _folded(query, key, value, attention_mask, kwargs.get("scaling")), None

    attention._hf_spec = True  # type: ignore[attr-defined]
    attention._hf_spec_original = original  # type: ignore[attr-defined]
    AttentionInterface.register("sdpa", attention)


def unhook_attention() -> None:
    """Give transformers back its own attention."""
    found = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", getattr(found, "_hf_spec_original", found))


def _can_fold(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, others: Any) -> bool:
    """Tell whether several nodes of heads in groups share a mask, and nothing else enters the attention."""
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1 or query.shape[2] == 1 or others.get("dropout"):
        return False
    if any(others.get(name) is not None for name in ("position_bias", "cache", "softcap", "s_aux")):
        return False
    group = getattr(module, "num_key_value_groups", 1)
    return 1 < group == query.shape[1] // key.shape[1] and not use_gqa_in_sdpa(mask, key, value)


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with the query heads of a group as further queries: (batch, nodes, heads, width of values)."""
    batch, heads, nodes, width = query.shape
    group = heads // key.shape[1]
    queries = query.reshape(batch, key.shape[1], group * nodes, width)
    seen = torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask.repeat(1, 1, group, 1), scale=scale
    )
    return seen.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()
