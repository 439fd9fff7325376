"""Where the keys that a node sees lie in its own text: the same places in any batch, block, tree and cache.

In a cache, a key's column depends on the padding of its row, on the window of its layer, and on the tree that its node
belongs to. Its *place* is its position in the text of its row, without padding. Attention adds up keys in blocks of
places, so that it adds up the same numbers in the same order wherever they lie.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from ..scoring.masks import open_block
from ..scoring.trials import ExplainedError

NAME = "hf_spec_invariant"  # of the attention in transformers' lists of attention and mask functions
COLUMNS = "_hf_spec_columns"  # the attribute of a mask that holds its ``Columns``


@dataclass(frozen=True)
class Block:
    """One block of places of one row, as its nodes see it.

    ``first`` and ``end`` are the nodes that see any of it. ``mask`` (nodes, 1, 1, places) is added to their scores;
    with biases it is (nodes, key heads, group, places).
    """

    number: int
    first: int
    end: int
    mask: Tensor


@dataclass(frozen=True)
class RowColumns:
    """The keys of one row: blocks that its nodes share, and those in which each node has keys of its own.

    ``shared`` (places,) and ``own`` (nodes, places) are the columns at the places of the blocks; ``None`` for
    ``shared``: column c of the cache is place c. Columns of empty places are any.
    """

    shared: Tensor | None
    shared_blocks: list[Block]
    own: Tensor
    own_blocks: list[Block]

    def with_bias(self, bias: Tensor, size: int) -> RowColumns:
        """Add ``bias`` (nodes, key heads, group, columns) to the masks of blocks of ``size`` places."""
        shared, own, last = [], [], bias.shape[-1] - 1
        begin = 0 if self.shared is None or not self.shared_blocks else self.shared_blocks[0].number
        for block in self.shared_blocks:
            places = torch.arange(size, device=bias.device) + (block.number - begin) * size
            column = places.clamp(max=last) if self.shared is None else self.shared[places]
            shared.append(_biased(block, bias[block.first : block.end].index_select(-1, column)))
        begin = self.own_blocks[0].number if self.own_blocks else 0
        for block in self.own_blocks:
            place = (block.number - begin) * size
            column = self.own[block.first : block.end, place : place + size]
            of_nodes = bias[block.first : block.end]
            own.append(_biased(block, of_nodes.gather(-1, column[:, None, None].expand(*of_nodes.shape[:3], -1))))
        return dataclasses.replace(self, shared_blocks=shared, own_blocks=own)


def _biased(block: Block, bias: Tensor) -> Block:
    """Put ``bias`` where nodes see a key. Elsewhere the lowest number stays, which a sum could turn into -inf."""
    return dataclasses.replace(block, mask=torch.where(block.mask == 0, bias.to(block.mask.dtype), block.mask))


def _all() -> slice:
    return slice(None)


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
    nodes: slice = field(default_factory=_all)
    keys: slice = field(default_factory=_all)

    def bias_of(self, bias: Tensor) -> Tensor:
        """Return what ``Columns.with_bias`` adds to the scores of the text's nodes, (heads, nodes, keys)."""
        if bias.ndim > 1:
            return bias[self.row % len(bias), :, self.nodes, self.keys]
        own = self.place.masked_fill(~self.visible, 0).amax(1, keepdim=True)  # of each node: the last that it sees
        return bias.to(own.device)[:, None, None] * (self.place - own)

    def columns(self, size: int, dtype: torch.dtype) -> RowColumns:
        """Sort the keys into blocks of ``size`` places; masks are of ``dtype``."""
        visible, place = self.visible, self.place
        if not visible.any():  # a piece of a prompt that is all padding in this row
            return RowColumns(None, [], place[:0], [])
        places = place[visible.any(0)]
        begin, end = int(places.min()) // size, int(places.max()) // size + 1  # in blocks
        split = end if self.split is None else min(end, max(begin, self.split // size))
        is_shared = place < split * size
        shared, mask = _by_place(visible & is_shared, place, begin * size, split * size)
        columns = shared[visible.shape[0]]
        own, own_mask = _by_place(visible & ~is_shared, place, split * size, end * size)
        known = (visible.any(0) & is_shared).nonzero()[:, 0]
        identity = begin == 0 and torch.equal(place[known], known)
        return RowColumns(
            None if identity else columns,
            _blocks(mask, begin, size, dtype),
            own[: visible.shape[0]],
            _blocks(own_mask, split, size, dtype),
        )


class Columns:
    """The columns that all ``texts`` of a forward see in a layer's keys, for all layers that get the same mask.

    The texts are in the order of their rows and nodes, and together they have all nodes.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self._found: dict[tuple[int, torch.dtype], list[tuple[Text, RowColumns]]] = {}
        self._with_bias: tuple[Tensor, int, list[tuple[Text, RowColumns]]] | None = None  # the last, for all layers

    def of_texts(self, size: int, dtype: torch.dtype) -> list[tuple[Text, RowColumns]]:
        """Return the columns of each text in blocks of ``size`` places; masks are of ``dtype``."""
        found = self._found.get((size, dtype))
        if found is None:
            found = []
            for text in self._texts:
                is_like_last = found and text.visible is found[-1][0].visible and text.place is found[-1][0].place
                found.append((text, found[-1][1] if is_like_last else text.columns(size, dtype)))
            self._found[size, dtype] = found
        return found

    def with_bias(self, bias: Tensor, key_heads: int, size: int, dtype: torch.dtype) -> list[tuple[Text, RowColumns]]:
        """Do as ``of_texts``, and add ``bias`` to the masks.

        It is (batch or 1, heads, nodes, columns), or (heads,): by how much a key counts less for each place that it is
        away.
        """
        if self._with_bias is None or self._with_bias[0] is not bias or self._with_bias[1] != size:
            if bias.requires_grad and torch.is_grad_enabled():
                raise ExplainedError("position biases have no gradients in hf_spec.invariant; use torch.no_grad()")
            found = []
            for text, row in self.of_texts(size, dtype):
                by_node = text.bias_of(bias).unflatten(0, (key_heads, -1)).permute(2, 0, 1, 3)
                found.append((text, row.with_bias(by_node, size)))
            self._with_bias = bias, size, found
        return self._with_bias[2]


@functools.lru_cache(maxsize=8)
def columns_of_all(batch: int, nodes: int, keys: int, device: torch.device) -> Columns:
    """Return the columns of nodes that all see all ``keys``, where there is no mask."""
    visible = torch.ones((nodes, keys), dtype=torch.bool, device=device)
    place = torch.arange(keys, device=device)
    return Columns([Text(row, visible, place) for row in range(batch)])


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


def _blocks(filled: Tensor, begin: int, size: int, dtype: torch.dtype) -> list[Block]:
    """Cut ``filled`` (nodes, places) into blocks, the first of them number ``begin``, and leave out empty ones."""
    found = []
    low = hidden_score(dtype)
    for number, part in enumerate(filled.split(size, dim=1) if filled.shape[1] else ()):
        sees = part.any(1).nonzero()[:, 0].tolist()
        if sees:
            first, end = sees[0], sees[-1] + 1
            mask = torch.zeros_like(part, dtype=dtype).masked_fill_(~part, low)
            found.append(Block(begin + number, first, end, mask[first:end].view(end - first, 1, 1, size)))
    return found


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
    before = column.new_zeros((batch_size, 1)) if padding is None else _length_of_padding(padding)
    if block is not None and block.ancestors is not None:
        split = int((block.lengths[:, None] - before).min())
    place = column - before
    return with_columns(mask, [Text(row, mask[row, 0], place[row], split) for row in range(len(mask))])


def with_columns(mask: Tensor, texts: Sequence[Text]) -> Tensor:
    """Return ``mask``, which attention takes for what its ``texts`` say."""
    setattr(mask, COLUMNS, Columns(texts))
    return mask


def mask_of_packed(texts: Sequence[Text]) -> Tensor:
    """Return what stands for a mask where ``texts`` lie one after the other in the only row of a batch."""
    nodes, keys = (sum(text.visible.shape[dim] for text in texts) for dim in (0, 1))
    return with_columns(torch.ones((1, 1, 1, 1), dtype=torch.bool).expand(1, 1, nodes, keys), texts)


def _length_of_padding(mask: Tensor) -> Tensor:
    """Return how many columns of each row (batch, columns) of a mask are left padding, (batch, 1)."""
    return mask.to(torch.long).argmax(1, keepdim=True)


def register_mask() -> None:
    """Let transformers know the mask function."""
    AttentionMaskInterface.register(NAME, mask_with_columns)
