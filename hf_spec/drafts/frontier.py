"""The tree nodes that a draft has expanded while a proposal grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device_tensors import identity_mask

# A draft's forward over the nodes of one level: (tokens, depth, parents, ancestors) -> log-probabilities after them,
# (batch, new, vocabulary). Tokens are (batch, new); depth counts the draft tokens on their path. Parents (batch, new)
# are indices into the level before, None in the first level and in chains. Ancestors (batch, new, nodes so far) bool
# are None in chains.
Step = Callable[[Tensor, int, Tensor | None, Tensor | None], Tensor]


@dataclass
class TreeFrontier:
    """The nodes that a draft has expanded, one level after the other."""

    step: Step
    depth: int = 0  # of the last level
    ancestors: Tensor | None = None  # (batch, nodes of the last level, all nodes) bool

    def expand(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Expand a level of nodes (batch, new), and return the log-probabilities after them (batch, new, vocabulary).

        ``parents`` (batch, new) are indices into the level before, None for the first one.
        """
        batch, new = tokens.shape
        ancestors = identity_mask(new, tokens.device).expand(batch, new, new)
        if self.ancestors is not None:
            assert parents is not None
            above = self.ancestors.gather(1, parents[:, :, None].expand(batch, new, self.ancestors.shape[2]))
            ancestors = torch.cat([above, ancestors], dim=2)
        self.ancestors = ancestors
        self.depth += 1
        return self.step(tokens, self.depth, parents, ancestors)
