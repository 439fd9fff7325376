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
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counting import numbers, repeated
from ..proposal import ABSENT, NO_PARENT, Proposal
from ..sampling import draw_distinct
from .forest import Forest, Step

# How probably a drawn sibling is the one that is accepted, if its parent is: BASE + OWN q(it) for the first one,
# BASE (1 - q(first)) + OWN q(it) for the others, and on AVERAGE where those before it are rejected. Measured with the
# EAGLE-3 draft of the demo family at temperature 1. They decide how good a tree is; the text has the target's
# distribution whatever stands here.
BASE = (0.400, 0.108, 0.059, 0.037)
OWN = (0.600, 0.295, 0.273, 0.255)
AVERAGE = (0.56, 0.23, 0.16, 0.13)


class Level(NamedTuple):
    """What is known of one level of drawn trees before any of them is drawn.

    ``width`` nodes are looked behind, and each gets at most ``children``. Below each of them a tree is imagined; a
    guess in it is worth ``least`` + ``more`` * sum(q^2) of its node's promise, both (imagined,). The children come
    first.
    """

    width: int
    children: int
    least: Tensor
    more: Tensor


class Plan(NamedTuple):
    """What is known of drawn trees of at most ``nodes`` guesses before any of them is drawn.

    A child's promise is its parent's, ``base`` (siblings,) times, and what ``mix`` (siblings, siblings) makes of the
    probabilities of all siblings. Of the nodes looked behind the first one is the root, and any other one a guess:
    ``first`` (nodes looked behind - 1,) is the number of the first guess of its level among all guesses. Guesses stand
    behind the nodes ``above`` (guesses,), numbered as they are looked behind.
    """

    nodes: int
    levels: tuple[Level, ...]
    base: Tensor
    mix: Tensor
    first: Tensor
    above: Tensor


@functools.lru_cache(maxsize=64)
def plan_drawn(top_k: int, nodes: int, limit: int, vocabulary: int, device: torch.device) -> Plan:
    """Plan trees of at most ``nodes`` guesses and ``limit`` levels, with ``top_k`` nodes looked behind per level.

    Once for all trees of a kind, because every upload makes an accelerator wait.
    """
    siblings = min(top_k, vocabulary, len(BASE))
    # What is drawn from q has itself a probability of sum(q^2) on average; it decides about all siblings.
    later = _in_turn((0.0, *AVERAGE[1:siblings]))[1:]
    least = [BASE[0], *((1 - BASE[0]) * share for share in later)]
    more = [OWN[0], *(-OWN[0] * share for share in later)]
    put, levels, width = functools.partial(torch.tensor, device=device), [], 1
    weigh = functools.partial(put, dtype=torch.float32)  # as distributions are, whatever torch's default is
    first: list[int] = []
    above: list[int] = []
    for depth in range(limit):
        rank, below = zip(*_imagined(siblings, nodes, limit - depth), strict=True)
        children = below.count(1.0)
        parts = ([table[child] * share for child, share in zip(rank, below, strict=True)] for table in (least, more))
        levels.append(Level(width, children, *map(weigh, parts)))
        begin = len(first) + 1 - width  # of the level's nodes among all that are looked behind
        above += [begin + node for node in range(width) for _ in range(children)]
        width = min(top_k, width * children, nodes)
        first += [len(above) - levels[-1].width * children] * (width if depth + 1 < limit else 0)
    mix = torch.diag(weigh(OWN[:siblings]))
    mix[0, 1:] = -weigh(BASE[1:siblings])
    return Plan(nodes, tuple(levels), weigh(BASE[:siblings]), mix, put(first), put(above))


def grow_drawn(root: Tensor, log_probs: Tensor, step: Step, plan: Plan, noise: Iterator[Tensor]) -> Proposal:
    """Draw the guesses of a tree as ``plan`` says.

    ``root`` (batch,) and ``log_probs`` (batch, vocabulary) are as in ``grow``; ``noise`` is what levels are drawn
    with, see ``draw_distinct``.
    """
    forest, grown = Forest(step), _Grown([], [], [], [])
    log_probs = log_probs[:, None]
    promise = log_probs.new_ones((len(root), 1))  # of the nodes looked behind, (batch, n)
    left = repeated(plan.nodes, len(root), root.device)[:, None]  # guesses that may still be drawn
    for level, below in itertools.zip_longest(plan.levels, plan.levels[1:]):
        q = log_probs.exp()
        drawn = draw_distinct(log_probs, level.children, next(noise))  # (batch, n, children)
        own = promise[:, :, None] * q.gather(2, drawn)  # 0 where there is nothing to draw, or no node
        taken = _wanted(promise, q, left, level) & (own > 0)
        grown.add(q, drawn.flatten(1), taken.flatten(1))
        if below is None:
            break
        left = left - taken.flatten(1).sum(1, keepdim=True)
        promise, pick = (_after(promise, own, plan) * taken).flatten(1).topk(below.width)
        grown.picked.append(pick)
        above = pick // level.children if forest.depth else None
        log_probs = forest.look_behind(drawn.flatten(1).gather(1, pick), above)
    return grown.tree(root, plan)


class _Grown(NamedTuple):
    """Hold the guesses of a batch, level by level, of which only those ``taken`` are in the tree."""

    q: list[Tensor]  # (batch, n, vocabulary) what the children of a level's nodes were drawn from
    drawn: list[Tensor]  # (batch, n * children)
    taken: list[Tensor]  # (batch, n * children)
    picked: list[Tensor]  # (batch, n) which guesses of a level were looked behind

    def add(self, q: Tensor, drawn: Tensor, taken: Tensor) -> None:
        """Add a level."""
        self.q.append(q)
        self.drawn.append(drawn)
        self.taken.append(taken)

    def tree(self, root: Tensor, plan: Plan) -> Proposal:
        """Return the tree, with another number of guesses in every row."""
        q, drawn, taken = (torch.cat(part, dim=1) for part in (self.q, self.drawn, self.taken))
        spill = numbers(1, root.device, plan.nodes + 1)  # one place more than a tree has, for what is in none
        places = torch.where(taken, taken.cumsum(1), spill)  # (batch, guesses)
        node = repeated(0, len(root), root.device)[:, None]  # (batch, nodes looked behind), the root first
        if self.picked:
            node = torch.cat([node, places.gather(1, torch.cat(self.picked, dim=1) + plan.first)], dim=1)
        tokens = root[:, None].repeat(1, plan.nodes + 2).scatter_(1, places, drawn)
        parents = torch.full_like(tokens, ABSENT).scatter_(1, places, node.index_select(1, plan.above))
        parents[:, 0] = NO_PARENT
        by_node = q.new_zeros((*tokens.shape, q.shape[-1])).scatter_(1, node[:, :, None].expand_as(q), q)
        return Proposal(tokens[:, :-1], parents[:, :-1], len(plan.levels), by_node[:, :-1])


def _wanted(promise: Tensor, q: Tensor, left: Tensor, level: Level) -> Tensor:
    """Say which children (batch, n, children) a level gets where ``left`` (batch, 1) guesses may be drawn.

    Of all guesses in the trees imagined below the nodes the best ones fill up what is left; those among them that are
    children of the level's own nodes are to be drawn now. ``promise`` (batch, n) is that of the nodes.
    """
    sure = (q[:, :, None] @ q[..., None])[..., 0]  # (batch, n, 1), sum(q^2)
    worth = torch.addcmul(level.least, sure, level.more) * promise[:, :, None]  # (batch, n, imagined)
    place = worth.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (place < left).view(worth.shape)[:, :, : level.children]


@functools.lru_cache(maxsize=64)
def _imagined(siblings: int, nodes: int, depth: int) -> tuple[tuple[int, float], ...]:
    """List the best ``nodes`` guesses of an average tree, at most ``depth`` deep.

    Of each: the rank among its siblings of the child of the root that it stands behind, or is, and how much of that
    child's promise is left there; 1 for the child itself. The children of the root come first.
    """
    share = _in_turn(AVERAGE[:siblings])
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
    """Promise children (batch, n, children) when it is known which ones were drawn.

    ``own`` (batch, n, children) is how probable they were, times the ``promise`` (batch, n) of their parents.
    """
    count = own.shape[-1]
    return torch.addcmul(own @ plan.mix[:count, :count], promise[:, :, None], plan.base[:count])


def _in_turn(accepted: Sequence[float]) -> list[float]:
    """Turn how probably each sibling is accepted in its turn into how probably it is the one."""
    passed = itertools.accumulate((1 - one for one in accepted), operator.mul, initial=1.0)
    return [one * before for one, before in zip(accepted, passed, strict=False)]
