"""Ring buffers of a fixed number of slots: which column of a row lies in which slot, and the attention mask over them.

Column c of a sequence lies in slot ``c % size``. A layer of full attention has a ring that never wraps: its size is
doubled before it would. The ring of a layer with a window holds the window and a block. With ``size`` 8, a row of 10
columns lies there as ::

    slot      0  1  2  3  4  5  6  7
    column    8  9  2  3  4  5  6  7
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_tensors import cached_arange
from .masks import TreeMask

SHORTEST = 256  # slots of a new ring for full attention, or half as many if these will suffice; see ``fewest_slots``
STEP = 64  # the size of a ring for a window is a multiple of this


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is no smaller than ``number``."""
    return 1 << max(0, number - 1).bit_length()


class Ring:
    """The map from columns to ``size`` slots, shared by all layers of that size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.row = torch.empty(0)  # (batch, 1)
        self.slot: Tensor  # (batch, nodes): where the nodes of this forward are written

    def reserve(self, columns: Tensor) -> None:
        """Set the ``columns`` (batch, nodes) at which the next forward writes its nodes."""
        if len(self.row) != len(columns):
            self.row = torch.arange(len(columns), device=columns.device)[:, None]
        self.slot = columns % self.size

    def columns(self, ends: Tensor) -> Tensor:
        """Return the column in each slot of rows that are ``ends`` (batch,) long: (batch, size), negative if empty."""
        last = ends[:, None] - 1  # of the columns before the end, the latest one that maps to the slot
        return last - (last - torch.arange(self.size, device=ends.device)) % self.size


def fewest_slots(columns: int | None) -> int:
    """Return the initial slots of a ring for full attention, if no row gets longer than ``columns``."""
    return SHORTEST // 2 if columns is not None and columns <= SHORTEST // 2 else SHORTEST


def ring_size(window: int | None, end: int, count: int, shortest: int) -> int:
    """Return how many slots hold ``end`` columns, or a window and a block of ``count`` nodes after it."""
    whole = max(shortest, power_of_two(end))
    if window is None:
        return whole
    return min(whole, -(-(window - 1 + count) // STEP) * STEP)


class RingMask(TreeMask):
    """The attention mask of the new nodes of a forward over ring buffers."""

    def shown(self, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Return what the nodes see of a ring of ``length`` slots, (batch, nodes, slots), and its logical columns."""
        if self.window is None and self.depths is None and self.width <= length:  # a chain, and column c is slot c
            slot = cached_arange(length, self.lengths.device)
            seen = slot <= self.query[:, :, None]
            if self.padding is not None:
                missing = length - self.padding.shape[1]
                seen &= torch.nn.functional.pad(self.padding, (0, missing), value=True)[:, None]
            return seen, slot.expand(len(self.lengths), -1)
        column = Ring(length).columns(self.lengths + self.draft_nodes + self.count)  # (batch, slots)
        node = column - self.lengths[:, None]  # negative in committed slots
        logical = column
        if self.depths is None or self.ancestors is None:
            seen = column[:, None] <= self.query[:, :, None]
        else:
            depth = torch.cat(self.depths, dim=1)  # (batch, draft nodes)
            known = node.clamp(0, depth.shape[1] - 1)
            logical = torch.where(node < 0, column, depth.gather(1, known) + self.lengths[:, None])
            forest = self.ancestors.gather(2, known[:, None].expand(-1, self.count, -1))
            seen = (node < 0)[:, None] | forest
        seen = seen & (column >= 0)[:, None]
        if self.padding is not None:
            prompt = self.padding.shape[1]
            seen &= (self.padding.gather(1, column.clamp(0, prompt - 1)) | (column >= prompt))[:, None]
        if self.window is not None:
            seen &= self.query[:, :, None] - logical[:, None] < self.window
        return seen, logical
