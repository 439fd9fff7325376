"""The nodes that a draft was asked to look behind while a proposal grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..counting import numbers

# (tokens, parents, ancestors) of new nodes of the draft's own forest, (batch, new), (batch, new) and
# (batch, new, forest), to their log-probabilities, (batch, new, vocabulary). Parents are forest numbers, -1 follows
# the text. No ancestors: the nodes continue a chain.
Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Forest:
    """The nodes that a draft was asked to look behind, in the order it was asked."""

    step: Step
    ancestors: Tensor  # (batch, forest, forest) bool
    size: int = 0

    @classmethod
    def empty(cls, step: Step, like: Tensor) -> Forest:
        """Start with no nodes, for as many rows as ``like`` has."""
        return cls(step, torch.zeros((like.shape[0], 0, 0), dtype=torch.bool, device=like.device))

    def look_behind(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Add nodes (batch, new) and return their log-probabilities (batch, new, vocabulary)."""
        batch, new = tokens.shape
        step = numbers(new, tokens.device)
        own = (step[:, None] == step).expand(batch, new, new)
        if self.size:
            index = parents.clamp(min=0)[:, :, None].expand(batch, new, self.size)
            above = self.ancestors.gather(1, index) & (parents >= 0)[:, :, None]
        else:
            above = own[:, :, :0]
        rows = torch.cat([above, own], dim=2)  # (batch, new, forest)
        self.ancestors = torch.cat([functional.pad(self.ancestors, (0, new)), rows], dim=1)
        self.size += new
        return self.step(tokens, parents, rows)
