"""A slot cache of fixed shape, for compiled forwards: what ``StaticCache`` is to ``DynamicCache``.

Its buffers are rings (``rings.py``). A layer always returns complete rings. The mask hides slots that are empty, out
of the window, or off a node's path. The slots for new nodes are computed outside the forward, so that a graph holds no
number that changes.

The batch is padded to 1, 2, 4, 8, ... rows. A row that finishes leaves its batch index unused; when half of the
indices are unused, the batch shrinks. An unused one keeps the prompt of some row, and its scores are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..device_tensors import cached_arange, to_device, to_list
from ..versions import DummyLayer
from .buffers import SequenceLengths
from .kept import KeptBuffers
from .kv_view import KVView
from .masks import TreeMask
from .rings import Ring, RingMask, fewest_slots, ring_size

DIMS = {"keys": 2, "values": 2, "indexer_keys": 1}  # the slot dimension of each buffer of a layer


class StaticSlotLayer(CacheLayerMixin):
    """The rings of one layer; a query sees at most ``window`` columns, itself included (``None``: all)."""

    is_compileable = True

    def __init__(self, rows: SequenceLengths, ring: Ring, window: int | None, number: int, kept: KeptBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.ring, self.window = rows, ring, window
        self._number, self._kept = number, kept
        self.is_sliding = window is not None
        self.indexer_keys: Tensor | None = None

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are in use, each viewed as (batch, slots, ...)."""
        held = {name: getattr(self, name) for name in DIMS}
        return {name: buffer.transpose(1, DIMS[name]) for name, buffer in held.items() if buffer is not None}

    def put(self, name: str, by_slot: Tensor) -> None:
        """Use ``by_slot`` (batch, slots, ...) as the buffer ``name`` from now on."""
        setattr(self, name, self._kept.put((self._number, name), by_slot.transpose(1, DIMS[name])))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate empty rings, where the prefill has left no keys and values."""
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, width = states.shape
            self.put(name, states.new_zeros((batch, self.ring.size, heads, width)))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of new nodes and return the complete rings."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write("keys", key_states), self._write("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys of a sparse-attention indexer, (batch, nodes, width), and return the complete ring."""
        return self._write("indexer_keys", indexer_key_states)

    def _write(self, name: str, states: Tensor) -> Tensor:
        buffer: Tensor = getattr(self, name)
        dim, device = DIMS[name], buffer.device
        place = self.ring.row.to(device), self.ring.slot.to(device)
        buffer.transpose(1, dim).index_put_(place, states.transpose(1, dim).to(buffer.dtype))
        return buffer

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots ``update`` returns, and 0 as the first of them."""
        return self.ring.size, 0

    def get_seq_length(self) -> Any:
        """Return the number of columns that the longest row uses; a tensor in graphs, where a number is constant."""
        if torch.compiler.is_compiling():
            return self.rows.lengths.max()
        return self.rows.longest + self.rows.draft_nodes

    def get_max_length(self) -> int:
        """Return -1: rings grow."""
        return -1


@dataclass
class _Leaver:
    """A finished row: its ``length`` in columns, and for each layer the last columns of each buffer, by name."""

    length: int
    states: list[dict[str, Tensor]]


class StaticTreeKVCache(Cache):
    """The cache that replaces transformers' ``StaticCache`` while draft tokens are scored; ``release`` fills that."""

    attends, own_states, on_access = True, None, None

    def __init__(self, layers: list[Any], rows: SequenceLengths, shortest: int) -> None:
        super().__init__(layers=layers)
        self.rows = rows
        self._shortest = shortest  # least size of a ring for full attention
        self.slot_layers: list[StaticSlotLayer] = [layer for layer in layers if isinstance(layer, StaticSlotLayer)]
        self.rings = {layer.ring.size: layer.ring for layer in self.slot_layers}
        windows = {layer.window for layer in self.slot_layers}
        self.window: int | None = windows.pop() if len(windows) == 1 else None
        self._left: dict[int, _Leaver] = {}
        self._room = 0, 0  # what the rings suffice for: the size of one for full attention, and nodes of a block

    @classmethod
    def adopt(
        cls,
        cache: StaticCache,
        batch_size: int,
        device: torch.device,
        widest: int,
        most_new: int | None,
        kept: KeptBuffers,
    ) -> StaticTreeKVCache:
        """Take over the contents of ``cache`` after the prefill, when all rows have the same length.

        ``widest`` is the largest number of nodes of a block, as far as is known. ``most_new`` is the largest number of
        tokens that a row may still get.
        """
        length = max(int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, StaticLayer))
        rows = SequenceLengths(torch.full((batch_size,), length, device=device), [length] * batch_size)
        shortest = fewest_slots(None if most_new is None else length + most_new + widest)
        rings: dict[int, Ring] = {}
        layers = [
            _adopt_layer(layer, rows, rings, widest, shortest, number, kept)
            for number, layer in enumerate(cache.layers)
        ]
        if not getattr(cache, "_is_user_defined", False):
            _forget(cache)
        return cls(layers, rows, shortest)

    @property
    def shown(self) -> StaticTreeKVCache:
        """Return the cache that the model is given."""
        return self

    @property
    def longest_ring(self) -> int:
        """Return the number of slots of the longest ring."""
        return max(self.rings)

    def make_room(self, count: int) -> None:
        """Grow the rings until each holds all committed columns, or the window, and a block of ``count`` nodes."""
        end, ends = self.rows.longest + count, self.rows.lengths
        whole = ring_size(None, end, count, self._shortest)
        if whole == self._room[0] and count <= self._room[1]:
            return
        self._room = whole, count
        known, rings = self.rings, dict[int, Ring]()
        for layer in self.slot_layers:
            old = layer.ring
            size = max(old.size, ring_size(layer.window, end, count, self._shortest))
            layer.ring = rings.setdefault(size, known.get(size) or Ring(size))
            if layer.ring is not old:
                column = layer.ring.columns(ends)  # (batch, new slots), of the committed columns
                row = torch.arange(len(ends), device=ends.device)[:, None]
                for name, by_slot in layer.buffers().items():
                    place = row.to(by_slot.device), (column % old.size).to(by_slot.device)
                    layer.put(name, by_slot[place])
        self.rings = rings

    def reserve(self, count: int) -> None:
        """Set the slots of the ``count`` nodes that the next forward writes."""
        columns = self.rows.lengths[:, None] + cached_arange(count, self.rows.device, self.rows.draft_nodes)
        for ring in self.rings.values():
            ring.reserve(columns)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit the first ``counts[b]`` nodes of ``path[b]`` to the row at batch index b, and drop the rest.

        ``path`` is (batch, m), parents first; ``in_place`` says that each path is 0, 1, 2, ..., so that nothing moves.
        """
        self.rows.draft_nodes = 0  # first: after an error in the middle of the moves, it must not be used again
        lengths = self.rows.lengths
        if path.shape[1] > 1 and not in_place:
            target = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
            source = lengths[:, None] + path
            row = torch.arange(len(path), device=path.device)[:, None]
            for layer in self.slot_layers:
                size = layer.ring.size
                for by_slot in layer.buffers().values():
                    device = by_slot.device
                    moved = by_slot[row.to(device), (source % size).to(device)]
                    by_slot[row.to(device), (target % size).to(device)] = moved
        cpu_lengths = [length + count for length, count in zip(self.rows.cpu_lengths, counts, strict=True)]
        taken = to_device(list(counts), lengths.device) if on_device is None else on_device
        self.rows.set(lengths + taken, cpu_lengths)

    def rollback(self) -> None:
        """Drop the block and zero its slots: a nan there would reach even queries that mask it, as 0 * nan."""
        if self.rows.draft_nodes == 0:
            return
        lengths = self.rows.lengths[:, None]
        for layer in self.slot_layers:
            is_open = layer.ring.columns(self.rows.lengths + self.rows.draft_nodes) >= lengths  # (batch, slots)
            for by_slot in layer.buffers().values():
                clear = is_open.view(*is_open.shape, *[1] * (by_slot.ndim - 2)).to(by_slot.device)
                by_slot.masked_fill_(clear, 0)
        self.rows.draft_nodes = 0

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep the batch indices ``rows`` only, in that order; one may be repeated."""
        for layer in self.slot_layers:
            for name, by_slot in layer.buffers().items():
                layer.put(name, by_slot.index_select(0, rows.to(by_slot.device)))
        cpu_lengths = [self.rows.cpu_lengths[index] for index in to_list(rows)]
        self.rows.set(self.rows.lengths.index_select(0, rows), cpu_lengths)

    def empty(self, indices: Sequence[int], length: int) -> None:
        """Set the length at these batch ``indices`` to ``length`` columns."""
        lengths = [length if index in indices else old for index, old in enumerate(self.rows.cpu_lengths)]
        self.rows.set(to_device(lengths, self.rows.lengths.device), lengths)

    def save(self, index: int, row: int) -> None:
        """Save the committed columns at batch ``index`` for ``release``, as row ``row`` of the call's batch."""
        length = self.rows.cpu_lengths[index]
        states = []
        for layer in self.layers:
            held = {}
            if isinstance(layer, StaticSlotLayer):
                first = 0 if layer.window is None else max(0, length - layer.window)
                slots = torch.arange(first, length) % layer.ring.size
                held = {name: by_slot[index, slots.to(by_slot.device)] for name, by_slot in layer.buffers().items()}
            states.append(held)
        self._left[row] = _Leaver(length, states)

    def release(self, cache: StaticCache, longest: int) -> None:
        """Write at most ``longest`` columns of every saved row to ``cache``; shorter rows end in zeros."""
        rows = [leaver for _, leaver in sorted(self._left.items())]
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, StaticLayer) and rows and rows[0].states[index]:
                _release_layer(layer, index, rows, min(longest, max(row.length for row in rows)))


def unsupported_static_layer(cache: StaticCache) -> str | None:
    """Say why rings cannot replace ``cache``, or return ``None`` if they can."""
    if cache.offloading:
        return "a StaticCache with offloading"
    known = (StaticLayer, StaticSlidingWindowLayer, StaticIndexedLayer, DummyLayer)
    return next((f"a {type(layer).__name__}" for layer in cache.layers if type(layer) not in known), None)


def _adopt_layer(
    layer: Any,
    rows: SequenceLengths,
    rings: dict[int, Ring],
    widest: int,
    shortest: int,
    number: int,
    kept: KeptBuffers,
) -> Any:
    if not isinstance(layer, StaticLayer):
        return layer
    window = layer.max_cache_len if layer.is_sliding else None
    length = rows.longest
    size = ring_size(window, length + widest, widest, shortest)
    slots = StaticSlotLayer(rows, rings.setdefault(size, Ring(size)), window, number, kept)
    held = length if window is None else min(length, window)
    for name, dim in DIMS.items():
        if (states := getattr(layer, name, None)) is not None:
            by_column = states.transpose(1, dim)  # (batch, slots, ...)
            ring = by_column.new_zeros((len(by_column), size, *by_column.shape[2:]))
            ring[:, cached_arange(held, ring.device, length - held) % size] = by_column[:, :held]
            slots.put(name, ring)
    return slots


def undo_static_reading(cache: StaticCache) -> Callable[[], None]:
    """Return a function that restores ``cache`` to its state now, whatever is read in between."""
    undone = [_undo_layer(layer) for layer in cache.layers if isinstance(layer, StaticLayer)]

    def put_back() -> None:
        for undo in undone:
            undo()

    return put_back


def _undo_layer(layer: StaticLayer) -> Callable[[], None]:
    held = vars(layer)
    counters = {name: value for name, value in held.items() if name.endswith("cumulative_length_int")}
    tensors = {
        name: value.clone()
        for name, value in held.items()
        if name.endswith("cumulative_length") and value is not None  # an indexer has none before it has read anything
    }
    if layer.is_sliding and layer.is_initialized:  # such a layer shifts its columns
        tensors |= {name: getattr(layer, name).clone() for name in ("keys", "values")}

    def undo() -> None:
        held.update(counters)
        if isinstance(layer, StaticIndexedLayer) and "indexer_cumulative_length" not in tensors:
            layer.is_indexer_initialized = False
        for name, value in tensors.items():
            getattr(layer, name).copy_(value)

    return undo


def _forget(cache: StaticCache) -> None:
    """Free the memory of ``cache``, which nobody reads before ``release``."""
    for layer in cache.layers:
        for name in DIMS:
            if isinstance(layer, StaticLayer) and hasattr(layer, name):
                setattr(layer, name, None)


def _release_layer(layer: StaticLayer, index: int, rows: Sequence[_Leaver], longest: int) -> None:
    first = max(0, longest - layer.max_cache_len)  # column of the layer's first slot
    for name, example in rows[0].states[index].items():
        if getattr(layer, name) is None:  # see ``_forget``
            shape = (len(rows), layer.max_cache_len, *example.shape[1:])
            setattr(layer, name, example.new_zeros(shape).transpose(1, DIMS[name]).contiguous())
        by_slot = getattr(layer, name).transpose(1, DIMS[name])  # (batch, slots, ...)
        by_slot.zero_()
        for target, row in zip(by_slot, rows, strict=True):
            states = row.states[index][name]
            start, end = max(first, row.length - len(states)), min(longest, row.length)
            if start < end:
                target[start - first : end - first] = states[start - row.length + len(states) :][: end - start]
    if isinstance(layer, StaticSlidingWindowLayer):
        if layer.cumulative_length_int <= layer.max_cache_len:  # plain `generate` also stops counting when it is full
            layer.cumulative_length.fill_(min(longest, layer.max_cache_len))
        layer.cumulative_length_int = longest
    else:
        layer.cumulative_length.fill_(longest)
    if isinstance(layer, StaticIndexedLayer) and layer.indexer_cumulative_length is not None:
        layer.indexer_cumulative_length.fill_(longest)


class StaticKVView(KVView):
    """The rings of one model, the block of new nodes after them, and the masks over both.

    ``indices`` are the batch indices of the unfinished rows. Where some are unused, ``row_at_index`` (batch,) and
    ``index_of_row`` (rows,) map between both. An unused one counts as row 0, and its scores are ignored.
    """

    cache: StaticTreeKVCache

    def __init__(
        self, cache: StaticTreeKVCache, transformers_cache: StaticCache, padding: Tensor | None, most_new: int | None
    ) -> None:
        super().__init__(cache, transformers_cache, padding, most_new)
        self.indices: list[int] = []
        self.row_at_index: Tensor | None = None
        self.index_of_row = torch.empty(0, dtype=torch.long, device=self.device)

    def place(self, indices: list[int]) -> None:
        """Assign the unfinished rows to batch ``indices``, and empty the others."""
        count = len(self.cache.rows.cpu_lengths)
        self.indices, self.row_at_index = indices, None
        if free := sorted(set(range(count)) - set(indices)):
            self.cache.empty(free, self.prompt)
            row = {index: i for i, index in enumerate(indices)}
            self.row_at_index = to_device([row.get(index, 0) for index in range(count)], self.device)
            self.index_of_row = to_device(indices, self.device)

    @property
    def lengths(self) -> list[int]:
        """Return the committed slots of each unfinished row."""
        return [self.cache.rows.cpu_lengths[index] for index in self.indices]

    @property
    def committed(self) -> int | None:
        """Return how many tokens after the prompt all rows have committed; ``None`` if no row is left."""
        return min(self.lengths) - self.prompt if self.indices else None

    def _tree_mask(
        self, count: int, depths: tuple[Tensor, ...] | None, ancestors: Tensor | None, depth: int | None
    ) -> TreeMask:
        rows, cache = self.cache.rows, self.cache
        cache.reserve(count)
        width = rows.longest + rows.draft_nodes + count
        shape = (rows.lengths, rows.draft_nodes, count, width, self.padding, depths, ancestors)
        return RingMask(*shape, cache.window, depth, end=self._end)

    def positions(self, origin: Tensor, block: TreeMask) -> Tensor:
        """Return the positions of the new nodes, (..., batch, nodes), with the same memory layout every time."""
        return origin + block.query

    def mask(self, block: TreeMask) -> Tensor:
        """Return the 2D mask (batch, slots of the longest ring) for models that read it: 0 at left padding."""
        longest, mask = self.cache.longest_ring, self._padding_mask
        if mask is None or mask.shape != (len(block.lengths), longest):
            padding = self.padding
            if padding is None:
                padding = torch.ones((len(block.lengths), 1), dtype=torch.bool, device=self.device)
            mask = torch.nn.functional.pad(padding.long(), (0, longest - padding.shape[1]), value=1)
            self._padding_mask = mask
        return mask

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit ``counts[b]`` nodes of ``path[b]`` (rows, m), and drop the rest of the block."""
        if self.row_at_index is not None:
            path = path.to(self.device).index_select(0, self.row_at_index)
            taken = dict(zip(self.indices, counts, strict=True))
            counts, on_device = [taken.get(index, 0) for index in range(len(path))], None
        super().commit(path, counts, in_place, on_device)
