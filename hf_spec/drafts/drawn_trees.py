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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
class Plan:
    """What is known of drawn trees before any of them is drawn.

    ``widths[d]`` nodes of depth d are looked behind, and each gets at most ``siblings`` children of ``nodes`` in all.
    ``imagined[d]`` are the rank and the share of each guess that is imagined below a node of depth d; ``least``,
    ``average`` and ``share`` (siblings,) say how probably siblings are accepted.
    """

    widths: tuple[int, ...]
    siblings: int
    nodes: int
    imagined: tuple[tuple[Tensor, Tensor], ...]
    least: Tensor
    average: Tensor
    share: Tensor


@functools.lru_cache(maxsize=64)
def plan_drawn(top_k: int, nodes: int, limit: int, vocabulary: int, device: torch.device) -> Plan:
    """Plan trees of at most ``nodes`` guesses and ``limit`` levels, with ``top_k`` nodes looked behind per level.

    Once for all trees of a kind, because every upload makes an accelerator wait.
    """
    siblings = min(top_k, vocabulary, len(LEAST))
    widths = [1]
    while len(widths) < limit:
        widths.append(min(top_k, widths[-1] * siblings, nodes))
    put = functools.partial(torch.tensor, device=device)
    imagined = []
    for depth in range(limit):
        rank, share = zip(*_imagined(siblings, nodes, limit - depth), strict=True)
        imagined.append((put(rank), put(share)))
    tables = [put(table[:siblings]) for table in (LEAST, AVERAGE, SHARE)]
    return Plan(tuple(widths), siblings, nodes, tuple(imagined), *tables)


def grow_drawn(root: Tensor, log_probs: Tensor, step: Step, plan: Plan, noise: Iterator[Tensor | None]) -> Proposal:
    """Draw the guesses of a tree as ``plan`` says.

    ``root`` (batch,) and ``log_probs`` (batch, vocabulary) are as in ``grow``; ``noise`` is what levels are drawn
    with, see ``draw_distinct``.
    """
    siblings, limit = plan.siblings, len(plan.widths)
    tree = _DrawnTree(root, plan.nodes, log_probs)
    forest, log_probs = Forest.empty(step, root), log_probs[:, None]
    node, promise = torch.zeros_like(root)[:, None], log_probs.new_ones((len(root), 1))  # of the level looked behind
    for depth in range(1, limit + 1):
        counts = _plan(promise, _before(log_probs, plan), plan.nodes - tree.used, *plan.imagined[depth - 1])
        drawn = draw_distinct(log_probs, siblings, next(noise))  # (batch, n, siblings)
        places = tree.add(node, log_probs, drawn, counts)
        if depth == limit:
            break
        promises = promise[:, :, None] * _after(log_probs.gather(2, drawn).exp(), plan)  # (batch, n, siblings)
        level = node.shape[1]
        promise, pick = promises.masked_fill(places < 0, 0).flatten(1).topk(plan.widths[depth])
        above = forest.size - level + pick // siblings if depth > 1 else torch.full_like(pick, NO_PARENT)
        node = places.flatten(1).gather(1, pick)
        log_probs = forest.look_behind(drawn.flatten(1).gather(1, pick), above)
    return tree.proposal(limit)


class _DrawnTree:
    """Collect the guesses of a batch, another number of them in every row."""

    def __init__(self, root: Tensor, nodes: int, log_probs: Tensor) -> None:
        self.used = torch.zeros_like(root)  # guesses of each row
        self._spill = nodes + 1  # the number of one column more than a tree has, for what is in none
        self._tokens = root[:, None].repeat(1, nodes + 2)
        self._parents = torch.full_like(self._tokens, ABSENT)
        self._parents[:, 0] = NO_PARENT
        self._q = log_probs.new_zeros((len(root), nodes + 2, log_probs.shape[-1]))

    def add(self, node: Tensor, log_probs: Tensor, drawn: Tensor, counts: Tensor) -> Tensor:
        """Give ``node`` (batch, n) the first ``counts`` (batch, n) of the children ``drawn`` (batch, n, siblings).

        They were drawn from ``log_probs`` (batch, n, vocabulary). Return their numbers, -1 for those that are not
        taken; a ``node`` of -1 is none either.
        """
        possible = log_probs.gather(2, drawn) > -torch.inf
        taken = possible & (torch.arange(drawn.shape[2], device=drawn.device) < counts[:, :, None])
        number = (self.used[:, None] + taken.flatten(1).cumsum(1)).view(taken.shape)
        column = number.masked_fill(~taken, self._spill).flatten(1)
        node = node.masked_fill(node < 0, self._spill)[:, :, None]
        self._tokens.scatter_(1, column, drawn.flatten(1))
        self._parents.scatter_(1, column, node.expand_as(drawn).flatten(1))
        self._q.scatter_(1, node.expand_as(log_probs), log_probs.exp())
        self.used = self.used + taken.flatten(1).sum(1)
        return number.masked_fill(~taken, -1)

    def proposal(self, depth: int) -> Proposal:
        """Return what was collected, at most ``depth`` deep."""
        return Proposal(self._tokens[:, :-1], self._parents[:, :-1], depth, self._q[:, :-1])


def _plan(promise: Tensor, before: Tensor, left: Tensor, first: Tensor, below: Tensor) -> Tensor:
    """Say how many children each node of a level gets, (batch, n), while ``left`` (batch,) guesses may still be drawn.

    Below every node a tree is imagined, of guesses with the ranks ``first`` and the shares ``below``. Of all guesses
    in these trees the best ones fill up what is left; those among them that are children of the level's own nodes are
    to be drawn now. ``promise`` (batch, n) is that of the nodes, ``before`` (batch, n, siblings) that of a child whose
    parent is accepted, before the child is drawn.
    """
    worth = (promise[:, :, None] * before[:, :, first] * below).flatten(1)  # (batch, n * imagined)
    order = worth.sort(dim=1, descending=True, stable=True).indices
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    chosen = (torch.zeros_like(order).scatter(1, order, place) < left[:, None]) & (worth > 0)
    return (chosen.view(*promise.shape, -1) & (below == 1)).sum(2)


@functools.lru_cache(maxsize=64)
def _imagined(siblings: int, nodes: int, depth: int) -> tuple[tuple[int, float], ...]:
    """List the best ``nodes`` guesses of an average tree, at most ``depth`` deep.

    Of each: the rank among its siblings of the child of the root that it stands behind, or is, and how much of that
    child's promise is left there; 1 for the child itself.
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
    return tuple(found)


def _before(log_probs: Tensor, plan: Plan) -> Tensor:
    """Promise children before they are drawn from ``log_probs`` (..., vocabulary): (..., siblings).

    What is drawn from q has itself a probability of sum(q^2) on average.
    """
    accepted = plan.average.to(log_probs.dtype).repeat(*log_probs.shape[:-1], 1)
    accepted[..., 0] = LEAST[0] + (1 - LEAST[0]) * SHARE[0] * (2 * log_probs).exp().sum(-1)
    return _in_turn(accepted)


def _after(drawn: Tensor, plan: Plan) -> Tensor:
    """Promise children whose probabilities ``drawn`` (..., siblings) are known, if their parent is accepted."""
    left = 1 - (drawn.cumsum(-1) - drawn)  # for drawn ones leave the distribution
    own = (drawn / left.clamp(min=1e-6)).clamp(max=1)
    return _in_turn(plan.least + (1 - plan.least) * plan.share * own)


def _in_turn(accepted: Tensor) -> Tensor:
    """Turn how probably each sibling (..., siblings) is accepted in its turn into how probably it is the one."""
    passed = (1 - accepted).cumprod(-1)
    return torch.cat([torch.ones_like(passed[..., :1]), passed[..., :-1]], dim=-1) * accepted
