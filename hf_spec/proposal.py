"""What a drafter proposes: a tree of draft tokens for every sequence, and the distribution they were sampled from.

Node 0 is the root, the last emitted token, which the target has not read yet. Every other node is a draft token that
follows its parent. A chain is a tree in which every node has one child::

        tokens   [ the   cat   dog   sat   ran ]          the ─┬─ cat ─┬─ sat
        parents  [  -1     0     0     1     1 ]               │       └─ ran
        depth    [   0     1     1     2     2 ]               └─ dog

Parents come before their children. Rows with fewer nodes than the widest one are padded with PAD_NODE nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .device_tensors import cached_arange, cached_full, to_device

NO_PARENT = -1
PAD_NODE = -2

T = TypeVar("T")


class once(cached_property[T]):
    """A property that is computed when it is first read, without the lock of Python 3.11, which no graph can hold."""

    if not TYPE_CHECKING:

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.func(instance)
            object.__setattr__(instance, self.func.__name__, value)
            return value


@dataclass(frozen=True)
class Proposal:
    """One tree of draft tokens per row.

    ``tokens`` and ``parents`` are (batch, nodes) integers; tokens are of the target's vocabulary, also where PAD_NODE.
    ``max_depth`` bounds the depth of every row. It is a Python number, so that nobody has to ask the accelerator.

    ``q`` says which distribution the draft tokens were sampled from, and so how they are verified:

    - ``None``: they are *deterministic* (top-k, n-gram, argmax), a point mass each.
    - (batch, parents, vocab) float32: the children of node i were *sampled* from exactly ``q[:, i]``, which sums to
      one, without replacement and in index order. Nodes from ``q.shape[1]`` on have no children.

    A deterministic token can therefore never be verified as if it had been sampled.

    ``deterministic`` (batch, nodes) bool marks such draft tokens among sampled ones: each is a point mass, whatever
    ``q`` says. Which token it is may depend on its sampled ancestors and earlier siblings, and on no other sample.

    ``shape`` is ``parents`` as Python numbers, where rows differ in padding alone. A sampled tree that has it is
    verified without asking the accelerator. ``is_unpadded`` promises that no node is PAD_NODE.
    """

    tokens: Tensor
    parents: Tensor
    max_depth: int
    q: Tensor | None = None
    is_chain: bool = False
    shape: tuple[int, ...] | None = None
    deterministic: Tensor | None = None
    is_unpadded: bool = field(default=False, init=False)

    @classmethod
    def chain(
        cls, root: Tensor, draft_tokens: Tensor, counts: Tensor | None = None, q: Tensor | None = None
    ) -> Proposal:
        """Build a chain per row: ``root`` (batch,), then the first ``counts`` (batch,) draft tokens (batch, k)."""
        return cls.path(torch.cat([root[:, None], draft_tokens], dim=1), counts, q)

    @classmethod
    def path(cls, tokens: Tensor, counts: Tensor | None = None, q: Tensor | None = None) -> Proposal:
        """Do as ``chain`` with root and draft tokens in one tensor, ``tokens`` (batch, 1 + k)."""
        parents = cached_arange(tokens.shape[1], tokens.device, NO_PARENT).expand_as(tokens)
        if counts is not None:
            parents = parents.masked_fill(parents >= counts[:, None], PAD_NODE)
        proposal = cls(tokens, parents, tokens.shape[1] - 1, q, is_chain=True)
        return proposal.without_padding() if counts is None else proposal

    @classmethod
    def nothing(cls, root: Tensor) -> Proposal:
        """Propose nothing: the target then takes one plain step from ``root`` (batch,)."""
        parents = cached_full(NO_PARENT, root.shape[0], root.device)
        return cls(root[:, None], parents[:, None], max_depth=0, is_chain=True).without_padding()

    def without_padding(self) -> Proposal:
        """Promise that no node is PAD_NODE, and return the proposal; a changed copy of it promises nothing."""
        object.__setattr__(self, "is_unpadded", True)
        return self

    @property
    def root(self) -> Tensor:
        """Return the last emitted token of each row, (batch,)."""
        return self.tokens[:, 0]

    @once
    def present(self) -> Tensor:
        """Tell which nodes exist, (batch, nodes) bool."""
        return self.parents != PAD_NODE

    @once
    def ancestors(self) -> Tensor:
        """Tell which nodes lie on the path from the root to a node, itself included: (batch, node, ancestor) bool."""
        if self.is_chain:
            nodes = self.tokens.shape[1]
            lower = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tokens.device).tril()
            return lower.expand(self.tokens.shape[0], nodes, nodes)
        return ancestors_of(self.parents, self.max_depth)

    @once
    def earlier_siblings(self) -> Tensor:
        """Tell which nodes are siblings of a node and come before it: (batch, node, earlier sibling) bool."""
        number = cached_arange(self.tokens.shape[1], self.tokens.device)
        return (self.parents[:, :, None] == self.parents[:, None]) & (number[:, None] > number)

    @once
    def depth(self) -> Tensor:
        """Count the draft tokens on the path to each node, (batch, nodes)."""
        if self.is_chain:
            return cached_arange(self.tokens.shape[1], self.tokens.device).expand_as(self.tokens)
        return self.ancestors.sum(-1) - 1

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """Find the child of ``node`` (batch,) with the token ``token`` (batch,); -1 where there is none."""
        match = (self.parents == node[:, None]) & (self.tokens == token[:, None])  # (batch, nodes)
        found, index = match.max(dim=1)
        return torch.where(found, index, -1)

    def truncate_rows(self, depths: Sequence[int]) -> Proposal:
        """Drop the draft tokens of row b that are more than ``depths[b]`` deep, whatever they are.

        ``depths`` must not depend on sampled draft tokens: dropping some because of their value would bias the output.
        """
        if min(depths) >= self.max_depth:
            return self
        beyond = self.depth > to_device(depths, self.tokens.device)[:, None]
        return replace(self, parents=self.parents.masked_fill(beyond, PAD_NODE))

    def truncate(self, depth: int) -> Proposal:
        """Drop the draft tokens that are more than ``depth`` deep."""
        if depth >= self.max_depth:
            return self
        if not self.is_chain:
            return self.truncate_rows([depth] * len(self.tokens))
        q = None if self.q is None else self.q[:, :depth]
        tokens, parents, deterministic = (
            None if one is None else one[:, : 1 + depth] for one in (self.tokens, self.parents, self.deterministic)
        )
        return self._like(tokens, parents, q, deterministic, max_depth=depth)

    def map_tensors(self, pick: Callable[[Tensor], Tensor]) -> Proposal:
        """Apply ``pick`` to the tensors of the proposal; it may drop rows."""
        kept = [None if one is None else pick(one) for one in (self.tokens, self.parents, self.q, self.deterministic)]
        return self._like(*kept)

    def _like(
        self, tokens: Any, parents: Any, q: Tensor | None, deterministic: Tensor | None, **changes: Any
    ) -> Proposal:
        """Return a proposal of other tensors, without padding if this one has none."""
        other = replace(self, tokens=tokens, parents=parents, q=q, deterministic=deterministic, **changes)
        return other.without_padding() if self.is_unpadded else other

    def to(self, device: torch.device) -> Proposal:
        """Return the proposal on ``device``."""
        if self.tokens.device == device:
            return self
        q = None if self.q is None else self.q.to(device)
        deterministic = None if self.deterministic is None else self.deterministic.to(device)
        return self._like(self.tokens.to(device), self.parents.to(device), q, deterministic)


def ancestors_of(parents: Tensor, max_depth: int) -> Tensor:
    """Follow ``parents`` (batch, nodes) up to the roots: (batch, node, ancestor) bool, each node its own ancestor."""
    steps = cached_arange(parents.shape[1], parents.device)
    ways = (parents[:, :, None] == steps).float()  # in how many ways a node is reached in at most one step
    ways.diagonal(dim1=1, dim2=2).fill_(1)
    for _ in range(max(0, max_depth - 1).bit_length()):  # in at most 2, 4, 8, ... steps
        ways = ways.bmm(ways).clamp_(max=1)
    return ways > 0


def tree_from_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Turn a static tree, a list of paths of ranks, into (parents, ranks) with the root first.

    ``[(0,), (1,), (0, 0)]`` means: the best and second-best token, and the best token after the best one. Missing
    prefixes are added. Source of the notation: Medusa (arXiv 2401.10774).
    """
    wanted = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    ordered = sorted(wanted, key=lambda path: (len(path), path))
    index = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
    parents = [NO_PARENT, *(index[path[:-1]] for path in ordered)]
    return parents, [0, *(path[-1] for path in ordered)]
