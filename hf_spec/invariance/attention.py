"""Attention that gives each node the same bits, whatever else is computed with it.

Each node is a row of its own, with the query heads of a group as its queries. Its keys come in blocks of a fixed
number of places (``columns.py``), so that the kernel always runs in the same shape::

    query  (nodes, key heads, group, width)      keys  (nodes, key heads, places of one block, width)

The blocks are put together by the logarithms of their sums, one after the other, in float32. A block that a node does
not see weighs exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import AttentionInterface

from ..scoring.trials import ExplainedError
from .columns import COLUMNS, NAME, Block, Columns, RowColumns, columns_of_all, hidden_score, register_mask

PLACES = 128  # of a block of keys, at most
VECTOR = 16  # numbers that a processor adds at once, at most
# Kernels of torch that return the logarithms of sums, too; other devices multiply and add by torch's functions.
KERNELS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_efficient_attention",
}
AT_ONCE = 16  # nodes, where they are not attended to by such a kernel
REFUSED = ("cache", "indices", "block_indices", "sinks")  # arguments of attention that the kernel knows nothing of


def block_size(width: int, device: torch.device) -> int:
    """Return how many places a block of keys of this ``width`` has.

    The kernel of CPUs keeps places + width + 2 numbers of a query in each thread's part of a buffer. That part has to
    begin at an aligned address, or products sum in another order in the second thread than in the first.
    """
    return PLACES - (width + 2) % VECTOR if device.type == "cpu" else PLACES


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys: outputs (nodes, key heads, group, width), and the logarithms of their sums.

    ``query`` (nodes, key heads, group, width); ``key`` and ``value`` (nodes or 1, key heads, places, width); ``mask``
    (nodes, 1, 1, places) is added. Scores are bent to stay between -``cap`` and ``cap``.
    """
    place = query.device.type
    if cap is not None or place not in KERNELS:
        products = _by_products if place == "cpu" else _by_products_of_some
        return products(query, key, value, mask, scale, cap)
    nodes, heads, group, _ = query.shape
    key, value = key.expand(nodes, -1, -1, -1), value.expand(nodes, -1, -1, -1)
    mask = mask.expand(nodes, heads, group, -1)
    kernel = getattr(torch.ops.aten, KERNELS[place])
    if place == "cpu":
        output, sums = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    else:  # it adds up a query's keys in one order, and rounds the number of queries up in the second result
        output, sums, *_ = kernel(query, key, value, mask, True, scale=scale)
    return output, sums[..., :group]


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Do as ``attend_block`` where there is no kernel, such as for caps: by products of each node, in float32."""
    # Products add up in another order where their numbers begin at another alignment.
    key, value = (states.float().expand(len(query), -1, -1, -1).contiguous() for states in (key, value))
    scores = torch.matmul(query.float(), key.mT) * scale  # (nodes, key heads, group, places)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask.float()
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum. The order in which a sum of its own adds up would depend on the other nodes.
    sums = scores.amax(-1) - weights.amax(-1).log()
    return torch.matmul(weights, value).to(query.dtype), sums


def _by_products_of_some(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Do as ``_by_products``, for ``AT_ONCE`` nodes at a time: GPUs add up in another order for other numbers."""
    nodes, missing = len(query), -len(query) % AT_ONCE
    padding = (0, 0, 0, 0, 0, 0, 0, missing)
    query, mask = pad(query, padding), pad(mask, padding)
    key, value = (states if len(states) == 1 else pad(states, padding) for states in (key, value))
    parts = []
    for first in range(0, len(query), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        keys, values = (states if len(states) == 1 else states[some] for states in (key, value))
        parts.append(_by_products(query[some], keys, values, mask[some], scale, cap))
    output, sums = map(torch.cat, zip(*parts, strict=True))
    return output[:nodes], sums[:nodes]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: return (batch, nodes, heads, width).

    ``s_aux`` (heads,) are the logits of attention sinks; ``softcap`` caps scores; ``position_bias`` (batch or 1,
    heads, nodes, keys) is added to them. One of (heads,) are the slopes of ALiBi.

    Errors: a ValueError for what is not computed here, such as masks of another kind.
    """
    columns = getattr(attention_mask, COLUMNS, None)
    is_causal = kwargs.get("is_causal")
    if attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        columns = columns_of_all(len(query), query.shape[2], key.shape[2], key.device)
    unknown = [name for name in REFUSED if kwargs.get(name) is not None] + (["dropout"] if dropout else [])
    if unknown or not isinstance(columns, Columns):
        what = f"with {', '.join(unknown)}" if unknown else "by a mask that transformers' mask functions did not make"
        raise ExplainedError(f"{type(module).__name__} attends {what}, which hf_spec.invariant does not compute")
    batch, heads, nodes, width = query.shape
    key_heads, out_width = key.shape[1], value.shape[-1]
    most = max(width, out_width)
    scaling = width**-0.5 if scaling is None else scaling
    query = query.view(batch, key_heads, heads // key_heads, nodes, width).permute(0, 3, 1, 2, 4)
    query, key, value = (_widened(states, most) for states in (query.contiguous(), key, value))
    sinks = None if s_aux is None else s_aux.float().view(key_heads, -1)
    size, dtype = block_size(most, query.device), query.dtype
    if position_bias is None:
        texts = columns.of_texts(size, dtype)
    else:
        texts = columns.with_bias(position_bias, key_heads, size, dtype)
    found = [
        _of_text(
            query[at.row, at.nodes], key[at.row, :, at.keys], value[at.row, :, at.keys], own, scaling, sinks, softcap
        )
        for at, own in texts
    ]
    seen = torch.cat(found).view_as(query)  # (batch, nodes, key heads, group, width)
    return seen[..., :out_width].reshape(batch, nodes, heads, out_width), None


def _widened(states: Tensor, width: int) -> Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


def _of_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: RowColumns,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attend in one text: ``query`` (nodes, key heads, group, width), keys and values (key heads, columns, width)."""
    size = block_size(query.shape[-1], query.device)
    parts = []
    if row.shared_blocks:
        keys, values = (_at_places(states, row.shared) for states in (key, value))
        begin = 0 if row.shared is None else row.shared_blocks[0].number
        for block in row.shared_blocks:
            place = (block.number - begin) * size
            one, other = (_cut(states, place, size)[None] for states in (keys, values))
            parts.append((block, *attend_block(query[block.first : block.end], one, other, block.mask, scale, cap)))
    if row.own_blocks:
        begin = row.own_blocks[0].number
        for block in row.own_blocks:
            place = (block.number - begin) * size
            column = row.own[block.first : block.end, place : place + size]
            one, other = (
                states.index_select(1, column.flatten()).unflatten(1, column.shape).transpose(0, 1)
                for states in (key, value)
            )
            parts.append((block, *attend_block(query[block.first : block.end], one, other, block.mask, scale, cap)))
    if len(parts) == 1 and sinks is None and len(parts[0][1]) == len(query):
        return parts[0][1]
    return _together(query, parts, sinks)


def _at_places(states: Tensor, column: Tensor | None) -> Tensor:
    return states if column is None else states.index_select(1, column)


def _cut(states: Tensor, place: int, size: int) -> Tensor:
    """Return one block of ``states`` (key heads, places, width), filled up by zeros where there are not enough."""
    part = states[:, place : place + size]
    if part.shape[1] < size:
        return pad(part, (0, 0, 0, size - part.shape[1]))
    return part if part.stride(1) == part.shape[2] else part.contiguous()


def _together(query: Tensor, parts: list[tuple[Block, Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Put the outputs of blocks together, weighed by the logarithms of their sums; ``sinks`` weigh, and add nothing.

    The weights come from a softmax over the blocks, whose kernel adds up a row in the same order however many rows
    there are. So each block has a place of its own there, and what is left of whole vectors weighs 0. Padding sees
    nothing and gets zeros.
    """
    shape, last = query.shape[:-1], max((block.number for block, _, _ in parts), default=0) + 1
    logs = query.new_full((*shape, -(-(last + 1) // VECTOR) * VECTOR), float("-inf"), dtype=torch.float32)
    if sinks is not None:
        logs[..., 0] = sinks
    for block, _, sums in parts:
        logs[block.first : block.end, ..., block.number + 1] = sums
    weights = logs.softmax(-1).nan_to_num(0.0)
    seen = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for block, output, _ in parts:
        nodes = slice(block.first, block.end)
        seen[nodes] += output.float() * weights[nodes, ..., block.number + 1, None]
    return seen.to(query.dtype)


Shape = tuple[int, int, int, torch.dtype, float | None]  # key heads, queries of each, width, dtype, cap of scores
NODES = (1, 2, 3, 6, 16, 33)  # numbers of nodes for which a trial compares bits


def agrees(shape: Shape, device: torch.device) -> bool:
    """Try whether a node's bits depend on other nodes, on where its keys lie, or on keys that it does not see."""
    key_heads, group, width, dtype, cap = shape
    size, most, generator = block_size(width, device), NODES[-1], torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query, keys, values = (
        drawn(most, key_heads, group, width),
        drawn(key_heads, 300, width),
        drawn(key_heads, 300, width),
    )
    hidden = torch.rand((most, 1, 1, size), generator=generator).to(device) < 0.4
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, hidden_score(dtype))
    inside = keys[None, :, 37 : 37 + size], values[None, :, 37 : 37 + size]
    key, value = (states.clone() for states in inside)
    known = [attend_block(query[i : i + 1].clone(), key, value, mask[i : i + 1], 0.3, cap) for i in range(most)]
    wanted = [torch.cat(parts) for parts in zip(*known, strict=True)]
    for count in NODES:
        own = key.repeat(count, 1, 1, 1), value.repeat(count, 1, 1, 1)
        for first in (0, most - count):
            nodes = slice(first, first + count)
            for one_key, one_value in (inside, own):
                found = attend_block(query[nodes], one_key, one_value, mask[nodes], 0.3, cap)
                if not all(torch.equal(one, other[nodes]) for one, other in zip(found, wanted, strict=True)):
                    return False
    return True


def register_attention() -> None:
    """Let transformers know the attention and its masks."""
    AttentionInterface.register(NAME, attention)
    register_mask()
