"""A read-only view of the keys and values that a model keeps, for drafts that have none of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .buffers import SlotBuffer
from .runner import ModelRunner
from .static import StaticSlotLayer


@dataclass(frozen=True)
class LayerKeys:
    """The keys and values of one layer, as it caches them: views into its cache, which nobody may write to.

    ``keys`` and ``values`` are (rows, heads, slots, head size). ``distance`` (rows, slots) says how many positions
    before the next token the token of a slot stands, 1 for the last committed one. It is 0 for slots to be hidden:
    padding, rejected draft tokens, tokens outside of the layer's window, and empty slots.
    """

    keys: Tensor
    values: Tensor
    distance: Tensor


class TargetKeys:
    """What a target keeps of committed tokens: all of the text before the root of the next proposal.

    ``runner`` runs the target. Rows are those that still grow, in their order. After each commit other slots count, so
    a drafter asks again for each proposal.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def position(self) -> Tensor:
        """Return the position of the next token of each row, (rows, 1)."""
        runner = self._runner
        origin, lengths = runner.origin, runner.read_lengths[0][:, None]
        if origin is None or origin.ndim != 2:
            raise ValueError(
                f"{type(runner.model).__name__} has no positions that number its tokens, and a draft that reads its "
                "keys needs one. Use another draft, or 'ngram'."
            )
        return self._growing(origin.to(lengths.device) + lengths)

    def of_layer(self, number: int) -> LayerKeys:
        """Return the keys and values of layer ``number`` of the target.

        Errors: a ValueError if that layer keeps none.
        """
        layers = getattr(self._runner.slots.cache, "layers", ())
        layer: Any = layers[number] if number < len(layers) else None
        if isinstance(layer, StaticSlotLayer) and layer.is_initialized:
            return self._of_ring(layer)
        buffers: dict[str, SlotBuffer] = getattr(layer, "buffers", {})
        if "keys" not in buffers or buffers["keys"].data is None:
            raise ValueError(
                f"layer {number} of {type(self._runner.model).__name__} caches no keys and values of its own, which "
                "the draft reads. Use another draft, or 'ngram'."
            )
        return self._of_slots(buffers["keys"], buffers["values"], layer.window)

    def _of_slots(self, keys: SlotBuffer, values: SlotBuffer, window: int | None) -> LayerKeys:
        lengths, on_cpu = self._runner.read_lengths
        assert keys.data is not None and values.data is not None
        first = keys.start if window is None else max(keys.start, min(on_cpu) - window)
        count = max(on_cpu) - first
        columns = torch.arange(first, first + count, device=lengths.device)
        distance = self._distance(columns.expand(len(on_cpu), -1), window)
        held = [self._growing(data.narrow(2, first - keys.start, count)) for data in (keys.data, values.data)]
        return LayerKeys(held[0], held[1], self._growing(distance))

    def _of_ring(self, layer: StaticSlotLayer) -> LayerKeys:
        columns = layer.ring.columns(self._runner.read_lengths[0])
        distance = self._distance(columns, layer.window)
        assert layer.keys is not None and layer.values is not None
        return LayerKeys(self._growing(layer.keys), self._growing(layer.values), self._growing(distance))

    def _distance(self, columns: Tensor, window: int | None) -> Tensor:
        """Return how far before the next token the tokens in ``columns`` (batch, slots) stand, 0 for hidden ones.

        A ring's slot that a rejected draft token has overwritten counts as the column before it, which is outside of
        the window.
        """
        distance = self._runner.read_lengths[0][:, None] - columns
        hidden = (columns < 0) | (distance < 1)
        if window is not None:
            hidden |= distance > window
        if (padding := self._runner.slots.padding) is not None:  # (batch, prompt), False at padding
            known = pad(padding, (0, 1), value=True)  # the last column stands for all after the prompt
            hidden |= ~known.gather(1, columns.clamp(0, known.shape[1] - 1))
        return distance.masked_fill(hidden, 0)

    def _growing(self, states: Tensor) -> Tensor:
        """Keep the rows of ``states`` (cache rows, ...) that still grow."""
        rows = self._runner.growing_rows
        return states if rows is None else states.index_select(0, rows.to(states.device))
