"""Attention that gives each node the same bits, whatever else is computed with it.

The keys that a node sees come in two parts, which depend on its place in its own text only (``columns.py``). The
query heads of a group, of all nodes, are the queries of a key head. A kernel is called with such numbers of queries
only that agree, as rows of a product are (``rows.py``)::

    query  (tiles, key heads, queries, width)      keys  (1, key heads, places of one part, width)

In trees, the late keys of each node are its own. There, each node is a tile.

The parts are put together by the logarithms of their sums, in float32. Keys that a node does not see weigh exactly 0.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import AttentionInterface

from ..scoring.trials import ExplainedError
from .columns import (
    COLUMNS,
    NAME,
    STEP,
    Columns,
    Piece,
    Tiling,
    columns_of_all,
    hidden_score,
    late_places,
    register_mask,
)
from .known import settings_of_torch
from .rows import agreeing

# Numbers of queries that are tried. For more queries the kernel of CPUs looks at how many there are of
# all, and other multiples than of 8 give each thread a part of a buffer that begins at another alignment.
QUERIES = (8, 16, 24, 32)
# Kernels of torch that return the logarithms of sums, too; other devices multiply and add by torch's functions.
KERNELS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_efficient_attention",
}
MANY = 640  # early keys that are tried: more than kernels look at in one go
# Bytes of early keys of a text that are copied in less time than a call for each text takes, and on an accelerator.
CPU_BYTES, OTHER_BYTES = 400_000, 64 << 20
AT_ONCE = 16  # tiles, where they are not attended to by such a kernel
REFUSED = ("cache", "indices", "block_indices", "sinks")  # arguments of attention that the kernel knows nothing of


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one part of the keys: outputs (tiles, key heads, queries, width), and the logarithms of their sums.

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
    """Do as ``attend_part`` where there is no kernel, such as for caps: by products of each tile, in float32."""
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
    query = pad(query, padding)
    # Of what all tiles share there is one.
    key, value, mask = (states if len(states) == 1 else pad(states, padding) for states in (key, value, mask))
    parts = []
    for first in range(0, len(query), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        keys, values, masks = (states if len(states) == 1 else states[some] for states in (key, value, mask))
        parts.append(_by_products(query[some], keys, values, masks, scale, cap))
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
    if width != out_width:
        query, key, value = (pad(states, (0, most - states.shape[-1])) for states in (query, key, value))
    dtype, cap = query.dtype, softcap
    tiling = tiling_of((key_heads, heads // key_heads, most, dtype, cap), query.device, columns.places)
    if position_bias is None:
        pieces = columns.pieces(tiling, dtype)
    else:
        pieces = columns.with_bias(position_bias, key_heads, tiling, dtype)
    query = query.unflatten(1, (key_heads, -1)).transpose(2, 3)  # (batch, key heads, nodes, group, width)
    sinks = None if s_aux is None else s_aux.float().view(key_heads, -1)
    found = []
    for piece in pieces:
        seen = _of_piece(piece.queries(query), key, value, piece, tiling, scaling, sinks, cap)
        found.append(seen.transpose(1, 2)[..., :out_width].reshape(-1, heads, out_width))
    return (found[0] if len(found) == 1 else torch.cat(found)).view(batch, nodes, heads, out_width), None


def _of_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    piece: Piece,
    tiling: Tiling,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attend in a piece: ``query`` and result (texts, key heads, nodes, group, width).

    ``key`` is (batch, key heads, columns, width).
    """
    if not piece.parts:  # all of it is padding
        return torch.zeros_like(query)
    texts, _, nodes, *_ = query.shape
    owns, found = [part.is_own for part in piece.parts], []
    tiles = None if all(owns) else tiling.tiles(query)
    for part, is_own in zip(piece.parts, owns, strict=True):
        keys, values = (piece.keys(states, part) for states in (key, value))
        queries = tiling.of_each_node(query) if is_own or tiles is None else tiles
        both: Sequence[Tensor] = attend_part(queries, keys, values, part.mask, scale, cap)
        if is_own:
            both = [states[:, :, : tiling.group].unflatten(0, (texts, nodes)).transpose(1, 2) for states in both]
        elif any(owns):
            both = [tiling.nodes(states, texts, nodes) for states in both]
        found.append(both)
    if len(found) == 1 and sinks is None:
        seen = found[0][0]
    else:
        if sinks is not None:
            sinks = sinks[:, None].expand(texts, -1, nodes, -1)  # (texts, key heads, nodes, group)
            sinks = sinks if any(owns) else tiling.tiles(sinks[..., None])[..., 0]
        seen = _together(found, sinks)
    return seen if any(owns) else tiling.nodes(seen, texts, nodes)


def _together(parts: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> Tensor:
    """Put outputs (..., width) of late and early keys together, weighed by the logarithms (...) of their sums.

    ``sinks`` (...) weigh, and add nothing.
    """
    logs = [sums for _, sums in parts] + ([] if sinks is None else [sinks])
    # Trials show that a row of this softmax does not depend on the others, and each node has as many parts anywhere.
    weights = torch.stack(logs, -1).softmax(-1)
    found, *others = (output * weights[..., part : part + 1] for part, (output, _) in enumerate(parts))
    for other in others:  # each product is rounded before it is added, whatever the processor could do at once
        found += other
    return found.to(parts[0][0].dtype)


Shape = tuple[int, int, int, torch.dtype, float | None]  # key heads, queries of each, width, dtype, cap of scores


def tiling_of(shape: Shape, device: torch.device, places: int) -> Tiling:
    """Return in which shapes a kernel attends to keys of which early ones end at a multiple of ``places``.

    Errors: an ``ExplainedError`` where a node's bits depend on the others in any shape.
    """
    tiling = _tried(shape, device, places, settings_of_torch())
    if tiling is None:
        key_heads, group, width, dtype, _ = shape
        raise ExplainedError(
            f"attention of {key_heads} heads of {group} queries, {width} wide in {dtype}, depends on the other nodes"
        )
    return tiling


@functools.lru_cache(maxsize=256)
@torch.no_grad()
def _tried(shape: Shape, device: torch.device, places: int, settings: Hashable) -> Tiling | None:
    """Try in which shapes a query's bits depend on nothing else, with late keys and with few and many early ones."""
    late = late_places(places)
    trials = [_Trial(shape, device, count) for count in (late, places, MANY)]
    queries = sorted(set.intersection(*(set(one.queries) for one in trials)))
    if not queries or queries[-1] < shape[1] or not all(one.agrees(queries) for one in trials):
        return None
    copies = CPU_BYTES if device.type == "cpu" else OTHER_BYTES
    copies //= shape[0] * shape[2] * shape[3].itemsize
    return Tiling(shape[1], tuple(queries), late, trials[0].step(queries[0]), copies)


class _Trial:
    """Attention of random queries to ``places`` random keys: ``queries`` are the numbers of them that agree."""

    def __init__(self, shape: Shape, device: torch.device, places: int) -> None:
        key_heads, group, width, dtype, self.cap = shape
        tried = QUERIES if group <= QUERIES[-1] else (*QUERIES, -(-group // QUERIES[-1]) * QUERIES[-1])
        count, generator = 3 * tried[-1], torch.Generator().manual_seed(0)

        def drawn(rows: int) -> Tensor:
            return torch.randn((key_heads, rows, width), generator=generator, device="cpu").to(device, dtype)

        self.query, self.places = drawn(count), places
        # Keys begin anywhere in a cache.
        self.key, self.value = (drawn(places + 40)[None, :, 37 : 37 + places] for _ in range(2))
        hidden = torch.rand((count, places), generator=generator, device="cpu").to(device) < 0.4
        # Of two places with the same key, values cancel out. What is left of sums is their rounding, which shows
        # orders.
        one, other = torch.randperm(places, generator=generator, device="cpu").view(2, -1)
        self.key[:, :, other], self.value[:, :, other] = self.key[:, :, one], -self.value[:, :, one]
        hidden[:, other] = hidden[:, one]
        self.mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, hidden_score(dtype))
        self.queries = agreeing(self.attend, count, tried)

    def attend(
        self, rows: list[int], tiles: int = 1, seen: int | None = None, copied: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        """Return the bits of some ``rows``, (rows, numbers), in so many ``tiles``."""
        keys, values = self.key[:, :, :seen], self.value[:, :, :seen]
        queries = self.query[:, rows].unflatten(1, (tiles, -1)).transpose(0, 1)
        if copied:
            keys, values = keys.repeat(copied, 1, 1, 1), values.repeat(copied, 1, 1, 1)
        if mask is None:
            mask = self.mask[rows].clone()[:, :seen].unflatten(0, (tiles, 1, -1))
        output, sums = attend_part(queries, keys, values, mask, 0.3, self.cap)
        both = _together([(output, sums), (queries, sums + queries[..., 0])], None)
        bits = torch.cat([output.float(), sums[..., None], both.float()], -1)  # (tiles, key heads, queries, numbers)
        return bits.transpose(1, 2).flatten(0, 1).flatten(1)

    def agrees(self, queries: Sequence[int]) -> bool:
        """Tell whether bits depend on other tiles, on where keys lie, or on how a mask that hides nothing is given."""
        rows, some = list(range(3 * queries[-1])), list(range(queries[0]))
        wanted = torch.cat([self.attend(rows[first : first + queries[-1]]) for first in rows[:: queries[-1]]])
        ways = [(self.attend(rows, tiles=3), rows), (self.attend(rows, tiles=3, copied=3), rows)]
        ways.append((self.attend(some, copied=1), some))
        nothing = torch.zeros_like(self.mask[some])
        masks = (nothing[None, None], nothing[None, None, :1])
        one, other = (self.attend(some, mask=mask) for mask in masks)
        return torch.equal(one, other) and all(torch.equal(found, wanted[of]) for found, of in ways)

    def step(self, queries: int) -> int:
        """Return of how many places each multiple does, where none beyond it are seen; ends the trial."""
        step, some = STEP, list(range(queries))
        for seen in reversed(range(STEP, self.places, STEP)):
            self.mask[:, seen:] = hidden_score(self.mask.dtype)
            if not torch.equal(self.attend(some, seen=seen), self.attend(some)):
                step = self.places
        return step


def register_attention() -> None:
    """Let transformers know the attention and its masks."""
    AttentionInterface.register(NAME, attention)
    register_mask()
