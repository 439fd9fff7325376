"""A KV cache for trees: slots for keys and values, a length per batch row, and a draft region of draft tokens.

A row's committed tokens fill slots 0 .. length-1 of its buffer. Draft tokens are written right after them, into the
*draft region*. Rejecting them costs nothing, because the length does not change. Accepting a path moves a few slots
inside the draft region. Rows advance by different amounts::

    row 0   p p p t t t t │ 0 1 2 3 4          7 committed slots, a draft region of 5 nodes
    row 1   - p p t t │ 0 1 2 3 4              5 committed slots (the first is left padding)

    commit node path (0, 2), (0,)  →   row 0: length 9, row 1: length 6, nothing open

A slot's index is its *column*: the position in the padded sequence. Layers with a sliding window keep, and return,
only the columns that some row can still see.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache, StaticCache

from ..device_tensors import cached_arange, to_list
from ..versions import DummyLayer
from .buffers import SequenceLengths, SlotBuffer
from .layers import LAYER_CLASSES, adopt, keeps_state, undo
from .static import undo_static_reading

LONG = 64  # columns, from which on the memory of a second copy matters more than the instructions to free it


class OwnStates:
    """The recurrent states of a model's own kind of cache, with the attributes of one of transformers' layers.

    They are the tensors (batch, ...) in the cache's lists and dicts, or in the cache itself if it is a list.
    """

    def __init__(self, cache: Any) -> None:
        holders = (
            [cache] if isinstance(cache, list) else [held for name, held in vars(cache).items() if name != "layers"]
        )
        self._places = [place for holder in holders for place in _places(holder)]
        self.conv_states: dict[int, Tensor] = {}

    @property
    def recurrent_states(self) -> OwnStates:
        """Return this object, which is read and written like a dict."""
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


class TreeKVCache(Cache):
    """The cache that replaces transformers' ``DynamicCache`` while draft tokens are scored; ``release`` fills that."""

    def __init__(self, layers: list[Any], rows: SequenceLengths) -> None:
        super().__init__(layers=layers)
        self.layers: list[Any]  # each a ``Layer``
        self.rows = rows
        self._retired: dict[int, tuple[int, list[dict[str, Tensor]]]] = {}
        self.batch = list(range(len(rows.cpu_lengths)))  # the indices of these rows in the batch of the prefill
        windows = {layer.window for layer in layers if layer.keeps_slots}
        self.attends = bool(windows)  # whether any layer keeps slots, as opposed to a recurrent state alone
        # How many columns a query sees at most, itself included, if all layers agree on it.
        self.window: int | None = windows.pop() if len(windows) == 1 else None
        self.on_access: Callable[[int, int], None] | None = None  # called with layer and number of each state in use
        self.own_states: OwnStates | None = None
        self._own_cache: Any = None
        self._source_keys: Cache | None = None  # of an encoder's states

    @classmethod
    def adopt(cls, cache: Any, batch_size: int, device: torch.device, open_nodes: int = 0) -> TreeKVCache:
        """Take over the contents of ``cache`` after the prefill, when all rows have the same length.

        It is a ``DynamicCache``, or of the model's own kind, which then goes on holding the states itself. Its last
        ``open_nodes`` columns are the draft region, a chain. ``cache`` keeps the keys of an encoder's states, for all
        rows. Once some rows have left, the model is shown copies of the others.
        """
        text = text_cache(cache)
        slots = cls._over(text, batch_size, device, open_nodes)
        if text is not cache:
            slots._source_keys = cache.cross_attention_cache
        if slots.rows.longest >= LONG and not getattr(cache, "_is_user_defined", False):
            for kept, layer in zip(slots.layers, getattr(text, "layers", ()), strict=True):
                kept.forget(layer)
        return slots

    @classmethod
    def _over(cls, cache: Any, batch_size: int, device: torch.device, open_nodes: int) -> TreeKVCache:
        """Do as ``adopt`` for the part of a cache that holds the keys of the text."""
        length = _length(cache) - open_nodes
        rows = SequenceLengths(torch.full((batch_size,), length, device=device), [length] * batch_size)
        rows.draft_nodes = open_nodes
        slots = cls([adopt(layer, rows) for layer in getattr(cache, "layers", ())], rows)
        if type(cache) is not DynamicCache:
            slots.own_states, slots._own_cache = OwnStates(cache), cache
            if slots.layers:
                slots._own_cache = copy.copy(cache)
                slots._own_cache.layers = slots.layers
        return slots

    @property
    def shown(self) -> Any:
        """Return the cache that the model is given: one of its own kind if it needs that."""
        if self._source_keys is not None:  # made each time: if it were kept, it and this cache would hold each other
            return EncoderDecoderCache(self, self._source_keys)
        return self if self._own_cache is None else self._own_cache

    @property
    def crosses(self) -> bool:
        """Tell whether some layers attend to the states of an encoder."""
        return self._source_keys is not None

    @functools.cached_property
    def is_linear(self) -> list[bool]:
        """Tell which layers keep only a state: transformers sizes its masks by the first other one."""
        return [not layer.keeps_slots for layer in self.layers]

    @functools.cached_property
    def is_sliding(self) -> list[bool]:
        """Tell which layers have a window, as ``Cache`` does in every forward."""
        return [getattr(layer, "is_sliding", False) for layer in self.layers]

    @functools.cached_property
    def is_dummy(self) -> list[bool]:
        """Tell which layers cache nothing, as ``Cache`` does in every forward."""
        return [isinstance(layer, DummyLayer) for layer in self.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of new nodes to a layer, as ``Cache`` does: nothing here is replicated or offloaded."""
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return found

    @property
    def layers_with_states(self) -> list[Any]:
        """Return the layers that keep a recurrent or convolution state."""
        own = [] if self.own_states is None else [self.own_states]
        return [layer for layer in self.layers if keeps_state(layer)] + own

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a convolution, as ``Cache`` does."""
        self._note_access(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, as ``Cache`` does."""
        self._note_access(layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Write the state of a convolution, as ``Cache`` does."""
        self._note_access(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def _note_access(self, layer: int, number: int) -> None:
        if self.on_access is not None:
            self.on_access(layer, number)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit the first ``counts[b]`` nodes of ``path[b]`` to row b, and drop the rest of the draft region.

        ``path`` is (batch, m), parents first; entries beyond the count may repeat any node. ``in_place`` says that
        each path is 0, 1, 2, ..., so that nothing moves. ``on_device`` (batch,) are the same counts, if known there.
        """
        self.rows.draft_nodes = 0  # first: after an error in the middle of the moves, it must not be used again
        if path.shape[1] and not in_place:
            row, target = self.rows.places(path.shape[1])
            source = self.rows.lengths[:, None] + path
            for buffer in self._buffers():
                buffer.move(row, source, target)
        self.rows.advance(counts, on_device)

    def rollback(self) -> None:
        """Drop the draft region and zero its slots."""
        self.rows.draft_nodes = 0
        for buffer in self._buffers():
            buffer.clear(self.rows)

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for ``release``."""
        kept = to_list(rows)
        if keep_finished:
            for row in set(range(len(self.batch))) - set(kept):
                states = [layer.of_row(row) for layer in self.layers]
                self._retired[self.batch[row]] = self.rows.cpu_lengths[row], states
        for layer in self.layers:
            layer.keep_rows(rows)
        if self._source_keys is not None:
            self._source_keys = _rows_of(self._source_keys, rows)
        self.batch = [self.batch[row] for row in kept]
        self.rows.set(self.rows.lengths.index_select(0, rows), [self.rows.cpu_lengths[row] for row in kept])
        self.rows.small_to = sys.maxsize  # not known for fewer rows

    @property
    def can_join(self) -> bool:
        """Tell whether rows of another cache can be appended: only where slots hold everything."""
        return self._own_cache is None and not self.crosses and all(layer.can_join for layer in self.layers)

    def join(self, other: TreeKVCache) -> None:
        """Append the rows of ``other``, a cache of the same model; the draft regions are dropped."""
        for layer, others in zip(self.layers, other.layers, strict=True):
            layer.join(others)
        lengths = torch.cat([self.rows.lengths, other.rows.lengths])
        self.rows.draft_nodes = 0
        self.rows.set(lengths, [*self.rows.cpu_lengths, *other.rows.cpu_lengths])
        self.batch = list(range(len(lengths)))

    def release(self, cache: DynamicCache, longest: int) -> None:
        """Write at most ``longest`` columns of every row into transformers' ``cache``; shorter rows end in zeros."""
        self._source_keys, cache = None, text_cache(cache)
        self.keep_rows(self.rows.lengths.new_empty(0), keep_finished=True)
        lengths = [min(length, longest) for _, (length, _) in sorted(self._retired.items())]
        for index, (slots, layer) in enumerate(zip(self.layers, getattr(cache, "layers", ()), strict=True)):
            rows = [
                {name: states[: len(states) - max(0, length - longest)] for name, states in layers[index].items()}
                for _, (length, layers) in sorted(self._retired.items())
            ]
            slots.release(layer, rows, lengths)

    def align(self) -> Tensor:
        """Shift all rows to the right until they end in the same column, and return the shifts (batch,)."""
        rows = self.rows
        shift = rows.longest - rows.lengths
        row = cached_arange(len(shift), rows.device)[:, None]
        for buffer in self._buffers():
            target = cached_arange(rows.longest - buffer.start, rows.device, buffer.start).expand(len(shift), -1)
            buffer.move(row, (target - shift[:, None]).clamp(min=buffer.start), target)
        rows.set(None, [rows.longest] * len(shift))
        return shift

    def _buffers(self) -> list[SlotBuffer]:
        return [buffer for layer in self.layers for buffer in layer.buffers.values()]


def text_cache(cache: Any) -> Any:
    """Return the part of ``cache`` that holds the keys of the text: all of it, unless there is an encoder's, too."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _rows_of(cache: Cache, rows: Tensor) -> DynamicCache:
    """Copy the ``rows`` of a cache that no key is added to any more."""
    kept = DynamicCache()
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if layer.is_initialized:
            here = rows.to(layer.keys.device)
            kept.update(layer.keys.index_select(0, here), layer.values.index_select(0, here), index)
    return kept


def _length(cache: DynamicCache) -> int:
    """Return the length of the layers that have seen tokens; those that share another layer's keys have not."""
    layers = getattr(cache, "layers", ())
    lengths = {layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)} - {0}
    if len(lengths) > 1:
        raise ValueError(
            f"the layers of the cache hold {sorted(lengths)} tokens: some attend to images, say, not to the text, "
            "and cannot be scored over slots. Generate without `speculator`."
        )
    return lengths.pop() if lengths else 0


def has_states(cache: object) -> bool:
    """Tell whether some layer of ``cache`` keeps a recurrent or convolution state."""
    return any(map(keeps_state, getattr(text_cache(cache), "layers", [])))


def holds_tokens(cache: object) -> bool:
    """Tell whether some layer of transformers' ``cache`` has read tokens."""
    layers: Sequence[Any] = getattr(text_cache(cache), "layers", ())
    return any(
        (isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0)
        or (keeps_state(layer) and any(layer.has_previous_state.values()))
        for layer in layers  # some hold nothing of their own: they share the keys of others, or are experts
    )


def undo_reading(cache: object) -> Callable[[], None]:
    """Return a function that restores transformers' ``cache`` to its state now, whatever is read in between.

    A cache of a model's own kind is not restored, nor a static one that the user has not passed in.
    """
    if isinstance(cache, EncoderDecoderCache):
        return _undo_crossing(cache)
    if isinstance(cache, StaticCache) and getattr(cache, "_is_user_defined", False):
        return undo_static_reading(cache)
    if type(cache) is not DynamicCache:
        return lambda: None
    count, undo_layers = len(cache.layers), [undo(layer) for layer in cache.layers]

    def put_back() -> None:
        for undo_layer in undo_layers:
            undo_layer()
        del cache.layers[count:]  # added by the reading

    return put_back


def _undo_crossing(cache: EncoderDecoderCache) -> Callable[[], None]:
    parts, known = (cache.self_attention_cache, cache.cross_attention_cache), dict(cache.is_updated)
    undo_parts = [undo_reading(part) for part in parts]

    def put_back() -> None:
        for undo_part in undo_parts:
            undo_part()
        cache.is_updated = known

    return put_back


def keeps_everything(cache: DynamicCache) -> bool:
    """Tell whether every layer of ``cache`` keeps all keys and values that it is given, and nothing else."""
    return all(LAYER_CLASSES[type(layer)].keeps_all for layer in cache.layers)


def unsupported_layer(cache: object) -> str | None:
    """Say why slots cannot replace ``cache``, or return ``None`` if they can."""
    if type(cache) is not DynamicCache or cache.offloading:
        return f"a {type(cache).__name__}" + (" with offloading" if getattr(cache, "offloading", False) else "")
    return next((f"a {type(layer).__name__}" for layer in cache.layers if type(layer) not in LAYER_CLASSES), None)
