"""Trees of guesses that are drawn and still go where the draft is surest: ``tree="dynamic"`` when sampling.

A drawn tree must not lose a guess once it is drawn: what was dropped for its value would be missing from the text. So
how many children a node gets is decided before they are drawn, from the draft's distribution there and from all that
was drawn before. Then traversal verification keeps the target's distribution: how probably it accepts something in a
subtree depends on the guess at its top and not on the shape below, so that no shape tells about later siblings.

How many is planned level by level. The *promise* of a guess is how probably the target comes to it and accepts it. A
guess that was drawn from q is accepted as often as p and q overlap, far more often than q itself would say::

    drawn so far    the ─┬─ cat  promise 0.7     imagined below    cat ─┬─ 1st 0.42 ─── 1st 0.24
                         └─ dog  promise 0.1                            └─ 2nd 0.07
                                                                   dog ─── 1st 0.05

    with three guesses left "cat" gets two children now, "dog" none, and the third waits for what these two are
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..counting import numbers
from ..proposal import ABSENT, NO_PARENT, Proposal
from ..sampling import draw_distinct
from .forest import Forest, Step

# How probably the first, second, ... of drawn siblings is accepted once it is its turn: at least, on average, and what
# share of the rest the draft's own probability of it adds. Measured with the EAGLE-3 draft of the demo family at
# temperature 1. They decide how good a tree is; the text has the target's distribution whatever stands here.
LEAST = (0.40, 0.18, 0.13, 0.10)
AVERAGE = (0.56, 0.23, 0.16, 0.13)
SHARE = (1.0, 0.6, 0.6, 0.6)


@dataclass(frozen=True)
class Level:
    """What is known of one level of drawn trees before any of them is drawn.

    ``width`` nodes are looked behind, and each gets at most ``children``. Below each of them a tree is imagined; a
    guess in it is worth ``least`` + ``more`` * sum(q^2) of its node's promise, both (imagined,). The children come
    first.
    """

    width: int
    children: int
    least: Tensor
    more: Tensor


@dataclass(frozen=True)
class Plan:
    """What is known of drawn trees of at most ``nodes`` guesses before any of them is drawn.

    A sibling is accepted in its turn with a probability of ``least`` + ``more`` * its own share, both (siblings,).
    """

    nodes: int
    levels: tuple[Level, ...]
    least: Tensor
    more: Tensor


@functools.lru_cache(maxsize=64)
def plan_drawn(top_k: int, nodes: int, limit: int, vocabulary: int, device: torch.device) -> Plan:
    """Plan trees of at most ``nodes`` guesses and ``limit`` levels, with ``top_k`` nodes looked behind per level.

    Once for all trees of a kind, because every upload makes an accelerator wait.
    """
    siblings = min(top_k, vocabulary, len(LEAST))
    most = [(1 - LEAST[rank]) * SHARE[rank] for rank in range(siblings)]
    # What is drawn from q has itself a probability of sum(q^2) on average; it decides about all siblings.
    later = _in_turn(torch.tensor((0.0, *AVERAGE[1:siblings]))).tolist()
    least = [LEAST[0], *((1 - LEAST[0]) * share for share in later[1:])]
    more = [most[0], *(-most[0] * share for share in later[1:])]
    put, levels, width = functools.partial(torch.tensor, device=device), [], 1
    for depth in range(limit):
        rank, below = zip(*_imagined(siblings, nodes, limit - depth), strict=True)
        children = below.count(1.0)
        parts = ([table[first] * share for first, share in zip(rank, below, strict=True)] for table in (least, more))
        levels.append(Level(width, children, *map(put, parts)))
        width = min(top_k, width * children, nodes)
    return Plan(nodes, tuple(levels), put(LEAST[:siblings]), put(most))


def grow_drawn(root: Tensor, log_probs: Tensor, step: Step, plan: Plan, noise: Iterator[Tensor]) -> Proposal:
    """Draw the guesses of a tree as ``plan`` says.

    ``root`` (batch,) and ``log_probs`` (batch, vocabulary) are as in ``grow``; ``noise`` is what levels are drawn
    with, see ``draw_distinct``.
    """
    tree, forest = _DrawnTree(root, plan.nodes), Forest(step)
    log_probs = log_probs[:, None]
    node, promise = torch.zeros_like(root)[:, None], log_probs.new_ones((len(root), 1))  # of the level looked behind
    for level, below in itertools.zip_longest(plan.levels, plan.levels[1:]):
        q = log_probs.exp()
        wanted = _wanted(promise, q, plan.nodes - tree.used, level)  # (batch, n, children)
        drawn = draw_distinct(log_probs, level.children, next(noise))
        own = q.gather(2, drawn)
        taken = wanted & (own > 0)
        places = tree.add(node, q, drawn, taken)
        if below is None:
            break
        promises = promise[:, :, None] * _after(own, plan) * taken
        promise, pick = promises.flatten(1).topk(below.width)
        above = pick // level.children if forest.depth else None  # in the level before, behind the root nowhere
        node = places.gather(1, pick)
        log_probs = forest.look_behind(drawn.flatten(1).gather(1, pick), above)
    return tree.proposal(len(plan.levels))


class _DrawnTree:
    """Collect the guesses of a batch, another number of them in every row."""

    def __init__(self, root: Tensor, nodes: int) -> None:
        self.used = torch.zeros_like(root)  # guesses of each row
        self._root, self._nodes = root, nodes
        self._spill = numbers(1, root.device, nodes + 1)  # one place more than a tree has, for what is in none
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, node: Tensor, q: Tensor, drawn: Tensor, taken: Tensor) -> Tensor:
        """Give ``node`` (batch, n) those of the children ``drawn`` (batch, n, children) that are ``taken``.

        They were drawn from ``q`` (batch, n, vocabulary). Return their places (batch, n * children).
        """
        number = self.used[:, None] + taken.flatten(1).cumsum(1)
        places = torch.where(taken.flatten(1), number, self._spill)
        parents = node[:, :, None].expand_as(drawn).flatten(1)
        self._levels.append((places, drawn.flatten(1), parents, node, q))
        self.used = number[:, -1]
        return places

    def proposal(self, depth: int) -> Proposal:
        """Return what was collected, at most ``depth`` deep."""
        places, drawn, above, node, q = (torch.cat(part, dim=1) for part in zip(*self._levels, strict=True))
        tokens = self._root[:, None].repeat(1, self._nodes + 2).scatter_(1, places, drawn)
        parents = torch.full_like(tokens, ABSENT).scatter_(1, places, above)
        parents[:, 0] = NO_PARENT
        by_node = q.new_zeros((*tokens.shape, q.shape[-1])).scatter_(1, node[:, :, None].expand_as(q), q)
        return Proposal(tokens[:, :-1], parents[:, :-1], depth, by_node[:, :-1])


def _wanted(promise: Tensor, q: Tensor, left: Tensor, level: Level) -> Tensor:
    """Say which children the nodes of a level get, (batch, n, children), while ``left`` (batch,) guesses may be drawn.

    Of all guesses in the trees imagined below the nodes the best ones fill up what is left; those among them that are
    children of the level's own nodes are to be drawn now. ``promise`` (batch, n) is that of the nodes.
    """
    worth = promise[:, :, None] * torch.addcmul(level.least, q.square().sum(-1, keepdim=True), level.more)
    place = worth.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    wanted = (place < left[:, None]).view(worth.shape) & (worth > 0)
    return wanted[:, :, : level.children]


@functools.lru_cache(maxsize=64)
def _imagined(siblings: int, nodes: int, depth: int) -> tuple[tuple[int, float], ...]:
    """List the best ``nodes`` guesses of an average tree, at most ``depth`` deep.

    Of each: the rank among its siblings of the child of the root that it stands behind, or is, and how much of that
    child's promise is left there; 1 for the child itself. The children of the root come first.
    """
    share = _in_turn(torch.tensor(AVERAGE[:siblings])).tolist()
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


def _after(drawn: Tensor, plan: Plan) -> Tensor:
    """Promise children whose probabilities ``drawn`` (..., children) are known, if their parent is accepted."""
    count = drawn.shape[-1]
    left = 1 - (drawn.cumsum(-1) - drawn)  # for drawn ones leave the distribution
    own = (drawn / left.clamp_(min=1e-6)).clamp_(max=1)
    return _in_turn(torch.addcmul(plan.least[:count], own, plan.more[:count]))


def _in_turn(accepted: Tensor) -> Tensor:
    """Turn how probably each sibling (..., siblings) is accepted in its turn into how probably it is the one."""
    passed = (1 - accepted).cumprod(-1)
    return functional.pad(passed[..., :-1], (1, 0), value=1.0) * accepted
