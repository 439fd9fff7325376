"""Grouped-query attention over a block of draft tokens without repeated keys and values.

Where a mask is given, transformers' sdpa attention copies the keys and values of a group once per query head. While a
block is scored, the query heads of a group are instead *folded* into further queries of their one key head::

    query  (batch, key heads * group, nodes, width)   →   (batch, key heads, group * nodes, width)
    mask   (batch, 1, nodes, slots)                   →   (batch, 1, group * nodes, slots)

Each query still meets the same keys in the same order, so that the result is the same. All layers of a forward get the
same mask, which is prepared for the kernel once per forward instead of once per layer.

A compiler of graphs that fuses sums gets attention with few queries written out instead, where a CPU's kernel is slow.

Where rows are padded, or of unequal length, a layer of full attention may be computed in *spans*: neighbouring rows,
and the columns that these rows use. A single row with a single node needs no mask then, because it sees all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..packing.attention import attend_together, folded, shares_mask
from ..wrappers import mark_wrapper, wraps

_folding: ContextVar[_Masks | None] = ContextVar("hf_spec_folding", default=None)
_folding_in_graphs = _fusing_in_graphs = False  # torch.compile cannot look into a context variable

# Inductor's fused sums are faster on a CPU than the kernel for at most so many queries of a key head. With one query
# the kernel took nine times as long in bfloat16, and 13 in float16 (32 heads, 1,024 slots, AMD EPYC with AVX-512).
FUSED_QUERIES = {torch.bfloat16: 1, torch.float16: 4}


class Span(NamedTuple):
    """Rows from ``row`` up to ``end`` that attend to the columns from ``first`` up to ``last``, and to no others."""

    row: int
    end: int
    first: int
    last: int


class _Masks:
    """The masks of one forward as the kernel takes them: additive, and repeated for each query head of a group.

    ``spans`` hold for masks that show all committed columns but padding, which ``note_causal`` names.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self.spans = spans
        self._width = max((span.last for span in spans), default=0)
        self.causal: list[Tensor] = []
        self._prepared: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def spans_of(self, mask: Tensor, key: Tensor) -> Sequence[Span]:
        """Return the spans to attend in with ``mask`` and ``key`` of one layer; none if it has to be done at once."""
        if self.spans and key.shape[2] == self._width and any(mask is one for one in self.causal):
            return self.spans
        return ()

    def prepared(self, mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Turn ``mask`` (batch, 1, nodes, slots) into (batch, 1, group * nodes, slots) of ``dtype``, once."""
        found = self._prepared.get((id(mask), group, dtype))
        if found is None:
            added = mask.to(dtype).log_() if mask.dtype == torch.bool else mask  # 0 where seen, else -inf
            # The mask is kept, too: its id is the key, and must not be given to another tensor.
            found = mask, added.repeat(1, 1, group, 1) if group > 1 else added
            self._prepared[id(mask), group, dtype] = found
        return found[1]


@contextlib.contextmanager
def folding(spans: Sequence[Span] = ()) -> Iterator[None]:
    """Fold groups in this thread's forwards of this context, and attend in ``spans`` if there are any."""
    _hook_attention()
    token = _folding.set(_Masks(spans))
    try:
        yield
    finally:
        _folding.reset(token)


def note_causal(mask: Tensor) -> Tensor:
    """Name ``mask``, which a layer of full attention is about to get, as one that spans hold for; return it."""
    if (masks := _folding.get()) is not None and masks.spans:
        masks.causal.append(mask)
    return mask


@contextlib.contextmanager
def folding_in_graphs(fuses: bool) -> Iterator[None]:
    """Fold groups in the compiled forward of this context; one thread at a time.

    ``fuses`` says that the compiler fuses products with the sums over them, so that no product is ever in memory.
    """
    global _folding_in_graphs, _fusing_in_graphs
    _folding_in_graphs, _fusing_in_graphs = True, fuses
    try:
        yield
    finally:
        _folding_in_graphs = _fusing_in_graphs = False


def _hook_attention() -> None:
    """Wrap transformers' sdpa attention once; outside ``folding`` the wrapper passes every call through."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if wraps(original, __name__):
        return

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None:
            passed: tuple[Tensor, Tensor | None] = original(module, query, key, value, None, **kwargs)
            return passed
        in_graph = torch.compiler.is_compiling()
        masks = None if in_graph else _folding.get()
        if not (_folding_in_graphs if in_graph else masks):
            passed = original(module, query, key, value, attention_mask, **kwargs)
            return passed
        if in_graph and _fusing_in_graphs and _can_fuse(module, query, key, attention_mask, kwargs):
            return _written_out(query, key, value, attention_mask, kwargs.get("scaling")), None
        spans = () if masks is None else masks.spans_of(attention_mask, key)
        if masks is not None and spans and shares_mask(module, query, key, attention_mask, kwargs):
            return _in_spans(query, key, value, attention_mask, masks, spans, kwargs.get("scaling")), None
        is_ordinary = query.shape[2] == 1 and not in_graph  # a plain step: it must round as plain `generate` does
        folds = not is_ordinary and _can_fold(module, query, key, value, attention_mask, kwargs)
        group = query.shape[1] // key.shape[1] if folds else 1
        if masks is not None and kwargs.get("position_bias") is None:
            attention_mask = masks.prepared(attention_mask, group, query.dtype)
        elif folds:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
        if not folds:
            passed = original(module, query, key, value, attention_mask, **kwargs)
            return passed
        return folded(query, key, value, attention_mask, kwargs.get("scaling")), None

    AttentionInterface.register("sdpa", mark_wrapper(attention, original, __name__))


def unhook_attention() -> None:
    """Restore transformers' own attention, also for packed models."""
    found = ALL_ATTENTION_FUNCTIONS["sdpa"]
    while getattr(found, "_hf_spec", None) in (__name__, attend_together.__module__):
        found = found._hf_spec_original
    AttentionInterface.register("sdpa", found)


def _can_fold(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, others: Any) -> bool:
    """Tell whether there are groups of query heads that share their keys and a mask, and would get copies of keys."""
    if mask is None or getattr(module, "num_key_value_groups", 1) == 1:
        return False
    return shares_mask(module, query, key, mask, others) and not use_gqa_in_sdpa(mask, key, value)


def _can_fuse(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, others: Any) -> bool:
    """Tell whether there are so few queries of each key head, on a CPU, that fused sums are faster than the kernel."""
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    if query.device.type != "cpu" or queries > FUSED_QUERIES.get(query.dtype, 0):
        return False
    return shares_mask(module, query, key, mask, others)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with sums in float32 that a compiler fuses; (batch, nodes, heads, value width)."""
    batch, heads, nodes, width = query.shape
    group = heads // key.shape[1]
    queries = query.reshape(batch, key.shape[1], group * nodes, 1, width).float()
    scores = (queries * key.unsqueeze(2).float()).sum(-1)  # (batch, key heads, group * nodes, slots)
    scores = scores * (width**-0.5 if scale is None else scale)
    mask = mask.repeat(1, 1, group, 1)
    least = torch.finfo(torch.float32).min  # not -inf, for a row that sees nothing
    shown = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    seen = (shown.softmax(-1).unsqueeze(-1) * value.unsqueeze(2).float()).sum(3)
    return seen.to(query.dtype).reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _in_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    masks: _Masks,
    spans: Sequence[Span],
    scale: float | None,
) -> Tensor:
    """Attend in ``spans``, with the query heads of a group as further queries; (batch, nodes, heads, value width)."""
    batch, heads, nodes, width = query.shape
    group = heads // key.shape[1]
    queries = query.reshape(batch, key.shape[1], group * nodes, width)
    seen = []
    for row, end, first, last in spans:
        shown = None
        if nodes > 1 or end - row > 1:
            shown = masks.prepared(mask, group, query.dtype)[row:end, :, :, first:last]
        keys, values = key[row:end, :, first:last], value[row:end, :, first:last]
        attend = torch.nn.functional.scaled_dot_product_attention
        seen.append(attend(queries[row:end], keys, values, attn_mask=shown, scale=scale))
    return torch.cat(seen).reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()
