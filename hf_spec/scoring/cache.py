"""Keys and values in slots, a length per row, and an open forest of guesses behind them.

A row's committed tokens fill slots 0 .. length-1 of its buffer. Guesses are written right behind, into the *open
forest*; rejecting them costs nothing, because the length does not move, and accepting a path moves a few slots inside
the forest. Rows advance by different amounts::

    row 0   p p p t t t t │ 0 1 2 3 4          7 committed slots, a forest of 5 nodes
    row 1   - p p t t │ 0 1 2 3 4              5 committed slots (the first is left padding)

    commit node path (0, 2), (0,)  →   row 0: length 9, row 1: length 6, nothing open

A slot's index is its *column*: the position in the padded text. Layers with a sliding window keep, and show, only the
columns that some row can still see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
GROWTH = 256  # slots added at least when a buffer is full


class Rows:
    """Say how far each row has come: shared by all layers of a cache.

    ``lengths`` (batch,) counts the committed slots; ``host_lengths`` is the same on the CPU, so that no layer asks
    the accelerator; ``shortest`` and ``longest`` are their extremes; ``open`` counts the nodes of the open forest, the
    same in every row.
    """

    def __init__(self, lengths: Tensor, cpu_lengths: list[int]) -> None:
        self.open = 0
        self.set(lengths, cpu_lengths)

    def set(self, lengths: Tensor, cpu_lengths: list[int]) -> None:
        """Let the rows have these lengths."""
        self.lengths, self.cpu_lengths = lengths, cpu_lengths
        self.shortest, self.longest = min(cpu_lengths, default=0), max(cpu_lengths, default=0)
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def places(self, count: int) -> tuple[Tensor, Tensor]:
        """Return rows (batch, 1) and columns (batch, count) of the next nodes: worked out once for all layers."""
        if (self.open, count) not in self._places:
            columns = self.open + torch.arange(count, device=self.lengths.device)
            row = torch.arange(len(self.lengths), device=self.lengths.device)
            self._places = {(self.open, count): (row[:, None], self.lengths[:, None] + columns)}
        return self._places[self.open, count]


class SlotBuffer:
    """A tensor of ordinary layout that grows along dimension ``dim``, its slots, and can forget the oldest.

    ``start`` is the column of its first slot.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.data: Tensor | None = None
        self.start = 0

    @property
    def by_slot(self) -> Tensor:
        """Return ``data`` seen as (batch, slots, ...)."""
        assert self.data is not None
        return self.data.transpose(1, self.dim)

    def adopt(self, states: Tensor, start: int) -> None:
        """Take over ``states`` that begin at column ``start``."""
        self.data, self.start = states, start

    def write(self, states: Tensor, rows: Rows, first: int) -> Tensor:
        """Add ``states`` as new nodes and return the columns from ``first`` on."""
        count = states.shape[self.dim]
        end = rows.longest + rows.open + count
        data = self._make_room(states, first, end)
        if rows.shortest == rows.longest:
            data.narrow(self.dim, end - count - self.start, count).copy_(states)
        else:
            self.by_slot[self._index(*rows.places(count))] = states.transpose(1, self.dim)
        return data.narrow(self.dim, first - self.start, end - first)

    def _make_room(self, like: Tensor, first: int, end: int) -> Tensor:
        """Hold columns up to ``end``; when that needs a new buffer, leave those before ``first`` behind."""
        if self.data is not None and end - self.start <= self.data.shape[self.dim]:
            return self.data
        size = end - first + max(GROWTH, (end - first) // 2)
        grown = like.new_zeros((*like.shape[: self.dim], size, *like.shape[self.dim + 1 :]))
        if self.data is not None:
            gone = first - self.start
            kept = self.data.narrow(self.dim, gone, self.data.shape[self.dim] - gone)
            grown.narrow(self.dim, 0, kept.shape[self.dim]).copy_(kept)
        self.data, self.start = grown, first
        return grown

    def move(self, row: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots at columns ``source`` to columns ``target``, both (batch, count), of rows ``row`` (batch, 1)."""
        if self.data is not None:
            self.by_slot[self._index(row, target)] = self.by_slot[self._index(row, source)]

    def _index(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Turn rows and columns into indices of ``by_slot``."""
        assert self.data is not None
        row, column = row.to(self.data.device), column.to(self.data.device)
        return row, column - self.start if self.start else column

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        if self.data is not None:
            self.data = self.data.index_select(0, rows.to(self.data.device))


class SlotLayer(CacheLayerMixin):
    """One layer's slots; ``window`` is how many columns a query sees at most, itself included (``None``: all)."""

    def __init__(self, rows: Rows, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.window = window
        self.is_sliding = window is not None
        self.buffers = {"keys": SlotBuffer(2), "values": SlotBuffer(2), "indexer_keys": SlotBuffer(1)}
        self._indexer_positions: Tensor | None = None  # (axes, batch, prompt)

    @property
    def first(self) -> int:
        """Return the first column that some row's next query can see."""
        return 0 if self.window is None else max(0, self.rows.shortest - self.window + 1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: buffers are made by the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of new nodes and return all that a query may need."""
        self.is_initialized = True
        keys = self.buffers["keys"].write(key_states, self.rows, self.first)
        values = self.buffers["values"].write(value_states, self.rows, self.first)
        self.keys, self.values = keys, values  # some models ask a layer whether it holds any
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys of a sparse-attention indexer, (batch, nodes, width)."""
        return self.buffers["indexer_keys"].write(indexer_key_states, self.rows, self.first)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Return positions (axes, batch, columns) of an indexer's keys; some more than there are columns.

        The model puts those of its queries behind them, and looks those of a key up by its column.
        """
        if self._indexer_positions is None:
            return None
        return _continued(self._indexer_positions, self.get_seq_length() + GROWTH)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Ignore what the model puts there: in a chain each column stands one further on than the last."""

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        for buffer in self.buffers.values():
            buffer.keep_rows(rows)
        if (positions := self._indexer_positions) is not None:
            self._indexer_positions = positions.index_select(1, rows.to(positions.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that ``update`` returns, and the first of them."""
        return self.get_seq_length() + query_length - self.first, self.first

    def get_seq_length(self) -> int:
        """Return the columns in use by the longest row."""
        return self.rows.longest + self.rows.open

    def get_max_length(self) -> int:
        """Return -1: slots grow."""
        return -1


class HybridSlotLayer(SlotLayer, LinearAttentionLayer):
    """One layer's slots beside the recurrent state that it keeps too."""

    def __init__(self, rows: Rows, window: int | None, layer: LinearAttentionLayer) -> None:
        LinearAttentionLayer.__init__(self, layer.number_of_states)
        SlotLayer.__init__(self, rows, window)
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, getattr(layer, name))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for a state; slots make their own."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class OwnStates:
    """The recurrent states of a cache of a model's own kind, shown as those of a layer are.

    They are the tensors (batch, ...) in its lists and dicts, or in itself if it is a list.
    """

    def __init__(self, cache: Any) -> None:
        holders = (
            [cache] if isinstance(cache, list) else [held for name, held in vars(cache).items() if name != "layers"]
        )
        self._places = [place for holder in holders for place in _places(holder)]
        self.conv_states: dict[int, Tensor] = {}

    @property
    def recurrent_states(self) -> OwnStates:
        """Return this, which is to be read and written as a dict."""
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._places)))

    def __getitem__(self, number: int) -> Tensor:
        holder, key = self._places[number]
        state: Tensor = holder[key]
        return state

    def __setitem__(self, number: int, state: Tensor) -> None:
        holder, key = self._places[number]
        holder[key] = state


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Find the tensors in nested lists and dicts, as container and key; tuples become lists, which can be written."""
    if not isinstance(holder, list | dict):
        return
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, tuple):
            holder[key] = list(value)
        if isinstance(value, Tensor):
            yield holder, key
        else:
            yield from _places(holder[key])


class SlotCache(Cache):
    """Stand in for transformers' ``DynamicCache`` while guesses are scored, and hand it back afterwards."""

    def __init__(self, layers: list[Any], rows: Rows) -> None:
        super().__init__(layers=layers)
        self.rows = rows
        self._retired: dict[int, tuple[int, list[dict[str, Tensor]]]] = {}
        self._batch = list(range(len(rows.cpu_lengths)))
        windows = {layer.window for layer in layers if isinstance(layer, SlotLayer)}
        self.attends = bool(windows)  # whether any layer keeps slots, as opposed to a recurrent state alone
        # How many columns a query sees at most, itself included, if all layers agree on it.
        self.window: int | None = windows.pop() if len(windows) == 1 else None
        self.touch: Callable[[int, int], None] | None = None  # is told the layer and the number of a state in use
        self.own_states: OwnStates | None = None
        self._own_cache: Any = None

    @classmethod
    def adopt(cls, cache: Any, batch_size: int, device: torch.device, open: int = 0) -> SlotCache:
        """Take over what the prefill left in ``cache``, all of whose rows have the same length.

        It is a ``DynamicCache``, or of a kind of the model's own, which then goes on holding the states itself. Its
        last ``open`` columns are the open forest, a chain.
        """
        length = _length(cache) - open
        rows = Rows(torch.full((batch_size,), length, device=device), [length] * batch_size)
        rows.open = open
        slots = cls([_adopt_layer(layer, rows) for layer in getattr(cache, "layers", ())], rows)
        if type(cache) is not DynamicCache:
            slots.own_states, slots._own_cache = OwnStates(cache), cache
            if slots.layers:
                slots._own_cache = copy.copy(cache)
                slots._own_cache.layers = slots.layers
        return slots

    @property
    def shown(self) -> Any:
        """Return what the model is given as its cache: one of its own kind if it insists on that."""
        return self if self._own_cache is None else self._own_cache

    @property
    def is_linear(self) -> list[bool]:
        """Tell which layers keep a state alone: transformers looks for the first other one to size its masks."""
        return [not isinstance(layer, SlotLayer) for layer in self.layers]

    @property
    def layers_with_states(self) -> list[Any]:
        """Return the layers that keep a recurrent or convolution state."""
        own = [] if self.own_states is None else [self.own_states]
        return [layer for layer in self.layers if keeps_state(layer)] + own

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a convolution, as ``Cache`` does."""
        self._touch(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, as ``Cache`` does."""
        self._touch(layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Write the state of a convolution, as ``Cache`` does."""
        self._touch(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def _touch(self, layer: int, number: int) -> None:
        if self.touch is not None:
            self.touch(layer, number)

    def commit(self, path: Tensor, counts: Sequence[int], in_place: bool = False) -> None:
        """Make the first ``counts[b]`` nodes of ``path[b]`` part of row b, and drop the rest of the open forest.

        ``path`` is (batch, m), parents first; entries beyond the count may repeat any node. ``in_place`` says that
        each path is 0, 1, 2, ..., so that nothing moves.
        """
        taken = torch.as_tensor(counts, device=path.device)
        if path.shape[1] and not in_place:
            steps = torch.arange(path.shape[1], device=path.device)
            row = torch.arange(len(path), device=path.device)[:, None]
            source, target = self.rows.lengths[:, None] + path, self.rows.lengths[:, None] + steps
            for buffer in self._buffers():
                buffer.move(row, source, target)
        lengths = [length + count for length, count in zip(self.rows.cpu_lengths, counts, strict=True)]
        self.rows.set(self.rows.lengths + taken, lengths)
        self.rows.open = 0

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; ``keep_finished`` sets the others aside for ``release``."""
        kept = rows.tolist()
        if keep_finished:
            for row in set(range(len(self._batch))) - set(kept):
                self._retired[self._batch[row]] = (self.rows.cpu_lengths[row], self._row(row))
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.keep_rows(rows)
        self._batch = [self._batch[row] for row in kept]
        self.rows.set(self.rows.lengths.index_select(0, rows), [self.rows.cpu_lengths[row] for row in kept])

    def release(self, cache: DynamicCache, longest: int) -> None:
        """Write at most ``longest`` columns of every row into transformers' ``cache``; shorter rows end in zeros."""
        self.keep_rows(self.rows.lengths.new_empty(0), keep_finished=True)
        lengths = [min(length, longest) for _, (length, _) in sorted(self._retired.items())]
        for index, (slots, layer) in enumerate(zip(self.layers, getattr(cache, "layers", ()), strict=True)):
            if isinstance(slots, SlotLayer) and slots.is_initialized:
                states = [
                    {name: kept[: len(kept) - max(0, length - longest)] for name, kept in layers[index].items()}
                    for _, (length, layers) in sorted(self._retired.items())
                ]
                _release_layer(slots, layer, states, lengths)

    def _row(self, row: int) -> list[dict[str, Tensor]]:
        """Copy the committed slots of one row, layer by layer."""
        length = self.rows.cpu_lengths[row]
        return [
            {
                name: buffer.by_slot[row, max(0, layer.first - buffer.start) : length - buffer.start].clone()
                for name, buffer in layer.buffers.items()
                if buffer.data is not None
            }
            if isinstance(layer, SlotLayer)
            else {}
            for layer in self.layers
        ]

    def _buffers(self) -> list[SlotBuffer]:
        return [buffer for layer in self.layers if isinstance(layer, SlotLayer) for buffer in layer.buffers.values()]


def _length(cache: DynamicCache) -> int:
    """Read the length from the layers that have seen tokens (those that share another's keys have not)."""
    layers = getattr(cache, "layers", ())
    lengths = {layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)} - {0}
    if len(lengths) > 1:
        raise ValueError(
            f"the layers of the cache hold {sorted(lengths)} tokens: some attend to images, say, not to the text, "
            "and cannot be scored over slots. Generate without `speculator`."
        )
    return lengths.pop() if lengths else 0


def keeps_state(layer: object) -> bool:
    """Tell whether ``layer`` of a cache keeps a recurrent or convolution state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_states(cache: object) -> bool:
    """Tell whether some layer of ``cache`` keeps a recurrent or convolution state."""
    return any(map(keeps_state, getattr(cache, "layers", [])))


def keeps_everything(cache: DynamicCache) -> bool:
    """Tell whether every layer of ``cache`` keeps all it is given, and nothing else."""
    return all(type(layer) in (DynamicLayer, DummyLayer) for layer in cache.layers)


def unsupported_layer(cache: object) -> str | None:
    """Say why slots cannot stand in for ``cache``, or return ``None`` if they can."""
    if type(cache) is not DynamicCache or cache.offloading:
        return f"a {type(cache).__name__}" + (" with offloading" if getattr(cache, "offloading", False) else "")
    known = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer, *RECURRENT)
    return next((f"a {type(layer).__name__}" for layer in cache.layers if type(layer) not in known), None)


def _adopt_layer(layer: Any, rows: Rows) -> Any:
    if isinstance(layer, DummyLayer) or type(layer) is LinearAttentionLayer:
        return layer
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    is_hybrid = isinstance(layer, LinearAttentionLayer)
    slots: Any = HybridSlotLayer(rows, window, layer) if is_hybrid else SlotLayer(rows, window)
    if layer.is_initialized and layer.keys is not None:
        slots.is_initialized = True
        slots.keys, slots.values = layer.keys, layer.values
        slots.dtype, slots.device = layer.keys.dtype, layer.keys.device
        for name, buffer in slots.buffers.items():
            if (states := getattr(layer, name, None)) is not None:
                buffer.adopt(states, layer.get_seq_length() - states.shape[buffer.dim])
        if (positions := getattr(layer, "indexer_position_ids", None)) is not None:
            slots._indexer_positions = positions.expand(-1, len(rows.cpu_lengths), -1)
    return slots


def _continued(positions: Tensor, columns: int) -> Tensor:
    """Let ``positions`` (axes, batch, n) go on one by one to as many ``columns``."""
    behind = torch.arange(1, 1 + columns - positions.shape[-1], device=positions.device)
    return torch.cat([positions, positions[..., -1:] + behind], dim=-1)


def _release_layer(slots: SlotLayer, layer: Any, states: list[dict[str, Tensor]], lengths: list[int]) -> None:
    longest = max(lengths)
    kept = longest if slots.window is None else min(longest, slots.window - 1)
    for name in states[0]:
        rows = [row[name] for row in states]
        whole = rows[0].new_zeros((len(rows), kept, *rows[0].shape[1:]))
        for target, row, length in zip(whole, rows, lengths, strict=True):
            # The row's states end at column `length`, the cache begins at column `longest - kept`.
            end = length - (longest - kept)
            part = row[max(0, len(row) - end) :] if end > 0 else row[:0]
            target[end - len(part) : end] = part
        setattr(layer, name, whole.transpose(1, slots.buffers[name].dim))
    if (positions := getattr(layer, "indexer_position_ids", None)) is not None:
        layer.indexer_position_ids = _continued(positions, longest)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest
