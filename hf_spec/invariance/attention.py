"""Attention that gives each node the same bits, whatever else is computed with it.

The keys of a text come in blocks of a fixed number of places (``columns.py``). The query heads of a group, of all
nodes, are the queries of a key head. A kernel is called with such numbers of queries only that agree, as rows of a
product are (``rows.py``)::

    query  (tiles, key heads, queries, width)      keys  (1, key heads, places of one block, width)

In trees, the last keys of each node are its own. There, each node is a tile.

The blocks are put together by the logarithms of their sums, one after the other, in float32. A block that a node does
not see weighs exactly 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import AttentionInterface

from ..scoring.trials import ExplainedError
from .columns import (
    ALL,
    COLUMNS,
    NAME,
    Block,
    Columns,
    RowColumns,
    Text,
    Tiling,
    columns_of_all,
    hidden_score,
    register_mask,
)
from .rows import agreeing

VECTOR = 16  # numbers that a processor adds at once, at most
# Numbers of queries and of places that are tried. For more queries the kernel of CPUs looks at how many there are of
# all, and other multiples than of 8 give each thread a part of a buffer that begins at another alignment.
QUERIES, STEP = (8, 16, 24, 32), 16
# Kernels of torch that return the logarithms of sums, too; other devices multiply and add by torch's functions.
KERNELS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_efficient_attention",
}
AT_ONCE = 16  # tiles, where they are not attended to by such a kernel
REFUSED = ("cache", "indices", "block_indices", "sinks")  # arguments of attention that the kernel knows nothing of


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys: outputs (tiles, key heads, queries, width), and the logarithms of their sums.

    ``query`` (tiles, key heads, queries, width); ``key`` and ``value`` (tiles or 1, key heads, places, width);
    ``mask`` (tiles, key heads or 1, queries or 1, places) is added. Scores are bent to stay between -``cap`` and
    ``cap``.
    """
    place = query.device.type
    if cap is not None or place not in KERNELS:
        products = _by_products if place == "cpu" else _by_products_of_some
        return products(query, key, value, mask, scale, cap)
    tiles, heads, queries, _ = query.shape
    if len(key) < tiles:
        key, value = key.expand(tiles, -1, -1, -1), value.expand(tiles, -1, -1, -1)
    kernel = _kernel(place)
    if place == "cpu":
        output, sums = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return output, sums
    mask = mask.expand(tiles, heads, queries, -1)
    # It adds up a query's keys in one order, and rounds the number of queries up in the second result.
    output, sums, *_ = kernel(query, key, value, mask, True, scale=scale)
    return output, sums[..., :queries]


@functools.cache
def _kernel(place: str) -> Any:
    return getattr(torch.ops.aten, KERNELS[place]).default


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Do as ``attend_block`` where there is no kernel, such as for caps: by products of each tile, in float32."""
    # Products add up in another order where their numbers begin at another alignment.
    key, value = (states.float().expand(len(query), -1, -1, -1).contiguous() for states in (key, value))
    scores = torch.matmul(query.float(), key.mT) * scale  # (tiles, key heads, queries, places)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask.float()
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum. The order in which a sum of its own adds up would depend on the other tiles.
    sums = scores.amax(-1) - weights.amax(-1).log()
    return torch.matmul(weights, value).to(query.dtype), sums


def _by_products_of_some(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Do as ``_by_products``, for ``AT_ONCE`` tiles at a time: GPUs add up in another order for other numbers."""
    tiles, missing = len(query), -len(query) % AT_ONCE
    padding = (0, 0, 0, 0, 0, 0, 0, missing)
    query, mask = pad(query, padding), pad(mask, padding)
    key, value = (states if len(states) == 1 else pad(states, padding) for states in (key, value))
    parts = []
    for first in range(0, len(query), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        keys, values = (states if len(states) == 1 else states[some] for states in (key, value))
        parts.append(_by_products(query[some], keys, values, mask[some], scale, cap))
    output, sums = map(torch.cat, zip(*parts, strict=True))
    return output[:tiles], sums[:tiles]


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
    query, key, value = (_widened(states, most) for states in (query, key, value))
    dtype, cap = query.dtype, softcap
    tiling = tiling_of((key_heads, heads // key_heads, most, dtype, cap), query.device, columns.places)
    if position_bias is None:
        texts = columns.of_texts(tiling, dtype)
    else:
        texts = columns.with_bias(position_bias, key_heads, tiling, dtype)
    query = query.unflatten(1, (key_heads, -1)).transpose(2, 3)  # (batch, key heads, nodes, group, width)
    sinks = None if s_aux is None else s_aux.float().view(key_heads, -1)
    found = []
    for at, own in texts:
        keys, values = (_keys_of(states, at) for states in (key, value))
        seen = _of_text(query[at.row, :, at.nodes], keys, values, own, tiling, scaling, sinks, cap).transpose(0, 1)
        if out_width < most:
            seen = seen[..., :out_width]
        found.append(seen.reshape(-1, heads, out_width))
    return (found[0] if len(found) == 1 else torch.cat(found)).view(batch, nodes, heads, out_width), None


def _keys_of(states: Tensor, text: Text) -> Tensor:
    """Return the part of ``states`` (batch, key heads, columns, width) that is a text's, (1, key heads, ...)."""
    if len(states) > 1:
        states = states[text.row : text.row + 1]
    return states if text.keys is ALL else states[:, :, text.keys]


def _widened(states: Tensor, width: int) -> Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


def _of_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: RowColumns,
    tiling: Tiling,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attend in one text: ``query`` (key heads, nodes, group, width), ``key`` (1, key heads, columns, width)."""
    parts: list[Part] = []
    nodes = query.shape[1]
    if columns.shared_blocks:
        tiles = tiling.tiles(query)
        keys, values = (_shared(states, columns, tiling.places) for states in (key, value))
        for (run, mask), one, other in zip(columns.shared_runs, keys, values, strict=True):
            queries = tiles if len(run) == 1 else tiles.repeat(len(run), 1, 1, 1)
            found = attend_block(queries, one, other, mask, scale, cap)
            parts.append((run, *(states.unflatten(0, (len(run), -1)) for states in found)))
    tile = tiling.of_one_node(query.transpose(0, 1)) if columns.own_blocks else query
    for block, column in columns.own_columns(tiling.places):
        one, other = (
            states[0].index_select(1, column.flatten()).unflatten(1, column.shape).transpose(0, 1)
            for states in (key, value)
        )
        found = attend_block(tile, one, other, block.mask, scale, cap)
        # (nodes, key heads, group, width) and (nodes, key heads, group)
        output, sums = (states[:, :, : tiling.group].transpose(0, 1) for states in found)
        parts.append(([block], tiling.tiles(output)[None], tiling.tiles(sums[..., None])[None, ..., 0]))
    if not parts:  # all of it is padding
        return torch.zeros_like(query)
    if len(parts) == 1 and len(parts[0][0]) == 1 and sinks is None:
        return tiling.nodes(parts[0][1][0], nodes)
    if sinks is not None:
        sinks = tiling.tiles(sinks[:, None, :, None].expand(-1, nodes, -1, -1))[..., 0]
    return tiling.nodes(_together(parts, sinks), nodes)


def _shared(states: Tensor, columns: RowColumns, size: int) -> list[Tensor]:
    """Return the shared blocks of ``states`` (1, key heads, columns, width), (blocks, key heads, places, width).

    There is one tensor for each run of blocks. A last block that is too short is filled up by zeros.
    """
    if not isinstance(columns.shared, int):
        states = states.index_select(2, columns.shared)
    elif columns.shared:
        states = states[:, :, columns.shared :]
    if states.stride(2) != states.shape[3]:
        states = states.contiguous()
    found = []
    for run, mask in columns.shared_runs:
        first, places = (run[0].number - columns.shared_blocks[0].number) * size, mask.shape[-1]
        if len(run) > 1:
            part = states[0, :, first : first + len(run) * size].unflatten(1, (-1, size)).transpose(0, 1)
        else:
            part = states[:, :, first : first + places]
            if missing := places - part.shape[2]:
                part = pad(part, (0, 0, 0, missing))
        found.append(part)
    return found


# Blocks, their outputs (blocks, tiles, key heads, queries, width), and the logarithms of their sums, of the same shape
# without width.
Part = tuple[list[Block], Tensor, Tensor]


def _together(parts: list[Part], sinks: Tensor | None) -> Tensor:
    """Put the outputs of blocks together, weighed by the logarithms of their sums.

    ``sinks``, (tiles, key heads, queries) as these sums, weigh, and add nothing.

    The weights come from a softmax over the blocks, whose kernel adds up a row in the same order however many rows
    there are. So each block has a place of its own there, and what is left of whole vectors weighs 0.
    """
    numbers = [block.number + 1 for run, _, _ in parts for block in run]
    outputs, sums = (
        torch.cat(states) if len(parts) > 1 else states[0] for states in list(zip(*parts, strict=True))[1:]
    )
    logs = sums.new_full((*sums.shape[1:], -(-(numbers[-1] + 1) // VECTOR) * VECTOR), float("-inf"))
    if sinks is not None:
        logs[..., 0] = sinks
    is_run = numbers[-1] - numbers[0] == len(numbers) - 1
    at: Any = slice(numbers[0], numbers[-1] + 1) if is_run else numbers
    logs[..., at] = sums.movedim(0, -1)
    weights = logs.softmax(-1)[..., at].movedim(-1, 0)  # (blocks, tiles, key heads, queries), in float32
    first, *others = (outputs * weights[..., None]).unbind()
    for other in others:  # each product is rounded before it is added, whatever the processor could do at once
        first += other
    return first.to(outputs.dtype)


Shape = tuple[int, int, int, torch.dtype, float | None]  # key heads, queries of each, width, dtype, cap of scores


def tiling_of(shape: Shape, device: torch.device, places: int) -> Tiling:
    """Return in which shapes a kernel attends to blocks of ``places`` keys.

    Errors: an ``ExplainedError`` where a node's bits depend on the others in any shape.
    """
    tiling = _tried(shape, device, places, torch.get_num_threads())
    if tiling is None:
        key_heads, group, width, dtype, _ = shape
        raise ExplainedError(
            f"attention of {key_heads} heads of {group} queries, {width} wide in {dtype}, depends on the other nodes"
        )
    return tiling


@functools.lru_cache(maxsize=256)
@torch.no_grad()
def _tried(shape: Shape, device: torch.device, places: int, threads: int) -> Tiling | None:
    """Try whether a query's bits depend on other ones, on where its keys lie, or on keys that it does not see."""
    key_heads, group, width, dtype, cap = shape
    tried = QUERIES if group <= QUERIES[-1] else (*QUERIES, -(-group // QUERIES[-1]) * QUERIES[-1])
    count, generator = 3 * tried[-1], torch.Generator().manual_seed(0)

    def drawn(rows: int) -> Tensor:
        return torch.randn((key_heads, rows, width), generator=generator).to(device, dtype)

    query, *buffers = drawn(count), *(drawn(2 * places + 40)[None, :, 37 : 37 + 2 * places] for _ in range(2))
    key, value = (buffer[:, :, :places] for buffer in buffers)
    key_of_two, value_of_two = (buffer[0].unflatten(1, (2, places)).transpose(0, 1) for buffer in buffers)
    hidden = torch.rand((count, places), generator=generator).to(device) < 0.4
    # Of two places with the same key, values cancel out. What is left of sums is their rounding, which shows orders.
    one, other = torch.randperm(places, generator=generator).view(2, -1)
    key[:, :, other], value[:, :, other], hidden[:, other] = key[:, :, one], -value[:, :, one], hidden[:, one]
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, hidden_score(dtype))

    def attend(rows: list[int], tiles: int = 1, seen: int = places, copied: int = 0) -> Tensor:
        """Return the bits of some ``rows``, (rows, numbers), in so many ``tiles``."""
        masks, keys, values = mask[rows].clone(), key[:, :, :seen], value[:, :, :seen]
        queries = query[:, rows].unflatten(1, (tiles, -1)).transpose(0, 1)
        if copied:
            keys, values = keys.repeat(copied, 1, 1, 1), values.repeat(copied, 1, 1, 1)
        masks = masks[:, :seen].unflatten(0, (tiles, 1, -1))
        output, sums = attend_block(queries, keys, values, masks, 0.3, cap)
        return together(output, sums)

    def attend_with_other_block(rows: list[int]) -> Tensor:
        """Do as ``attend``, in a call that attends to the next block, too."""
        masks = mask[rows][None, None].repeat(2, 1, 1, 1)
        queries = query[:, rows][None].repeat(2, 1, 1, 1)
        output, sums = attend_block(queries, key_of_two, value_of_two, masks, 0.3, cap)
        return together(output[:1], sums[:1])

    def together(output: Tensor, sums: Tensor) -> Tensor:
        bits = torch.cat([output.float(), sums[..., None]], -1)  # (tiles, key heads, queries, width + 1)
        return bits.transpose(1, 2).flatten(0, 1).flatten(1)

    queries = agreeing(attend, count, tried)
    if not queries or queries[-1] < group:
        return None
    rows, some = list(range(3 * queries[-1])), list(range(queries[0]))
    wanted = torch.cat([attend(rows[first : first + queries[-1]]) for first in rows[:: queries[-1]]])
    ways = [(attend(rows, tiles=3), rows), (attend(rows, tiles=3, copied=3), rows), (attend(some, copied=1), some)]
    ways += [(attend_with_other_block(rows[: queries[-1]]), rows[: queries[-1]])]
    if not all(torch.equal(found, wanted[of]) for found, of in ways):
        return None
    step = STEP
    for seen in reversed(range(STEP, places, STEP)):
        mask[:, seen:] = hidden_score(dtype)
        if not torch.equal(attend(some, seen=seen), attend(some)):
            step = places
    return Tiling(group, queries, places, step)


def register_attention() -> None:
    """Let transformers know the attention and its masks."""
    AttentionInterface.register(NAME, attention)
    register_mask()
