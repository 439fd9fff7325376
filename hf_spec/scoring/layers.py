"""Replacements for transformers' cache layers: one class per kind, listed in ``LAYER_CLASSES``.

After the prefill a class takes over the contents of a layer (``adopt``), and replaces it while draft tokens are
scored. At the end it writes the accepted tokens back to it (``release``). transformers' layers of other kinds are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..versions import DummyLayer, indexer_positions
from . import buffers
from .buffers import SequenceLengths, SlotBuffer

NOT_FULL = -1  # no number of columns


class Layer:
    """The interface of the layers of a ``TreeKVCache``; this base class keeps nothing per token.

    ``keeps_all``: transformers' layer keeps all it is given, so that draft tokens can be read together with a prompt.
    """

    keeps_all: ClassVar[bool] = False
    keeps_slots: ClassVar[bool] = False
    can_join: ClassVar[bool] = False  # whether rows of another layer can be appended
    cut_dims: ClassVar[dict[str, int]] = {}  # the growing dimension of each tensor, where everything is kept
    window: int | None = None
    buffers: dict[str, SlotBuffer]

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Replace transformers' ``layer``, which has read the prompts of ``rows``."""
        raise NotImplementedError

    @classmethod
    def undo(cls, layer: Any) -> Callable[[], None]:
        """Return a function that restores transformers' ``layer`` to its state now, whatever it reads in between.

        States are copied, because they are written in place. Tensors in ``cut_dims`` are truncated instead, so that no
        second copy of them is kept.
        """
        length = layer.get_seq_length() if cls.cut_dims else 0
        cut = cls.cut_dims if length else {}
        kept = {name: _copied(value) for name, value in vars(layer).items() if name not in cut}

        def put_back() -> None:
            vars(layer).update(kept)
            for name, dim in cut.items():
                if (states := getattr(layer, name)) is not None:
                    setattr(layer, name, states.narrow(dim, 0, length))

        return put_back

    def forget(self, layer: Any) -> None:
        """Free what transformers' ``layer`` holds and this one has taken over; nobody reads it before ``release``."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""

    def join(self, other: Self) -> None:
        """Append the rows of ``other``, the same layer in another cache."""

    def of_row(self, row: int) -> dict[str, Tensor]:
        """Copy the committed slots of one row by name, (slots, ...) each."""
        return {}

    def release(self, layer: Any, rows: list[dict[str, Tensor]], lengths: list[int]) -> None:
        """Write ``rows``, as ``of_row`` returned them, to transformers' ``layer``; row b is ``lengths[b]`` long."""


class NoSlots(Layer, DummyLayer):
    """A layer that caches nothing, or reads the keys and values of another layer."""

    keeps_all = True
    can_join = True

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Replace a ``layer`` that keeps nothing."""
        return cls()

    def __init__(self) -> None:
        DummyLayer.__init__(self)
        self.buffers = {}


class StateLayer(Layer, LinearAttentionLayer):
    """A layer with a recurrent or convolution state alone. ``recurrent.py`` rolls states back."""

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Use the states of transformers' ``layer`` in place, in its own dicts."""
        return cls(layer)

    def __init__(self, layer: LinearAttentionLayer) -> None:
        LinearAttentionLayer.__init__(self, layer.number_of_states)
        self.buffers = {}
        _share_states(self, layer)


class SlotLayer(Layer, CacheLayerMixin):
    """A layer of full attention, with keys and values in slots."""

    keeps_all = True
    can_join = True
    keeps_slots = True
    is_sliding = False
    slot_dims: ClassVar[dict[str, int]] = {"keys": 2, "values": 2}  # the slot dimension of each tensor
    cut_dims: ClassVar[dict[str, int]] = slot_dims
    _full_to = NOT_FULL  # the number of columns in use, where both buffers have as many and keep all of them

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Take over the keys and values of transformers' ``layer``."""
        slots = cls(rows)
        slots._take_over(layer)
        return slots

    def __init__(self, rows: SequenceLengths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.buffers = {name: SlotBuffer(dim) for name, dim in self.slot_dims.items()}
        self._both = self.buffers["keys"], self.buffers["values"]

    def _take_over(self, layer: Any) -> None:
        if not layer.is_initialized or layer.keys is None:  # it reads the keys of another layer
            return
        self.is_initialized = True
        self.keys, self.values = layer.keys, layer.values
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        length = layer.get_seq_length()
        for name, buffer in self.buffers.items():
            if (states := getattr(layer, name)) is not None:
                buffer.adopt(states, length - states.shape[buffer.dim])

    def forget(self, layer: Any) -> None:
        """Free its keys and values: they would stay in memory beside the larger buffers that replace them."""
        for name, buffer in self.buffers.items():
            if buffer.data is not None:
                setattr(layer, name, None)

    @property
    def first(self) -> int:
        """Return the first column that some row's next query can see."""
        return 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: buffers are made by the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of new nodes, and return all columns that a query may need."""
        rows, (keys, values) = self.rows, self._both
        # In a graph `_full_to` never changes, so that no guard looks at a number that does.
        if self._full_to >= 0 and self._full_to == rows.appends_at:
            # What ``SlotBuffer.write`` does with small buffers, in fewer instructions: plain steps have to be cheap.
            self.keys = keys.data = torch.cat((keys.data, key_states), 2)  # type: ignore[arg-type]
            self.values = values.data = torch.cat((values.data, value_states), 2)  # type: ignore[arg-type]
            self._full_to = rows.appends_to
            return self.keys, self.values
        self.is_initialized, first = True, self.first
        self.keys = keys.write(key_states, rows, first)  # some models check whether a layer has any
        self.values = values.write(value_states, rows, first)
        if self.window is None and not torch.compiler.is_compiling():
            is_full = self.keys is keys.data and self.values is values.data  # neither is a view
            self._full_to = rows.longest + rows.draft_nodes + key_states.shape[2] if is_full else NOT_FULL
            rows.small_to = min(rows.small_to, keys.small_columns, values.small_columns)
        return self.keys, self.values

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        for buffer in self.buffers.values():
            buffer.keep_rows(rows)

    def join(self, other: Self) -> None:
        """Append the rows of ``other`` with their committed slots."""
        self._full_to = NOT_FULL
        for name, buffer in self.buffers.items():
            buffer.join(other.buffers[name], self.rows, other.rows)
        if other.is_initialized and not self.is_initialized:
            self.is_initialized = True
            self.keys, self.values = other.keys, other.values

    def of_row(self, row: int) -> dict[str, Tensor]:
        """Copy the committed slots of one row that its next query can see, by name, (slots, ...) each."""
        end = self.rows.cpu_lengths[row]
        filled = {name: buffer for name, buffer in self.buffers.items() if buffer.data is not None}
        return {name: buffer.columns(row, self.first, end).clone() for name, buffer in filled.items()}

    def release(self, layer: Any, rows: list[dict[str, Tensor]], lengths: list[int]) -> None:
        """Write ``rows``, as ``of_row`` returned them, to transformers' ``layer``; shorter rows end in zeros.

        The last slot of row b is column ``lengths[b]`` - 1. A layer with a window keeps what its next query sees. ::

            lengths 6 and 4, window 4:  the cache begins at column 6 - 3     │ 3 4 5 │
                                                                             │ 3 0 0 │
        """
        if not self.is_initialized:
            return
        longest = max(lengths)
        begin = 0 if self.window is None else max(0, longest - self.window + 1)
        for name in rows[0]:
            states = [row[name] for row in rows]
            whole = states[0].new_zeros((len(rows), longest - begin, *states[0].shape[1:]))
            for target, row, end in zip(whole, states, lengths, strict=True):
                if (count := min(len(row), end - begin)) > 0:
                    target[end - begin - count : end - begin] = row[len(row) - count :]
            setattr(layer, name, whole.transpose(1, self.buffers[name].dim))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that ``update`` returns, and the first of them."""
        return self.get_seq_length() + query_length - self.first, self.first

    def get_seq_length(self) -> int:
        """Return the number of columns that the longest row uses."""
        return self.rows.longest + self.rows.draft_nodes

    def get_max_length(self) -> int:
        """Return -1: slots grow."""
        return -1


class SlidingSlotLayer(SlotLayer):
    """A layer with a ``window``: how many columns a query sees at most, itself included."""

    keeps_all = False
    is_sliding = True
    cut_dims: ClassVar[dict[str, int]] = {}

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Take over the window, and the keys and values of the columns in it."""
        slots = cls(rows)
        slots.window = layer.sliding_window
        slots._take_over(layer)
        return slots

    @property
    def first(self) -> int:
        """Return the first column that some row's next query can see and that is still there."""
        assert self.window is not None
        return max(self.buffers["keys"].start, self.rows.shortest - self.window + 1)

    def release(self, layer: Any, rows: list[dict[str, Tensor]], lengths: list[int]) -> None:
        """Write what the next query sees to transformers' ``layer``, and the length of the longest row."""
        super().release(layer, rows, lengths)
        if self.is_initialized:
            layer.cumulative_length = max(lengths)


class IndexedSlotLayer(SlotLayer):
    """A layer of sparse attention: its indexer has its own keys (batch, slots, width) and positions."""

    keeps_all = False
    can_join = False
    slot_dims: ClassVar[dict[str, int]] = {"keys": 2, "values": 2, "indexer_keys": 1}
    cut_dims: ClassVar[dict[str, int]] = slot_dims
    _positions: Tensor | None = None  # (axes, batch, prompt)

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Take over the indexer's keys and positions too."""
        slots = super().adopt(layer, rows)
        if (positions := indexer_positions(layer)) is not None:
            slots._positions = positions.expand(-1, len(rows.cpu_lengths), -1)
        return slots

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys, (batch, nodes, width)."""
        return self.buffers["indexer_keys"].write(indexer_key_states, self.rows, self.first)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Return positions (axes, batch, columns) of the indexer's keys, for more columns than there are.

        The model appends its queries' positions to them, and finds a key's position by its column.
        """
        if self._positions is None:
            return None
        return _continued(self._positions, self.get_seq_length() + buffers.SLOTS_ADDED)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Ignore what the model stores: in a chain each position is one more than that of the column before."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        super().keep_rows(rows)
        if (positions := self._positions) is not None:
            self._positions = positions.index_select(1, rows.to(positions.device))

    def release(self, layer: Any, rows: list[dict[str, Tensor]], lengths: list[int]) -> None:
        """Write keys, values, and the indexer's keys and positions to transformers' ``layer``."""
        super().release(layer, rows, lengths)
        if (positions := indexer_positions(layer)) is not None:
            layer.indexer_position_ids = _continued(positions, max(lengths))


class HybridSlotLayer(SlotLayer, LinearAttentionLayer):
    """A layer of full attention that also keeps a recurrent state."""

    keeps_all = False
    can_join = False

    @classmethod
    def adopt(cls, layer: Any, rows: SequenceLengths) -> Self:
        """Take over the slots, and use the states of transformers' ``layer`` in place, in its own dicts."""
        slots = super().adopt(layer, rows)
        _share_states(slots, layer)
        return slots

    def __init__(self, rows: SequenceLengths) -> None:
        LinearAttentionLayer.__init__(self)
        SlotLayer.__init__(self, rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate a state; slots are allocated by the first write."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class HybridSlidingSlotLayer(HybridSlotLayer, SlidingSlotLayer):
    """A layer of sliding-window attention that also keeps a recurrent state."""


LAYER_CLASSES: dict[type, type[Layer]] = {
    DynamicLayer: SlotLayer,
    DynamicSlidingWindowLayer: SlidingSlotLayer,
    DynamicIndexedLayer: IndexedSlotLayer,
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: HybridSlotLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: HybridSlidingSlotLayer,
    DummyLayer: NoSlots,
}


def adopt(layer: Any, rows: SequenceLengths) -> Layer:
    """Replace transformers' ``layer`` by one of ours."""
    return LAYER_CLASSES[type(layer)].adopt(layer, rows)


def undo(layer: Any) -> Callable[[], None]:
    """Return a function that restores transformers' ``layer`` to its state now."""
    return LAYER_CLASSES[type(layer)].undo(layer)


def keeps_state(layer: object) -> bool:
    """Tell whether ``layer`` of a cache keeps a recurrent or convolution state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _copied(value: Any) -> Any:
    """Copy the states in a dict of a layer; return anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {key: state.clone() if isinstance(state, Tensor) else state for key, state in value.items()}


def _share_states(own: Any, layer: LinearAttentionLayer) -> None:
    """Let ``own`` read and write the states of ``layer`` in place."""
    if getattr(layer, "record_past", False):  # on after transformers' assisted decoding, and convolution states grow
        layer.crop(0)
        layer.record_past = False
    for name in vars(LinearAttentionLayer()):
        setattr(own, name, getattr(layer, name))


def _continued(positions: Tensor, columns: int) -> Tensor:
    """Extend ``positions`` (axes, batch, n) to ``columns`` columns, each one more than the one before."""
    more = torch.arange(1, 1 + columns - positions.shape[-1], device=positions.device)
    return torch.cat([positions, positions[..., -1:] + more], dim=-1)
