"""Where the keys that a node sees lie in its own text: the same places in any batch, block, tree and cache.

In a cache, a key's column depends on the padding of its row, on the window of its layer, and on the tree that its node
belongs to. Its *place* is its position in the text of its row, without masked tokens.

A node's keys are in two parts. The late ones begin at a multiple of ``PLACES``, and are half as many or more. The
early ones are all before them. So the keys that a node sees decide which of them are in which part, and nothing else.
Draft nodes of a tree share their early keys, unless the tree is deeper than ``PLACES // 2``.
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
# Early keys end at a multiple of so many places, usually and in `short_parts`.
PLACES, SHORT = 64, 16
NODES = 256  # of a text that are attended to at once, at most
STEP = 16  # late keys are a multiple of this
COPIED = 32_768  # early keys that are copied at once for nodes of deep trees
ONE_CALL = ([False], [True], [False, False], [True, False])  # whether late and early keys are each node's own

NO_PLACE = torch.iinfo(torch.long).max

_places: ContextVar[int | None] = ContextVar("places", default=None)


@dataclass(frozen=True)
class Tiling:
    """The shapes in which the kernel of attention runs, so that a query's bits do not depend on what runs with it.

    Each node has ``group`` queries for a key head. A call computes so many queries as one of ``queries`` says. It
    attends to a multiple of ``step`` late keys, at most ``late``. Copying at most ``copies`` early keys of each text
    costs less than a call for each of them.
    """

    group: int
    queries: tuple[int, ...]
    late: int
    step: int
    copies: int

    def tiles(self, states: Tensor) -> Tensor:
        """Turn ``states`` (texts, heads, nodes, group, width) into tiles of queries: (tiles, heads, queries, width).

        Each of several texts is one tile.
        """
        texts, heads, nodes, group, width = states.shape
        count = nodes * group
        size = next((size for size in self.queries if size >= count), self.queries[-1])
        if missing := -count % size:
            rows = states.new_zeros((texts, heads, count + missing, width))
            rows[:, :, :count].view(states.shape).copy_(states)
        else:
            rows = states.flatten(2, 3)
        return rows if count <= size else rows[0].unflatten(1, (-1, size)).transpose(0, 1)

    def nodes(self, tiles: Tensor, texts: int, count: int) -> Tensor:
        """Undo ``tiles`` for so many nodes of each text; also of (tiles, heads, queries)."""
        rows = tiles if len(tiles) == texts else tiles.transpose(0, 1).flatten(1, 2)[None]
        nodes: Tensor = rows[:, :, : count * self.group].view(texts, rows.shape[1], count, self.group, *rows.shape[3:])
        return nodes

    def of_each_node(self, states: Tensor) -> Tensor:
        """Turn ``states`` (texts, heads, nodes, group, width) into a tile for each node of each text."""
        size = next(size for size in self.queries if size >= self.group)
        return pad(states.transpose(1, 2).flatten(0, 1), (0, 0, 0, size - self.group))


@dataclass(frozen=True)
class Part:
    """Early or late keys, as nodes of one text or of several see them: ``mask`` is added to their scores.

    ``columns`` of each text are those at the places of the part: the first of columns that lie one after the other, or
    (places,), or (nodes, places) where each node has its own. Places without a key have any. The mask is (tiles, 1,
    queries, places), with a tile for each node that has its own keys. With biases there is a mask for each key head.
    For keys that the nodes share, one of (1, 1, 1, places) hides nothing.
    """

    columns: tuple[Tensor | int, ...]
    mask: Tensor

    @property
    def is_own(self) -> bool:
        """Tell whether each node has its own keys."""
        first = self.columns[0]
        return isinstance(first, Tensor) and first.ndim > 1

    def with_bias(self, bias: Tensor, tiling: Tiling) -> Part:
        """Add ``bias`` (nodes, key heads, group, columns) of the only text to the mask."""
        (column,) = self.columns
        if isinstance(column, int):
            column = column + torch.arange(self.mask.shape[-1], device=bias.device)
        if self.is_own:
            of_nodes = bias.gather(-1, column[:, None, None].expand(*bias.shape[:3], -1))
            added = tiling.of_each_node(of_nodes.transpose(0, 1)[None])
        else:
            of_nodes = bias.index_select(-1, column.clamp(max=bias.shape[-1] - 1))
            added = tiling.tiles(of_nodes.transpose(0, 1)[None])
        # Where nodes see no key the lowest number stays, which a sum could turn into -inf.
        return dataclasses.replace(self, mask=torch.where(self.mask == 0, added.to(self.mask.dtype), self.mask))

    @classmethod
    def join(cls, parts: Sequence[Part]) -> Part:
        """Join the same part of several texts. Late keys are filled up by hidden places to the longest text's."""
        masks = [part.mask for part in parts]
        places = max(mask.shape[-1] for mask in masks)
        columns = tuple(
            column if isinstance(column, int) else pad(column, (0, places - column.shape[-1]))
            for part in parts
            for column in part.columns
        )
        hides_nothing = not parts[0].is_own and all(mask.shape == (1, 1, 1, places) for mask in masks)
        if hides_nothing or all(mask is masks[0] for mask in masks):
            return cls(columns, masks[0])
        shape = [max(sizes) for sizes in zip(*(mask.shape for mask in masks), strict=True)]
        hidden = hidden_score(masks[0].dtype)
        filled = [pad(mask, (0, places - mask.shape[-1]), value=hidden).expand(shape) for mask in masks]
        return cls(columns, torch.cat(filled))


@dataclass(frozen=True)
class Piece:
    """Nodes whose late keys begin at the same place: their late ``parts``, and early ones if they have any.

    Nodes that see nothing have none. A piece of several ``texts`` has the same number of nodes of each, in one tile or
    with keys of their own. The texts follow each other in the batch, as rows or in one row.
    """

    texts: tuple[Text, ...]
    nodes: slice
    parts: tuple[Part, ...]

    def queries(self, states: Tensor) -> Tensor:
        """Take those of its nodes from ``states`` (batch, key heads, nodes, ...): (texts, key heads, nodes, ...)."""
        first, last = self.texts[0], self.texts[-1]
        if first.nodes is ALL:
            return states[first.row : last.row + 1, :, self.nodes]
        if first is last:
            return states[first.row : first.row + 1, :, first.nodes][:, :, self.nodes]
        of_texts: Tensor = states[first.row, :, first.nodes.start : last.nodes.stop].unflatten(
            1, (len(self.texts), -1)
        )
        return of_texts.transpose(0, 1)

    def keys(self, states: Tensor, part: Part) -> Tensor:
        """Take those of a ``part`` from ``states`` (batch, key heads, columns, width).

        They are (texts, key heads, places, width), or (texts * nodes, ...) where each node has its own.
        """
        places, first = part.mask.shape[-1], part.columns[0]
        in_step = all(isinstance(column, int) and column == first for column in part.columns)
        if isinstance(first, int) and in_step and self.texts[0].keys is ALL:
            return _keys_of_text(states[self.texts[0].row : self.texts[-1].row + 1], first, places)
        found = [
            _keys_of_text(states[text.row : text.row + 1, :, text.keys], column, places)
            for text, column in zip(self.texts, part.columns, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Join pieces of several texts."""
        if len(pieces) == 1:
            return pieces[0]
        parts = zip(*(piece.parts for piece in pieces), strict=True)
        return cls(
            tuple(text for piece in pieces for text in piece.texts), pieces[0].nodes, tuple(map(Part.join, parts))
        )


def _keys_of_text(states: Tensor, column: Tensor | int, places: int) -> Tensor:
    """Return the keys at a part's ``column`` of ``states`` (rows, key heads, columns, width), filled up by zeros."""
    if isinstance(column, int):
        found = states[:, :, column : column + places]
        if missing := places - found.shape[2]:
            return pad(found, (0, 0, 0, missing))
        return found if found.stride(2) == found.shape[3] else found.contiguous()
    if column.ndim == 1:
        return states.index_select(2, column)
    own: Tensor = states[0].index_select(1, column.flatten()).unflatten(1, column.shape)
    return own.transpose(0, 1)


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

    def pieces(self, tiling: Tiling, dtype: torch.dtype, places: int) -> list[Piece]:
        """Cut the nodes where another ``places`` begin, and sort their keys into parts; masks are of ``dtype``."""
        order, found, begin = self._column_of_first_place(), list[Piece](), 0
        for (early, late), some in itertools.groupby(self._bounds(places), key=lambda bounds: bounds[:2]):
            ends = [end for _, _, end in some]  # of the late keys
            for at in range(0, len(ends), size := self._nodes_at_once(early, late)):
                group = ends[at : at + size]
                nodes = slice(begin + at, begin + at + len(group))
                width = min(-(-(max(group) - late) // tiling.step) * tiling.step, tiling.late)
                sides = [(late, late + width), (early, late)]
                parts = [self._part(nodes, *side, order, tiling, dtype) for side in sides if side[0] < side[1]]
                found.append(Piece((self,), nodes, tuple(parts)))
            begin += len(ends)
        return found

    def _bounds(self, places: int) -> list[list[int]]:
        """Return for each node where its early keys begin, where its late ones begin, and where they end."""
        end = (self.place + 1).masked_fill(~self.visible, 0).amax(1)  # (nodes,), 0 where a node sees nothing
        first = self.place.masked_fill(~self.visible, NO_PLACE).amin(1)
        late = (end - 1 - places // 2).clamp(min=0) // places * places
        early = torch.minimum(first // places * places, late)
        bounds: list[list[int]] = torch.stack([early, late, end], 1).tolist()  # waits for a device
        return bounds

    def _nodes_at_once(self, early: int, late: int) -> int:
        if self.split is None or late <= self.split:
            return NODES
        return max(1, COPIED // max(1, late - early))

    def _column_of_first_place(self) -> int | None:
        """Return the column where place 0 is or would be; ``None`` where columns are not in the order of places."""
        known = self.visible.any(0)
        if self.split is not None:
            known = known & (self.place < self.split)
        column = known.nonzero()[:, 0]
        if not len(column):
            return None
        offset = column - self.place[column]
        return int(offset[0]) if bool((offset == offset[0]).all()) else None

    def _part(self, nodes: slice, begin: int, end: int, order: int | None, tiling: Tiling, dtype: torch.dtype) -> Part:
        """Return the keys from place ``begin`` to ``end`` of some nodes."""
        visible = self.visible[nodes]
        columns: Tensor | int
        is_own = self.split is not None and end > self.split
        if is_own or order is None or order + begin < 0:
            columns, filled = _by_place(visible & (self.place >= begin) & (self.place < end), self.place, begin, end)
            columns = columns[:-1] if is_own else columns[-1]
        else:
            columns, filled = order + begin, visible[:, order + begin : order + end]
            filled = pad(filled, (0, end - begin - filled.shape[1]))
        if not is_own and bool(filled.all()):
            return Part((columns,), torch.zeros((1, 1, 1, end - begin), dtype=dtype, device=visible.device))
        mask = torch.zeros_like(filled, dtype=dtype).masked_fill_(~filled, hidden_score(dtype))
        if is_own:
            return Part((columns,), mask[:, None, None])
        of_queries = mask[None, None, :, None].expand(-1, -1, -1, tiling.group, -1)
        return Part((columns,), tiling.tiles(of_queries))


class Columns:
    """The columns that all ``texts`` of a forward see in a layer's keys, for all layers that get the same mask.

    The texts are in the order of their rows and nodes, and together they have all nodes.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self.places = places_of_parts()
        self._found: dict[tuple[Tiling, torch.dtype], tuple[list[Piece], list[Piece]]] = {}
        self._with_bias: tuple[Tensor, Tiling, list[Piece]] | None = None  # the last, for all layers

    def pieces(self, tiling: Tiling, dtype: torch.dtype) -> list[Piece]:
        """Return the pieces of all texts in the order of their nodes; masks are of ``dtype``."""
        return self._pieces(tiling, dtype)[1]

    def _pieces(self, tiling: Tiling, dtype: torch.dtype) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces of each text, and the same joined."""
        found = self._found.get((tiling, dtype))
        if found is None:
            known: dict[tuple[int, int], list[Piece]] = {}  # of texts that see the same
            alone: list[Piece] = []
            for text in self._texts:
                if (key := (id(text.visible), id(text.place))) not in known:
                    known[key] = text.pieces(tiling, dtype, self.places)
                alone += [dataclasses.replace(piece, texts=(text,)) for piece in known[key]]
            found = self._found[tiling, dtype] = alone, _joined(alone, tiling)
        return found

    def with_bias(self, bias: Tensor, key_heads: int, tiling: Tiling, dtype: torch.dtype) -> list[Piece]:
        """Do as ``pieces``, and add ``bias`` to the masks.

        It is (batch or 1, heads, nodes, columns), or (heads,): by how much a key counts less for each place that it is
        away.
        """
        if self._with_bias is None or self._with_bias[0] is not bias or self._with_bias[1] != tiling:
            if bias.requires_grad and torch.is_grad_enabled():
                raise ExplainedError("position biases have no gradients in hf_spec.invariant; use torch.no_grad()")
            alone: list[Piece] = []
            for _, pieces in itertools.groupby(self._pieces(tiling, dtype)[0], key=lambda piece: id(piece.texts[0])):
                of_text = list(pieces)
                by_node = of_text[0].texts[0].bias_of(bias).unflatten(0, (key_heads, -1)).permute(2, 0, 1, 3)
                for one in of_text:
                    parts = tuple(part.with_bias(by_node[one.nodes], tiling) for part in one.parts)
                    alone.append(dataclasses.replace(one, parts=parts))
            self._with_bias = bias, tiling, _joined(alone, tiling)
        return self._with_bias[2]


def _joined(pieces: Sequence[Piece], tiling: Tiling) -> list[Piece]:
    """Join pieces that follow each other where one call of the kernel may do for them."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and _may_join(groups[-1][-1], piece, tiling):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [Piece.join(group) for group in groups]


def _may_join(piece: Piece, after: Piece, tiling: Tiling) -> bool:
    """Tell whether one call of the kernel may do for a ``piece`` and the one ``after`` it, each of one text.

    They are whole texts with as many nodes and as many early keys: more of these, hidden or not, give other bits.
    Nodes may have late keys of their own. Early keys that do not begin at the same column are copied.
    """
    nodes, owns, others = piece.nodes, [part.is_own for part in piece.parts], [part.is_own for part in after.parts]
    if not (nodes == after.nodes and owns == others and owns in ONE_CALL):
        return False
    (one,), (other,) = piece.texts, after.texts
    follows = other.row == one.row + 1 if one.nodes is ALL else other.nodes.start == one.nodes.stop
    is_whole = nodes == slice(0, len(one.visible)) == slice(0, len(other.visible))
    fits = all(owns) or nodes.stop * tiling.group <= tiling.queries[-1]
    if len(owns) > 1:
        (first,), (second,) = piece.parts[1].columns, after.parts[1].columns
        count = piece.parts[1].mask.shape[-1]
        is_view = one.keys is ALL and isinstance(first, int) and isinstance(second, int) and first == second
        fits = fits and after.parts[1].mask.shape[-1] == count and (is_view or count <= tiling.copies)
    return follows and is_whole and fits


def places_of_parts() -> int:
    """Return of how many places early keys end at a multiple: of fewer while this thread is in ``short_parts``."""
    return _places.get() or PLACES


def late_places(places: int) -> int:
    """Return how many late keys a node has at most."""
    return -(-(places + places // 2) // STEP) * STEP


@contextlib.contextmanager
def short_parts() -> Iterator[None]:
    """Let forwards of this thread have few late keys, so that short texts have early ones."""
    token = _places.set(SHORT)
    try:
        yield
    finally:
        _places.reset(token)


def columns_of_all(batch: int, nodes: int, keys: int, device: torch.device) -> Columns:
    """Return the columns of nodes that all see all ``keys``, where there is no mask."""
    return _columns_of_all(batch, nodes, keys, device, places_of_parts())


@functools.lru_cache(maxsize=8)
def _columns_of_all(batch: int, nodes: int, keys: int, device: torch.device, places: int) -> Columns:
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
    block = None if to_source else open_block()
    if block is None:
        column = torch.arange(kv_length, device=mask.device)[None].expand(batch_size, -1) + kv_offset
        padding = attention_mask
    else:
        column, padding = block.shown(kv_offset, kv_length)[1], block.padding
    place = _place(column, padding)
    splits: Sequence[int | None] = [None] * batch_size
    if block is not None and block.ancestors is not None:
        splits = _place(block.lengths[:, None], padding)[:, 0].tolist()
    mask = mask.contiguous()  # as transformers makes it for static caches, in a new tensor that knows no columns
    return with_columns(mask, [Text(row, mask[row, 0], place[row], split) for row, split in enumerate(splits)])


def with_columns(mask: Tensor, texts: Sequence[Text]) -> Tensor:
    """Return ``mask``, which attention takes for what its ``texts`` say."""
    setattr(mask, COLUMNS, Columns(texts))
    return mask


def mask_of_packed(texts: Sequence[Text]) -> Tensor:
    """Return what stands for a mask where ``texts`` lie one after the other in the only row of a batch."""
    nodes, keys = (sum(text.visible.shape[dim] for text in texts) for dim in (0, 1))
    shown = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=texts[0].visible.device)
    return with_columns(shown.expand(1, 1, nodes, keys), texts)


def _place(column: Tensor, mask: Tensor | None) -> Tensor:
    """Return each column (batch, columns) without the masked ones up to it; ``mask`` (batch, tokens) is 0 at those."""
    if mask is None:
        return column
    masked = (mask == 0).cumsum(1)
    return column - masked.gather(1, column.clamp(0, masked.shape[1] - 1))


def register_mask() -> None:
    """Let transformers know the mask function."""
    AttentionMaskInterface.register(NAME, mask_with_columns)
