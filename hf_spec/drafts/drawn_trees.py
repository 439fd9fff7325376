"""Sampled trees that grow where the draft is most confident: ``tree="dynamic"`` when sampling.

A sampled draft token must never be dropped: dropping it because of its value would bias the output. So the number of
children of a node is decided before they are sampled. It depends on the draft's distribution there, and on what was
sampled before. Then traversal verification keeps the target's distribution. The probability that it accepts something
in a subtree depends on the draft token at the top, and not on the shape below. So no shape informs about later
siblings.

The numbers are planned level by level. The *promise* of a draft token is the probability that the target reaches and
accepts it. A token sampled from q is accepted as often as p and q overlap, far more often than q(token) suggests::

    sampled so far  the ─┬─ cat  promise 0.7     expected below    cat ─┬─ 1st 0.42 ─── 1st 0.24
                         └─ dog  promise 0.1                            └─ 2nd 0.07
                                                                   dog ─── 1st 0.05

    with three draft tokens left, "cat" gets two children now and "dog" none; the third waits for what these two are
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device_tensors import cached_arange, cached_full
from ..proposal import NO_PARENT, PAD_NODE, Proposal
from ..sampling import draw_distinct
from .frontier import Step, TreeFrontier

# Probability that a sampled sibling is the accepted one, given that its parent is: BASE + OWN q(it) for the first one,
# BASE (1 - q(first)) + OWN q(it) for the others. AVERAGE is that of each sibling, given that the ones before it are
# rejected. Measured with the EAGLE-3 draft of the demo family at temperature 1. These numbers decide how good a tree
# is; the output follows the target's distribution whatever they are.
BASE = (0.400, 0.108, 0.059, 0.037)
OWN = (0.600, 0.295, 0.273, 0.255)
MEAN_ACCEPTANCE = (0.56, 0.23, 0.16, 0.13)


class Level(NamedTuple):
    """The static part of one level of sampled trees, known before any of them is sampled.

    ``width`` nodes are expanded, and each gets at most ``children``. An average tree is expected below each of them.
    The expected promise of a draft token in it is the node's promise times ``least`` + ``more`` * sum(q^2), both
    (expected tokens,). The node's own children come first.
    """

    width: int
    children: int
    least: Tensor
    more: Tensor


class Plan(NamedTuple):
    """The static part of sampled trees of at most ``nodes`` draft tokens, known before any of them is sampled.

    A child's promise is its parent's promise * (``base`` + q @ ``mix``), where q are the probabilities of its siblings
    and itself; ``base`` is (siblings,), ``mix`` (siblings, siblings). Candidates are numbered across levels, and so
    are expanded nodes, the root first. ``first`` (expanded nodes - 1,): for each expanded node but the root, the
    number of the first candidate of its level. ``above`` (candidates,): the parent of each, as an expanded node.
    """

    nodes: int
    levels: tuple[Level, ...]
    base: Tensor
    mix: Tensor
    first: Tensor
    above: Tensor


@functools.lru_cache(maxsize=64)
def plan_drawn(top_k: int, nodes: int, limit: int, vocabulary: int, device: torch.device) -> Plan:
    """Plan trees of at most ``nodes`` draft tokens and ``limit`` levels, with ``top_k`` expanded nodes per level.

    Cached for all trees of a kind, because every upload stalls an accelerator.
    """
    siblings = min(top_k, vocabulary, len(BASE))
    # A token sampled from q has sum(q^2) for q(token) on average. Later siblings share what the first one leaves.
    later = _in_turn((0.0, *MEAN_ACCEPTANCE[1:siblings]))[1:]
    least = [BASE[0], *((1 - BASE[0]) * share for share in later)]
    more = [OWN[0], *(-OWN[0] * share for share in later)]
    put, levels, width = functools.partial(torch.tensor, device=device), [], 1
    weigh = functools.partial(put, dtype=torch.float32)  # the dtype of distributions, whatever torch's default is
    first: list[int] = []
    above: list[int] = []
    for depth in range(limit):
        rank, below = zip(*_imagined(siblings, nodes, limit - depth), strict=True)
        children = below.count(1.0)
        parts = ([table[child] * share for child, share in zip(rank, below, strict=True)] for table in (least, more))
        levels.append(Level(width, children, *map(weigh, parts)))
        begin = len(first) + 1 - width  # the number of the level's first node among all expanded ones
        above += [begin + node for node in range(width) for _ in range(children)]
        width = min(top_k, width * children, nodes)
        first += [len(above) - levels[-1].width * children] * (width if depth + 1 < limit else 0)
    mix = torch.diag(weigh(OWN[:siblings]))
    mix[0, 1:] = -weigh(BASE[1:siblings])
    return Plan(nodes, tuple(levels), weigh(BASE[:siblings]), mix, put(first), put(above))


def grow_drawn(root: Tensor, log_probs: Tensor, step: Step, plan: Plan, noise: Iterator[Tensor]) -> Proposal:
    """Sample the draft tokens of a tree by ``plan``.

    ``root`` (batch,) and ``log_probs`` (batch, vocabulary) are as in ``grow``. ``noise`` holds the random numbers of
    each level, see ``draw_distinct``.
    """
    tree, grown = TreeFrontier(step), _Grown([], [], [], [])
    log_probs = log_probs[:, None]
    promise = log_probs.new_ones((len(root), 1))  # of the level's expanded nodes, (batch, n)
    # Draft tokens that may still be sampled, (batch, 1).
    left = cached_full(plan.nodes, len(root), root.device)[:, None]
    for level, below in itertools.zip_longest(plan.levels, plan.levels[1:]):
        q = log_probs.exp()
        drawn = draw_distinct(log_probs, level.children, next(noise))  # (batch, n, children)
        own = promise[:, :, None] * q.gather(2, drawn)  # 0 where q has no further token, or where the node is absent
        taken = _wanted(promise, q, left, level) & (own > 0)
        grown.add(q, drawn.flatten(1), taken.flatten(1))
        if below is None:
            break
        left = left - taken.flatten(1).sum(1, keepdim=True)
        promise, pick = (_after(promise, own, plan) * taken).flatten(1).topk(below.width)
        grown.picked.append(pick)
        above = pick // level.children if tree.depth else None
        log_probs = tree.expand(drawn.flatten(1).gather(1, pick), above)
    return grown.tree(root, plan)


class _Grown(NamedTuple):
    """The candidates of a batch, level by level, of which only those ``taken`` are in the tree."""

    q: list[Tensor]  # (batch, n, vocabulary) what the children of a level's nodes were sampled from
    drawn: list[Tensor]  # (batch, n * children)
    taken: list[Tensor]  # (batch, n * children)
    picked: list[Tensor]  # (batch, n) which candidates of a level were expanded

    def add(self, q: Tensor, drawn: Tensor, taken: Tensor) -> None:
        """Add a level."""
        self.q.append(q)
        self.drawn.append(drawn)
        self.taken.append(taken)

    def tree(self, root: Tensor, plan: Plan) -> Proposal:
        """Build the tree; rows may have different numbers of draft tokens."""
        q, drawn, taken = (torch.cat(part, dim=1) for part in (self.q, self.drawn, self.taken))
        spill = cached_arange(1, root.device, plan.nodes + 1)  # the last column is cut off: for what is not taken
        places = torch.where(taken, taken.cumsum(1), spill)  # (batch, candidates)
        node = cached_full(0, len(root), root.device)[:, None]  # (batch, expanded nodes), the root first
        if self.picked:
            node = torch.cat([node, places.gather(1, torch.cat(self.picked, dim=1) + plan.first)], dim=1)
        tokens = root[:, None].repeat(1, plan.nodes + 2).scatter_(1, places, drawn)
        parents = torch.full_like(tokens, PAD_NODE).scatter_(1, places, node.index_select(1, plan.above))
        parents[:, 0] = NO_PARENT
        by_node = q.new_zeros((*tokens.shape, q.shape[-1])).scatter_(1, node[:, :, None].expand_as(q), q)
        return Proposal(tokens[:, :-1], parents[:, :-1], len(plan.levels), by_node[:, :-1])


def _wanted(promise: Tensor, q: Tensor, left: Tensor, level: Level) -> Tensor:
    """Decide which children (batch, n, children) a level gets, with ``left`` (batch, 1) draft tokens remaining.

    The best ``left`` tokens of the trees expected below the nodes are selected. Those among them that are children of
    the level's own nodes are sampled now. ``promise`` (batch, n) is that of the nodes.
    """
    sure = (q[:, :, None] @ q[..., None])[..., 0]  # (batch, n, 1), sum(q^2)
    worth = torch.addcmul(level.least, sure, level.more) * promise[:, :, None]  # (batch, n, expected tokens)
    # argsort twice: the rank of each by promise, 0 for the best; stable, so a child comes before what is below it
    place = worth.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (place < left).view(worth.shape)[:, :, : level.children]


@functools.lru_cache(maxsize=64)
def _imagined(siblings: int, nodes: int, depth: int) -> tuple[tuple[int, float], ...]:
    """List the best ``nodes`` draft tokens of an average tree, at most ``depth`` deep.

    Each is a pair. The first is the rank of its ancestor (or itself) among the root's children; the second is the
    fraction of that child's promise that remains here, 1 for the child itself. The children of the root come first.
    """
    share = _in_turn(MEAN_ACCEPTANCE[:siblings])
    best: list[tuple[float, tuple[int, ...]]] = [(-share[0], (0,))]
    found: list[tuple[int, float]] = []
    while best and len(found) < nodes:
        worth, path = heapq.heappop(best)
        found.append((path[0], -worth / share[path[0]] if len(path) > 1 else 1.0))
        if path[-1] + 1 < siblings:
            heapq.heappush(best, (worth / share[path[-1]] * share[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(best, (worth * share[0], (*path, 0)))
    return tuple(sorted(found, key=lambda one: one[1] < 1.0))


def _after(promise: Tensor, own: Tensor, plan: Plan) -> Tensor:
    """Compute the promises (batch, n, children) of children that have been sampled.

    ``own`` (batch, n, children) are their probabilities under q, times the ``promise`` (batch, n) of their parents.
    """
    count = own.shape[-1]
    return torch.addcmul(own @ plan.mix[:count, :count], promise[:, :, None], plan.base[:count])


def _in_turn(accepted: Sequence[float]) -> list[float]:
    """Turn the probability that each sibling is accepted once it is its turn into that of being the accepted one."""
    passed = itertools.accumulate((1 - one for one in accepted), operator.mul, initial=1.0)
    return [one * before for one, before in zip(accepted, passed, strict=False)]
