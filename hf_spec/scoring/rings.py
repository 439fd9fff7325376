"""Rings: where each column of a row's text stands among slots of a fixed number, and who sees whom there.

A buffer is a ring: column c of the text stands in slot ``c % size``. Layers that keep the whole text have a ring that
the text never fills; it doubles before it would. Layers with a window have one that holds the window and a block. With
``size`` 8, a row of 10 columns stands there as ::

    slot      0  1  2  3  4  5  6  7
    column    8  9  2  3  4  5  6  7
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..counting import numbers
from .masks import Block

SHORTEST = 256  # slots of a ring for whole texts, or half as many if these hold all that can come; see ``ring_size``
STEP = 64  # a ring for a window is a multiple of this long


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is no smaller than ``number``."""
    return 1 << max(0, number - 1).bit_length()


class Ring:
    """Say in which of ``size`` slots each column of a row stands; shared by all layers of that size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.row = torch.empty(0)  # (seats, 1)
        self.slot: Tensor  # (seats, nodes): where the nodes of this forward are written

    def aim(self, columns: Tensor) -> None:
        """Let the next forward write nodes at ``columns`` (seats, nodes)."""
        if len(self.row) != len(columns):
            self.row = torch.arange(len(columns), device=columns.device)[:, None]
        self.slot = columns % self.size

    def columns(self, ends: Tensor) -> Tensor:
        """Return the column in each slot of rows that are ``ends`` (seats,) long: (seats, size), negative if empty."""
        last = ends[:, None] - 1
        return last - (last - torch.arange(self.size, device=ends.device)) % self.size


def fewest_slots(columns: int | None) -> int:
    """Return the slots of a ring for whole texts to begin with, where no text gets longer than so many ``columns``."""
    return SHORTEST // 2 if columns is not None and columns <= SHORTEST // 2 else SHORTEST


def ring_size(window: int | None, end: int, count: int, shortest: int) -> int:
    """Return how many slots hold ``end`` columns, or a window behind a block of ``count`` nodes."""
    whole = max(shortest, power_of_two(end))
    if window is None:
        return whole
    return min(whole, -(-(window - 1 + count) // STEP) * STEP)


class RingBlock(Block):
    """Say who sees whom among new nodes in rings."""

    def shown(self, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Return what the nodes see of a ring of ``length`` slots, (seats, nodes, slots), and its logical columns."""
        if self.window is None and self.depths is None and self.width <= length:  # column c stands in slot c
            slot = numbers(length, self.lengths.device)
            seen = slot <= self.query[:, :, None]
            if self.padding is not None:
                behind = length - self.padding.shape[1]
                seen &= torch.nn.functional.pad(self.padding, (0, behind), value=True)[:, None]
            return seen, slot.expand(len(self.lengths), -1)
        column = Ring(length).columns(self.lengths + self.open + self.count)  # (seats, slots)
        node = column - self.lengths[:, None]  # negative in the text
        logical = column
        if self.depths is None or self.ancestors is None:
            seen = column[:, None] <= self.query[:, :, None]
        else:
            depth = torch.cat(self.depths, dim=1)  # (seats, forest)
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
