"""Grow a proposal depth by depth: chains, static trees, dynamic trees, trees drawn without replacement.

A drafter that steps through its own model (vanilla, EAGLE, MTP) brings one function, ``Step``; which tokens to
propose and which to expand is decided here, in the same way for all of them.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..device_tensors import cached_arange, cached_full
from ..proposal import NO_PARENT, PAD_NODE, Proposal, tree_from_paths
from ..sampling import Shape, best, draw_distinct, likeliest, noise_for, noise_shapes, widest_float
from ..settings import SpeculationConfig
from .drawn_trees import Plan, grow_drawn, plan_drawn
from .frontier import Step, TreeFrontier

# The probability that the next token of each chain is accepted, (batch,), as the last step saw it.
Confidence = Callable[[], Tensor]


@dataclass(frozen=True)
class PreparedDraft:
    """What is made before a proposal that is one graph: in there, no random number is drawn and nothing uploaded.

    ``layout`` is that of a static tree, ``plan`` that of a drawn one, ``noise`` what each level draws with.
    """

    layout: tuple[list[int], list[_Level]] | None
    plan: Plan | None
    noise: list[Tensor]

    @classmethod
    def of(
        cls,
        config: SpeculationConfig,
        depth: int,
        drawn: int,
        rows: int,
        vocabulary: int,
        sample: bool,
        device: torch.device,
    ) -> PreparedDraft:
        """Prepare a proposal ``depth`` deep for ``rows`` rows, of which the levels up to ``drawn`` are wanted.

        The random numbers are those that ``grow`` would draw itself, in the same order.
        """
        layout, plan = None, None
        draws: Sequence[tuple[Shape, int]]
        if config.tree == "dynamic" and sample:
            plan = plan_drawn(config.tree_topk, config.num_tree_tokens, depth, vocabulary, device)
            draws = [((rows, level.width), level.children) for level in plan.levels]
        elif config.tree is None or config.tree == "dynamic":
            draws = [((rows,), 1)] * depth
        else:
            layout = _lay_out(_paths(config, depth, sample), device)
            draws = [((rows, len(level.nodes)), level.most) for level in layout[1]]
        shapes = noise_shapes(draws, vocabulary, device) if sample else []
        unused = [torch.zeros(shape, dtype=widest_float(device), device=device) for shape in shapes[drawn:]]
        return cls(layout, plan, noise_for(shapes[:drawn], vocabulary, device) + unused)

    def for_rows(self, rows: Tensor) -> PreparedDraft:
        """Give each row of a padded batch the random numbers of the row that it copies, ``rows`` (batch,)."""
        return replace(self, noise=[one.index_select(0, rows) for one in self.noise])


def max_expanded_nodes(config: SpeculationConfig, depth: int) -> int:
    """Return how many nodes a draft expands at most while a proposal of this depth grows."""
    if isinstance(config.tree, str | None):
        width = 1 if config.tree is None else max(config.tree_topk, 1)
        return depth * width if config.tree != "sampled" else config.num_tree_tokens
    return len(tree_from_paths(config.tree)[0])


def _paths(config: SpeculationConfig, limit: int, sample: bool) -> tuple[tuple[int, ...], ...]:
    """List the paths of a static tree of at most ``limit`` levels."""
    paths: list[tuple[int, ...]]
    if config.tree == "sampled":
        paths = bushy(config.tree_topk, config.num_tree_tokens, limit)
    else:
        paths = [tuple(path[:limit]) for path in config.tree or ()]  # type: ignore[arg-type]  # no word is left
    return tuple(_without_gaps(paths) if sample else paths)


def at_depth(by_depth: Tensor, tokens: Tensor, depth: int, *_: object) -> Tensor:
    """Pick from ``by_depth`` (batch, depths, width) what stands at the depth of the new nodes, as a ``Step`` does.

    For drafts that say at once what follows at each depth, whatever the draft tokens before: (batch, new, width).
    """
    return by_depth[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)


def grow_at_once(
    root: Tensor, by_depth: Tensor, config: SpeculationConfig, limit: int, sample: bool, prepared: PreparedDraft | None
) -> Proposal:
    """Grow a proposal from log-probabilities ``by_depth`` (batch, depths, vocabulary); see ``grow``."""
    return grow(root, by_depth[:, 0], functools.partial(at_depth, by_depth), config, limit, sample, prepared=prepared)


def grow(
    root: Tensor,
    log_probs: Tensor,
    step: Step,
    config: SpeculationConfig,
    limit: int,
    sample: bool,
    confidence: Confidence | None = None,
    prepared: PreparedDraft | None = None,
    keep_drafting: Callable[[Tensor], bool] | None = None,
) -> Proposal:
    """Grow the kind of proposal that ``config`` asks for.

    ``root`` (batch,) is the last token of the text, ``log_probs`` (batch, vocabulary) say what follows it; ``limit``
    bounds the depth; ``sample`` samples the draft tokens instead of taking the best ones. ``confidence`` of a draft
    that predicts its own acceptance ends chains, instead of the probability of their tokens. ``prepared`` is what was
    made for a proposal as deep as ``limit``, if it is to be a graph. Outside of graphs ``keep_drafting`` may end
    chains: it gets the draft's top-1 probability after each token, (batch,).
    """
    if limit == 0:
        return Proposal.nothing(root)
    if keep_drafting is not None and config.tree is None:
        return _chain_while(root, log_probs, step, limit, sample, keep_drafting)
    in_graph = prepared is not None
    if prepared is None:
        prepared = PreparedDraft.of(config, limit, limit, len(root), log_probs.shape[-1], sample, root.device)
    if prepared.plan is not None:
        return grow_drawn(root, log_probs, step, prepared.plan, iter(prepared.noise))
    if prepared.layout is not None:
        return _static(root, log_probs, step, prepared.layout, prepared.noise)
    if config.tree is None:
        return _chain(root, log_probs, step, limit, prepared.noise, config.confidence_threshold, confidence, in_graph)
    return _dynamic(root, log_probs, step, limit, config.tree_topk, config.num_tree_tokens)


def _chain(
    root: Tensor,
    log_probs: Tensor,
    step: Step,
    limit: int,
    noise: list[Tensor],
    confidence_threshold: float,
    confidence: Confidence | None,
    in_graph: bool,
) -> Proposal:
    draft_tokens: list[Tensor] = []
    by_depth: list[Tensor] = []
    least = math.log(confidence_threshold) if confidence_threshold > 0 else None
    counts = cached_full(0, len(root), root.device)
    going = counts == 0 if least is not None else counts
    for depth in range(limit):
        if depth:
            log_probs = step(draft_tokens[-1][:, None], depth, None, None)[:, 0]
        if least is not None and confidence is not None:  # asked before the token is sampled: it must not depend on it
            going = going & (confidence() >= confidence_threshold)
            if not in_graph and not bool(going.any()):
                break
        token = draw_distinct(log_probs, 1, noise[depth])[:, 0] if noise else likeliest(log_probs)
        draft_tokens.append(token)
        by_depth.append(log_probs)
        if least is None:
            continue
        counts = counts + going
        if confidence is None:  # asked after the token is taken: it decides about the next one
            going = going & (log_probs.gather(1, token[:, None])[:, 0] >= least)
            if not in_graph and not bool(going.any()):
                break
    if not draft_tokens:
        return Proposal.nothing(root)
    q = torch.stack(by_depth, dim=1).exp_() if noise else None  # (batch, k, vocabulary)
    return Proposal.path(torch.stack([root, *draft_tokens], dim=1), None if least is None else counts, q)


def _chain_while(
    root: Tensor,
    log_probs: Tensor,
    step: Step,
    limit: int,
    sample: bool,
    keep_drafting: Callable[[Tensor], bool],
) -> Proposal:
    """Grow chains of one length, as long as ``keep_drafting`` asks for another token."""
    draft_tokens: list[Tensor] = []
    by_depth: list[Tensor] = []
    while True:
        draft_tokens.append(draw_distinct(log_probs, 1)[:, 0] if sample else likeliest(log_probs))
        by_depth.append(log_probs)
        if len(draft_tokens) == limit or not keep_drafting(_peak(log_probs)):
            break
        log_probs = step(draft_tokens[-1][:, None], len(draft_tokens), None, None)[:, 0]
    q = torch.stack(by_depth, dim=1).exp_() if sample else None  # (batch, k, vocabulary)
    return Proposal.path(torch.stack([root, *draft_tokens], dim=1), None, q)


def _peak(scores: Tensor) -> Tensor:
    """Return how probable the best token of each row is, (batch,), by ``scores`` (batch, vocabulary) of any sum."""
    scores = scores.float()
    return (scores.amax(-1) - scores.logsumexp(-1)).exp()


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth of a static tree that have children, and these children."""

    nodes: Tensor  # (n,)
    above: Tensor | None  # (n,) of each one's parent among the nodes of the level before; None for the root
    children: Tensor  # (m,)
    place: Tensor  # (m,) of each child's parent among ``nodes``
    rank: Tensor  # (m,)
    most: int  # ranks that some child has


@functools.lru_cache(maxsize=64)
def _lay_out(paths: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[list[int], list[_Level]]:
    """Return the parents of a static tree and its levels: once, because every upload makes an accelerator wait."""
    parents, ranks = tree_from_paths(paths)
    children: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    level, above, levels = [0], None, []  # only nodes with children are expanded
    put = functools.partial(torch.tensor, device=device)
    while level:
        below = [(place, child) for place, node in enumerate(level) for child in children[node]]
        place, child, rank = zip(*((place, child, ranks[child]) for place, child in below), strict=True)
        levels.append(_Level(put(level), above, put(child), put(place), put(rank), max(rank) + 1))
        level = [child for _, child in below if child in children]
        # The root is text, so that its children have no parent among the expanded nodes.
        above = put([place for place, child in below if child in children]) if len(levels) > 1 else None
    return parents, levels


def _static(
    root: Tensor,
    log_probs: Tensor,
    step: Step,
    layout: tuple[list[int], list[_Level]],
    noise: list[Tensor],
) -> Proposal:
    """Fill a tree of fixed shape. Rank r is the r-th best child, or the r-th child drawn without replacement."""
    parents, levels = layout
    tree = TreeFrontier(step)
    tokens = root[:, None].repeat(1, len(parents))  # (batch, nodes)
    above = torch.full_like(tokens, NO_PARENT)
    q = log_probs.new_zeros((len(root), max(parents) + 1, log_probs.shape[-1])) if noise else None
    log_probs = log_probs[:, None]
    for depth, level in enumerate(levels):
        if depth:
            places = None if level.above is None else level.above.expand(len(root), -1)
            log_probs = tree.expand(tokens[:, level.nodes], places)
        if q is not None:
            q[:, level.nodes] = log_probs.exp()
        drawn = draw_distinct(log_probs, level.most, noise[depth]) if noise else None
        ordered = best(log_probs, level.most) if drawn is None else drawn  # (batch, n, most)
        rank = level.rank.clamp(max=ordered.shape[2] - 1)  # a vocabulary may be tiny
        possible = (log_probs.gather(2, ordered) > -torch.inf)[:, level.place, rank] & (rank == level.rank)
        parent = level.nodes[level.place]
        tokens[:, level.children] = ordered[:, level.place, rank]
        above[:, level.children] = torch.where(possible & (above[:, parent] != PAD_NODE), parent, PAD_NODE)
    return Proposal(tokens, above, len(levels), q, shape=tuple(parents))


def _dynamic(root: Tensor, log_probs: Tensor, step: Step, limit: int, top_k: int, nodes: int) -> Proposal:
    """Grow the tree of the most probable texts: EAGLE-2 (arXiv 2406.16858), sections 4.1 and 4.2.

    At each depth the ``top_k`` most probable paths are followed, each by its ``top_k`` best tokens; of all candidates
    the ``nodes`` on the most probable paths are kept, in the order in which they were made.
    """
    top_k = min(top_k, nodes, log_probs.shape[-1])  # after a path that as many beat, none is kept
    tree = TreeFrontier(step)
    score, token = log_probs.topk(top_k)  # (batch, k) cumulative log-probability of the frontier
    frontier = torch.arange(top_k, device=root.device).expand_as(token)  # its indices among all candidates
    above: Tensor | None = None  # places of its parents in the frontier before
    all_tokens, all_scores, all_parents = [token], [score], [torch.full_like(token, NO_PARENT)]
    for depth in range(1, limit):
        log_probs = tree.expand(token, above)  # (batch, k, vocabulary)
        best_log_probs, best_tokens = log_probs.topk(top_k)  # (batch, k, k)
        scores = best_log_probs + score[:, :, None]
        all_tokens.append(best_tokens.flatten(1))
        all_scores.append(scores.flatten(1))
        all_parents.append(frontier.repeat_interleave(top_k, dim=1))
        score, pick = scores.flatten(1).topk(top_k)
        token = best_tokens.flatten(1).gather(1, pick)
        frontier = top_k + (depth - 1) * top_k**2 + pick
        above = pick // top_k
    tokens, scores, parents = (torch.cat(part, dim=1) for part in (all_tokens, all_scores, all_parents))
    return _keep_best(root, tokens, scores, parents, nodes, limit)


def _keep_best(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int, depth: int) -> Proposal:
    """Keep the best ``nodes`` of all candidates (batch, candidates); they are a tree.

    A path never becomes more probable by getting longer, so a parent scores at least as much as its child. A child of
    probability 1 ties with its parent; the stable sort keeps the parent first.
    """
    nodes = min(nodes, tokens.shape[1])
    order = scores.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, :nodes].sort(dim=1).values  # (batch, nodes)
    place = torch.zeros_like(tokens).scatter(1, kept, cached_arange(nodes, root.device, 1).expand_as(kept))
    above = parents.gather(1, kept)
    above = place.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0)
    above = above.masked_fill(scores.gather(1, kept) == -torch.inf, PAD_NODE)
    top = torch.full_like(root, NO_PARENT)[:, None]
    return Proposal(torch.cat([root[:, None], tokens.gather(1, kept)], 1), torch.cat([top, above], 1), depth)


def bushy(width: int, nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Spend at most ``nodes`` draft tokens on a fixed tree of ``depth`` levels, at most ``width`` children each.

    Early tokens decide whether later ones matter. So paths are taken by expected acceptance, where
    each further rank counts half as much.
    """
    # (cost, path), cheapest first; a path costs the sum of its ranks and a little for its length
    promise: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
    taken: list[tuple[int, ...]] = []
    while promise and len(taken) < nodes:
        cost, path = heapq.heappop(promise)
        taken.append(path)
        if path[-1] + 1 < width:
            heapq.heappush(promise, (cost + 1.0, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(promise, (cost + 0.5, (*path, 0)))
    return taken


def _without_gaps(paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Number the children of each node 0, 1, 2, ...: drawn siblings are verified in the order they were drawn."""
    parents, _ = tree_from_paths(paths)
    names: list[tuple[int, ...]] = [()]
    seen: dict[int, int] = defaultdict(int)
    for parent in parents[1:]:
        names.append((*names[parent], seen[parent]))
        seen[parent] += 1
    return names[1:]
