"""The nodes that a draft was asked to look behind while a proposal grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..counting import alone

# (tokens, depth, parents, ancestors) of the nodes of one level, (batch, new) tokens and their number of guesses up to
# the root, to their log-probabilities, (batch, new, vocabulary). Parents (batch, new) are places in the level before,
# None behind the root and in chains. Ancestors (batch, new, forest) are among all nodes so far, None in chains.
Step = Callable[[Tensor, int, Tensor | None, Tensor | None], Tensor]


@dataclass
class Forest:
    """The nodes that a draft was asked to look behind, one level of them after the other."""

    step: Step
    depth: int = 0  # of the last level
    ancestors: Tensor | None = None  # (batch, nodes of the last level, forest) bool

    def look_behind(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Add a level of nodes (batch, new) and return their log-probabilities (batch, new, vocabulary).

        ``parents`` (batch, new) are places in the level before, None for the first one.
        """
        batch, new = tokens.shape
        ancestors = alone(new, tokens.device).expand(batch, new, new)
        if self.ancestors is not None:
            assert parents is not None
            above = self.ancestors.gather(1, parents[:, :, None].expand(batch, new, self.ancestors.shape[2]))
            ancestors = torch.cat([above, ancestors], dim=2)
        self.ancestors = ancestors
        self.depth += 1
        return self.step(tokens, self.depth, parents, ancestors)
