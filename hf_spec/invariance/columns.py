"""Where the keys that a node sees lie in its own text: the same places in any batch, block, tree and cache.

In a cache, a key's column depends on the padding of its row, on the window of its layer, and on the tree that its node
belongs to. Its *place* is its position in the text of its row, without masked tokens. Attention adds up keys in blocks
of places, so that it adds up the same numbers in the same order wherever they lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from ..scoring.masks import open_block
from ..scoring.trials import ExplainedError

NAME = "hf_spec_invariant"  # of the attention in transformers' lists of attention and mask functions
COLUMNS = "_hf_spec_columns"  # the attribute of a mask that holds its ``Columns``
PLACES, SHORT = 128, 16  # of a block of keys, usually and in ``short_blocks``
NODES = 256  # of a text that are attended to at once, at most

_places: ContextVar[int | None] = ContextVar("places", default=None)


@dataclass(frozen=True)
class Tiling:
    """The shapes in which the kernel of attention runs, so that a query's bits do not depend on what runs with it.

    Each node has ``group`` queries for a key head. A call computes so many queries as one of ``queries`` says, and
    keys of a block of ``places``, or of its first ones: a multiple of ``step``.
    """

    group: int
    queries: tuple[int, ...]
    places: int
    step: int

    def tiles(self, states: Tensor) -> Tensor:
        """Turn ``states`` (heads, nodes, group, width) into tiles of queries: (tiles, heads, queries, width)."""
        rows = states.flatten(1, 2)
        count = rows.shape[1]
        size = next((size for size in self.queries if size >= count), self.queries[-1])
        if missing := -count % size:
            rows = pad(rows, (0, 0, 0, missing))
        return rows[None] if count <= size else rows.unflatten(1, (-1, size)).transpose(0, 1)

    def nodes(self, tiles: Tensor, count: int) -> Tensor:
        """Undo ``tiles`` for so many nodes."""
        rows = tiles[0] if len(tiles) == 1 else tiles.transpose(0, 1).flatten(1, 2)
        nodes: Tensor = rows.narrow(1, 0, count * self.group).unflatten(1, (count, self.group))
        return nodes

    def of_one_node(self, states: Tensor) -> Tensor:
        """Turn ``states`` (nodes, heads, group, width) into a tile for each node."""
        size = next(size for size in self.queries if size >= self.group)
        return pad(states, (0, 0, 0, size - self.group))


@dataclass(frozen=True)
class Block:
    """One block of places, as the nodes of a text see it: ``mask`` (tiles, 1, queries, places) is added to scores.

    Where each node has keys of its own, it is a tile. With biases there is a mask for each key head.
    """

    number: int
    mask: Tensor


@dataclass(frozen=True)
class RowColumns:
    """The keys of one text: blocks that its nodes share, and those in which each node has keys of its own.

    ``shared`` (places,) and ``own`` (nodes, places) are the columns at the places of the blocks, of which empty ones
    have any. Where shared columns lie one after the other, ``shared`` is the first of them.
    """

    shared: Tensor | int
    shared_blocks: list[Block]
    own: Tensor
    own_blocks: list[Block]

    def with_bias(self, bias: Tensor, tiling: Tiling) -> RowColumns:
        """Add ``bias`` (nodes, key heads, group, columns) to the masks."""
        shared, own, size = [], [], tiling.places
        places = torch.arange(size, device=bias.device)
        for block in self.shared_blocks:
            at = places[: block.mask.shape[-1]] + (block.number - self.shared_blocks[0].number) * size
            column = at + self.shared if isinstance(self.shared, int) else self.shared[at]
            of_nodes = bias.index_select(-1, column.clamp(max=bias.shape[-1] - 1))
            shared.append(_biased(block, tiling.tiles(of_nodes.transpose(0, 1))))
        for block, column in self.own_columns(size):
            index = column[:, None, None].expand(*bias.shape[:3], -1)
            own.append(_biased(block, tiling.of_one_node(bias.gather(-1, index))))
        return dataclasses.replace(self, shared_blocks=shared, own_blocks=own)

    @functools.cached_property
    def shared_runs(self) -> list[tuple[list[Block], Tensor]]:
        """Group the shared blocks that the kernel attends to at once, and join their masks along the tiles.

        Those are whole blocks one after the other whose nodes are one tile. The last block of all may be part of one.
        """
        runs: list[list[Block]] = []
        for at, block in enumerate(self.shared_blocks):
            is_last = at + 1 == len(self.shared_blocks) and not self.own_blocks
            before = runs[-1][-1] if runs else None
            if (
                before is not None
                and len(block.mask) == 1
                and block.number == before.number + 1
                and block.mask.shape == before.mask.shape
                and not is_last
            ):
                runs[-1].append(block)
            else:
                runs.append([block])
        return [(run, torch.cat([block.mask for block in run]) if len(run) > 1 else run[0].mask) for run in runs]

    def own_columns(self, size: int) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block of ``size`` places in which nodes have keys of their own, and its columns."""
        for block in self.own_blocks:
            place = (block.number - self.own_blocks[0].number) * size
            yield block, self.own[:, place : place + block.mask.shape[-1]]


def _biased(block: Block, bias: Tensor) -> Block:
    """Put ``bias`` where nodes see a key. Elsewhere the lowest number stays, which a sum could turn into -inf."""
    return dataclasses.replace(block, mask=torch.where(block.mask == 0, bias.to(block.mask.dtype), block.mask))


ALL = slice(None)


@dataclass(frozen=True)
class Text:
    """What the nodes of one text see: each row of a batch has one, and packed rows have several.

    Its own are ``nodes`` and ``keys`` of a ``row`` of the batch. ``visible`` (nodes, keys) bool; ``place`` (keys,) of
    each key in the text. Up to place ``split`` all nodes see the same keys; beyond it, branches of a tree do not.
    """

    row: int
    visible: Tensor
    place: Tensor
    split: int | None = None
    nodes: slice = field(default_factory=lambda: ALL)  # slices are no default before Python 3.12
    keys: slice = field(default_factory=lambda: ALL)

    def bias_of(self, bias: Tensor) -> Tensor:
        """Return what ``Columns.with_bias`` adds to the scores of the text's nodes, (heads, nodes, keys)."""
        if bias.ndim > 1:
            return bias[self.row % len(bias), :, self.nodes, self.keys]
        own = self.place.masked_fill(~self.visible, 0).amax(1, keepdim=True)  # of each node: the last that it sees
        return bias.to(own.device)[:, None, None] * (self.place - own)

    def in_pieces(self) -> list[Text]:
        """Cut a long text into pieces of ``NODES`` nodes, which compute no blocks that only later ones see."""
        count, first = len(self.visible), self.nodes.start or 0
        if count <= NODES:
            return [self]
        parts = [slice(begin, min(begin + NODES, count)) for begin in range(0, count, NODES)]
        return [
            dataclasses.replace(self, visible=self.visible[part], nodes=slice(first + part.start, first + part.stop))
            for part in parts
        ]

    def columns(self, tiling: Tiling, dtype: torch.dtype) -> RowColumns:
        """Sort the keys into blocks; masks are of ``dtype``."""
        visible, place, size = self.visible, self.place, tiling.places
        if not visible.any():  # a piece of a prompt that is all padding in this row
            return RowColumns(0, [], place[:0], [])
        places = place[visible.any(0)]
        begin, end = int(places.min()) // size, int(places.max()) // size + 1  # in blocks
        split = end if self.split is None else min(end, max(begin, self.split // size))
        is_shared = place < split * size
        shared, filled = _by_place(visible & is_shared, place, begin * size, split * size)
        own, own_filled = _by_place(visible & ~is_shared, place, split * size, end * size)
        known = (visible.any(0) & is_shared).nonzero()[:, 0]
        first = known[0] - place[known[0]] + begin * size if len(known) else place.new_zeros(())
        in_order = first >= 0 and torch.equal(known - first, place[known] - begin * size)
        return RowColumns(
            int(first) if in_order else shared[len(visible)],
            _blocks(filled, begin, tiling, dtype, shared=True),
            own[: len(visible)],
            _blocks(own_filled, split, tiling, dtype, shared=False),
        )


class Columns:
    """The columns that all ``texts`` of a forward see in a layer's keys, for all layers that get the same mask.

    The texts are in the order of their rows and nodes, and together they have all nodes.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = [piece for text in texts for piece in text.in_pieces()]
        self.places = places_of_block()
        self._found: dict[tuple[Tiling, torch.dtype], list[tuple[Text, RowColumns]]] = {}
        self._with_bias: tuple[Tensor, Tiling, list[tuple[Text, RowColumns]]] | None = None  # the last, for all layers

    def of_texts(self, tiling: Tiling, dtype: torch.dtype) -> list[tuple[Text, RowColumns]]:
        """Return the columns of each text; masks are of ``dtype``."""
        found = self._found.get((tiling, dtype))
        if found is None:
            columns: dict[tuple[int, int], RowColumns] = {}  # of texts that see the same
            for text in self._texts:
                if (key := (id(text.visible), id(text.place))) not in columns:
                    columns[key] = text.columns(tiling, dtype)
            found = [(text, columns[id(text.visible), id(text.place)]) for text in self._texts]
            self._found[tiling, dtype] = found
        return found

    def with_bias(
        self, bias: Tensor, key_heads: int, tiling: Tiling, dtype: torch.dtype
    ) -> list[tuple[Text, RowColumns]]:
        """Do as ``of_texts``, and add ``bias`` to the masks.

        It is (batch or 1, heads, nodes, columns), or (heads,): by how much a key counts less for each place that it is
        away.
        """
        if self._with_bias is None or self._with_bias[0] is not bias or self._with_bias[1] != tiling:
            if bias.requires_grad and torch.is_grad_enabled():
                raise ExplainedError("position biases have no gradients in hf_spec.invariant; use torch.no_grad()")
            found = []
            for text, row in self.of_texts(tiling, dtype):
                by_node = text.bias_of(bias).unflatten(0, (key_heads, -1)).permute(2, 0, 1, 3)
                found.append((text, row.with_bias(by_node, tiling)))
            self._with_bias = bias, tiling, found
        return self._with_bias[2]


def places_of_block() -> int:
    """Return how many places a block of keys has: fewer while this thread is in ``short_blocks``."""
    return _places.get() or PLACES


@contextlib.contextmanager
def short_blocks() -> Iterator[None]:
    """Let forwards of this thread have blocks of few places, so that short texts have several."""
    token = _places.set(SHORT)
    try:
        yield
    finally:
        _places.reset(token)


def columns_of_all(batch: int, nodes: int, keys: int, device: torch.device) -> Columns:
    """Return the columns of nodes that all see all ``keys``, where there is no mask."""
    return _columns_of_all(batch, nodes, keys, device, places_of_block())


@functools.lru_cache(maxsize=8)
def _columns_of_all(batch: int, nodes: int, keys: int, device: torch.device, places: int) -> Columns:
    visible = torch.ones((nodes, keys), dtype=torch.bool, device=device)
    place = torch.arange(keys, device=device)
    pieces = Text(0, visible, place).in_pieces()
    return Columns([dataclasses.replace(piece, row=row) for row in range(batch) for piece in pieces])


def _by_place(visible: Tensor, place: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Sort the columns that each node sees by place, ``first`` to ``end``: columns, and which places are filled.

    ``visible`` (nodes, columns), ``place`` (columns,). Columns are (nodes + 1, places): in the last row are those
    that any node sees.
    """
    nodes, width = len(visible), end - first
    seen = torch.cat([visible, visible.any(0, keepdim=True)])
    index = torch.where(seen, place - first, width)  # (nodes + 1, columns); place `width` takes what is not seen
    column = torch.arange(seen.shape[1], device=seen.device).expand_as(index)
    columns = index.new_zeros((nodes + 1, width + 1)).scatter_(1, index, column)
    filled = seen.new_zeros((nodes + 1, width + 1)).scatter_(1, index, seen)
    return columns[:, :width], filled[:nodes, :width]


def hidden_score(dtype: torch.dtype) -> float:
    """Return what is added to the score of a key that a node does not see.

    It is half of the least number: kernels multiply scores, and a row of which all is infinite has no sum.
    """
    return torch.finfo(dtype).min / 2


def _blocks(filled: Tensor, begin: int, tiling: Tiling, dtype: torch.dtype, shared: bool) -> list[Block]:
    """Cut ``filled`` (nodes, places) into blocks, the first of them number ``begin``, and leave out empty ones.

    The last places of a block are left out if they are empty. Keys are ``shared`` by the nodes, or each one's own.
    """
    size = tiling.places
    if not filled.shape[1]:
        return []
    mask = torch.zeros_like(filled, dtype=dtype).masked_fill_(~filled, hidden_score(dtype))
    of_queries = mask[None, :, None].expand(-1, -1, tiling.group, -1)
    mask = tiling.tiles(of_queries) if shared else mask[:, None, None]
    ends = torch.arange(1, size + 1, device=filled.device) * filled.any(0).view(-1, size)  # 0 where nothing is
    used = [-(-end // tiling.step) * tiling.step for end in ends.amax(1).tolist()]
    parts = zip(itertools.count(begin), mask.split(size, -1), used, strict=False)
    return [Block(number, part[..., :count]) for number, part, count in parts if count]


def mask_with_columns(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Make transformers' mask, (batch, 1, nodes, columns) bool and never ``None``, which knows its ``Columns``.

    Masks of an encoder, and of attention to its states, are the same for all nodes. Draft nodes are none of their
    columns.
    """
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask, **kwargs)
    assert mask is not None
    to_source = kwargs.get("mask_function") is bidirectional_mask_function
    block, split = None if to_source else open_block(), None
    if block is None:
        column = torch.arange(kv_length, device=mask.device)[None].expand(batch_size, -1) + kv_offset
        padding = attention_mask
    else:
        column, padding = block.shown(kv_offset, kv_length)[1], block.padding
    place = _place(column, padding)
    if block is not None and block.ancestors is not None:
        split = int(_place(block.lengths[:, None], padding).min())
    mask = mask.contiguous()  # as transformers makes it for static caches, in a new tensor that knows no columns
    return with_columns(mask, [Text(row, mask[row, 0], place[row], split) for row in range(len(mask))])


def with_columns(mask: Tensor, texts: Sequence[Text]) -> Tensor:
    """Return ``mask``, which attention takes for what its ``texts`` say."""
    setattr(mask, COLUMNS, Columns(texts))
    return mask


def mask_of_packed(texts: Sequence[Text]) -> Tensor:
    """Return what stands for a mask where ``texts`` lie one after the other in the only row of a batch."""
    nodes, keys = (sum(text.visible.shape[dim] for text in texts) for dim in (0, 1))
    return with_columns(torch.ones((1, 1, 1, 1), dtype=torch.bool).expand(1, 1, nodes, keys), texts)


def _place(column: Tensor, mask: Tensor | None) -> Tensor:
    """Return each column (batch, columns) without the masked ones up to it; ``mask`` (batch, tokens) is 0 at those."""
    if mask is None:
        return column
    masked = (mask == 0).cumsum(1)
    return column - masked.gather(1, column.clamp(0, masked.shape[1] - 1))


def register_mask() -> None:
    """Let transformers know the mask function."""
    AttentionMaskInterface.register(NAME, mask_with_columns)
