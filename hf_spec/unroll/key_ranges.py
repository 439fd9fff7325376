"""Attention of many queries to a long text, each to a range of its keys, without a mask of queries x keys.

Training uses it. The queries are positions of a text, or slots of blocks in the order of their roots.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

NARROWEST = 16  # heads for which FlexAttention has a kernel
BLOCK = 128  # queries whose scores are in memory at once, without FlexAttention
EMPTY_LOGSUMEXP = -1e30  # about the log-sum-exp of a query that attends to no key; finite, because -inf - -inf is nan


class KeyRange:
    """The range of keys that each query attends to: ``first`` up to before ``end``, both (batch, queries)."""

    def __init__(self, first: Tensor, end: Tensor) -> None:
        self.first = first
        self.end = end
        self._mask: BlockMask | None = None

    @cached_property
    def blocks(self) -> list[tuple[slice, slice]]:
        """Return slices of queries, each with the slice of keys that any of them attends to."""
        found, start = [], 0
        for first, end in zip(self.first.split(BLOCK, dim=1), self.end.split(BLOCK, dim=1), strict=True):
            seen = slice(max(0, int(first.min())), max(1, int(end.max())))
            found.append((slice(start, start + first.shape[1]), slice(min(seen.start, seen.stop - 1), seen.stop)))
            start += first.shape[1]
        return found

    def within(self, block: slice, seen: slice) -> tuple[Tensor, Tensor]:
        """Return first and end of a block of queries, relative to the keys that it sees."""
        return self.first[:, block] - seen.start, self.end[:, block] - seen.start

    def mask(self, keys: int) -> BlockMask:
        """Return the ranges as a mask for FlexAttention over so many ``keys``; cached for all layers."""
        if self._mask is not None:
            return self._mask
        first, end, (batch, queries) = self.first, self.end, self.first.shape

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key < end[row, query]) & (key >= first[row, query])

        self._mask = create_block_mask(seen, batch, None, queries, keys, device=first.device, _compile=first.is_cuda)
        return self._mask


def attend(query: Tensor, key: Tensor, value: Tensor, key_range: KeyRange, flex: bool) -> tuple[Tensor, Tensor]:
    """Attend within ``key_range``: outputs as ``query`` (batch, key heads, group, queries, size), and log-sum-exps.

    ``key`` and ``value`` are (batch, key heads, keys, size). The log-sum-exps (batch, key heads, group, queries) are
    float32; they serve to merge the result with other keys of the same queries. ``flex``: use FlexAttention.
    """
    query, value = query.to(key.dtype), value.to(key.dtype)  # under autocast, norms return later steps in float32
    flex = flex and (not query.is_cuda or min(query.shape[-1], value.shape[-1]) >= NARROWEST)
    found: tuple[Tensor, Tensor] = (_flex if flex else cast(Any, _ByBlocks.apply))(query, key, value, key_range)
    return found


class _ByBlocks(torch.autograd.Function):
    """Attention one block of queries at a time; the backward pass recomputes the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, key_range: KeyRange) -> tuple[Tensor, Tensor]:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])  # values may be narrower than keys
        logsumexp = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        for block, seen in key_range.blocks:
            scores = _scores(query[..., block, :], key[:, :, seen], *key_range.within(block, seen))
            top = scores.amax(-1, keepdim=True).clamp(min=EMPTY_LOGSUMEXP)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            mixed = weights.div_(total).flatten(2, 3).to(value.dtype) @ value[:, :, seen]
            attended[..., block, :] = mixed.view_as(attended[..., block, :])
            logsumexp[..., block] = (top + total.log())[..., 0]
        ctx.save_for_backward(query, key, value, attended, logsumexp)
        ctx.key_range = key_range
        return attended, logsumexp

    @staticmethod
    def backward(ctx: Any, of_attended: Tensor, of_logsumexp: Tensor) -> Any:
        """Return the gradients of query Q, key K and value V.

        With the weights P = exp(Q Kᵀ - LSE), the outputs O = P V and LSE, and their gradients dO and dLSE::

            dV = Pᵀ dO
            dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O) + dLSE)        S: the scores Q Kᵀ
            dQ = dS K,  dK = dSᵀ Q
        """
        query, key, value, attended, logsumexp = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        offset = of_logsumexp - (of_attended * attended).sum(-1, dtype=torch.float32)  # dLSE - rowsum(dO ∘ O)
        for block, seen in ctx.key_range.blocks:
            asked = query[..., block, :]
            scores = _scores(asked, key[:, :, seen], *ctx.key_range.within(block, seen))
            weights = scores.sub_(logsumexp[..., block, None]).exp_()  # P, (batch, key heads, group, block, seen)
            gradient = of_attended[..., block, :].flatten(2, 3).to(value.dtype)  # dO, (batch, key heads, -1, size)
            of_value[:, :, seen] += weights.flatten(2, 3).to(value.dtype).mT @ gradient
            of_weights = (gradient @ value[:, :, seen].mT).float().view_as(weights)  # dO Vᵀ
            of_scores = of_weights.add_(offset[..., block, None]).mul_(weights).flatten(2, 3).to(key.dtype)
            of_query[..., block, :] = (of_scores @ key[:, :, seen]).view_as(asked)
            of_key[:, :, seen] += of_scores.mT @ asked.flatten(2, 3).to(key.dtype)
        return of_query, of_key, of_value, None


def _scores(query: Tensor, key: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Compute scores in float32; each query sees the keys from ``first`` up to before ``end``, (batch, queries)."""
    (group, queries), keys = query.shape[2:4], key.shape[2]
    scores: Tensor = (query.flatten(2, 3) @ key.mT).unflatten(2, (group, queries))  # (batch, heads, group, ·, keys)
    place = torch.arange(keys, device=key.device)
    hidden = (place >= end[:, :, None]) | (place < first[:, :, None])  # (batch, queries, keys)
    return scores.float().masked_fill_(hidden[:, None, None], -torch.inf)


def _flex(query: Tensor, key: Tensor, value: Tensor, key_range: KeyRange) -> tuple[Tensor, Tensor]:
    """Attend with FlexAttention, compiled where there is a kernel for it."""
    function = _compiled_flex() if query.is_cuda else flex_attention
    attended, aux = function(
        query.flatten(1, 2),
        key,
        value,
        block_mask=key_range.mask(key.shape[2]),
        scale=1.0,
        enable_gqa=query.shape[2] > 1,
        return_aux=AuxRequest(lse=True),
    )
    shape = (key.shape[1], -1)
    return attended.unflatten(1, shape), aux.lse.unflatten(1, shape)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)
