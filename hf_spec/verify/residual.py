"""Acceptance probabilities of sampled draft tokens, and the residual distributions after a rejection.

A rejected child takes ``q`` out of ``p``, and itself out of ``q``, since siblings are sampled without replacement. So
every acceptance probability is known before the first random number is drawn. Nothing here waits for the accelerator,
unless for the shape of a sampled tree that nobody else knows.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..device_tensors import cached_arange, to_device
from ..proposal import Proposal
from ..sampling import IN_PARTS_FROM, running_sums, widest_float

RESIDUAL_EPS = 1e-30  # share of p that a residual keeps: far below what rounding changes

# Maps nodes (batch,) to the distributions that the next token is sampled from there, (batch, vocabulary) of any sum.
Residual = Callable[[Tensor], Tensor]


def acceptance_probs(proposal: Proposal, p: Tensor, joint: bool) -> tuple[Tensor, Residual]:
    """Return each node's acceptance probability (batch, nodes), and the residual distribution after it.

    ``joint`` makes it the probability of the whole path to the node, for block verification, instead of the node's
    alone. A draft token to which ``q`` gives no mass, a repeated sibling for example, was not sampled: it is rejected.
    """
    if proposal.q is None:
        raise ValueError("these draft tokens were not sampled from a q; verify them with verify_target_samples()")
    if proposal.q.shape[2] != p.shape[2]:
        raise ValueError(
            f"draft tokens were sampled from a q over {proposal.q.shape[2]} tokens, and the target's logits are over "
            f"{p.shape[2]}; make q (rows, parents, {p.shape[2]}), with 0 for tokens that the draft does not know."
        )
    large = p.device.type == "cpu" and p.numel() >= IN_PARTS_FROM and not torch.compiler.is_compiling()
    chain_probs = _large_chain_probs if large else _chain_probs
    return (chain_probs if proposal.is_chain else _tree_probs)(proposal, p, proposal.q, joint)


def _tree_probs(proposal: Proposal, p: Tensor, q: Tensor, joint: bool) -> tuple[Tensor, Residual]:
    """Process siblings in order. The outcomes at a node are all tokens, and "this node is rejected".

    Let w be the probability that the path to a node is accepted. A rejected child leaves max(w p - q, 0) of the tokens
    and 1 - w of the last outcome, and both are divided by their sum. Source: arXiv 2505.12398.
    """
    tokens, proposed = proposal.tokens[:, 1:], _with_points(proposal, _without_earlier_siblings(proposal, q))
    probability, not_sampled = _sampled_probs(proposed, tokens, proposal.present[:, 1:])
    proposed = proposed.masked_fill(not_sampled[..., None], 0)
    outcomes, proposed = functional.pad(p, (0, 1)), functional.pad(proposed, (0, 1))  # (batch, nodes, vocab + 1)
    rejected = functional.pad(p.new_zeros(p.shape[-1]), (0, 1), value=1.0)  # the last outcome alone
    accept = p.new_zeros(p.shape[:2])  # (batch, nodes)
    row, parent, child, sizes = _turns(proposal)
    # What turns read is put into their order at once, (..., draft tokens) or (..., draft tokens, vocab + 1).
    number = child - 1  # among the draft tokens
    proposed, after = proposed[row, number].split(sizes, dim=-2), outcomes[row, child].split(sizes, dim=-2)
    token, probability = (x[row, number].split(sizes, dim=-1) for x in (tokens, probability))
    rows = [row] * len(sizes) if row.dim() == 2 else row.split(sizes)
    for turn, (at, over, under) in enumerate(zip(rows, parent.split(sizes, dim=-1), child.split(sizes), strict=True)):
        weights = outcomes[at, over]
        own = _ratio(weights, token[turn], probability[turn]).clamp_(max=1)
        rest = _rest(weights, proposed[turn])
        outcomes[at, over] = rest / rest.sum(-1, keepdim=True)
        if joint:
            outcomes[at, under] = torch.lerp(rejected, after[turn], own[..., None])
        else:
            accept[at, under] = own
    every = cached_arange(len(outcomes), p.device)
    return (1 - outcomes[..., -1] if joint else accept), lambda node: outcomes[every, node, :-1]


def _without_earlier_siblings(proposal: Proposal, q: Tensor) -> Tensor:
    """Return what each draft token was sampled from, (batch, nodes - 1, vocab): ``q`` without its earlier siblings."""
    parents, tokens = proposal.parents[:, 1:], proposal.tokens[:, 1:]
    row = cached_arange(len(parents), q.device)
    left = q[row[:, None], parents.clamp(min=0)]
    stays = ~proposal.earlier_siblings[:, 1:, 1:]  # (batch, draft token, other draft token)
    if proposal.deterministic is not None:
        stays = stays | proposal.deterministic[:, None, 1:]
    most = torch.zeros_like(stays, dtype=q.dtype).masked_fill_(stays, torch.inf)
    left.scatter_reduce_(2, tokens[:, None].expand(stays.shape), most, "amin")  # "prod" is refused if deterministic
    return left.div_(left.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny))


def _turns(proposal: Proposal) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """List the draft tokens by turns: indices of rows, of parents and of nodes, and the size of each turn.

    A draft token has its turn after its parent and its earlier siblings, so that parents differ within one turn. There
    are few turns even where there are many nodes, and on an accelerator the number of operations counts. Rows are
    (batch, 1) where all have the same shape, and in a graph, where parents are (batch, draft tokens).
    """
    device = proposal.tokens.device
    if proposal.shape is not None:
        order = _order if torch.compiler.is_compiling() else _known_order
        parent, child, sizes = order(proposal.shape, device)
        return cached_arange(len(proposal.tokens), device)[:, None], parent, child, sizes
    if torch.compiler.is_compiling():  # a graph cannot ask how many turns there are: each draft token has its own
        parent = proposal.parents[:, 1:].clamp(min=0)  # an PAD_NODE one, sampled from nothing, takes nothing out of p
        count = parent.shape[1]
        return cached_arange(len(parent), device)[:, None], parent, cached_arange(count, device, 1), [1] * count
    turns: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, parents in enumerate(proposal.parents.tolist()):
        for turn, above, node in _in_turn(parents):
            turns[turn].append((number, above, node))
    together = to_device([one for turn in sorted(turns) for one in turns[turn]], device)  # one upload
    row, parent, child = together.long().view(-1, 3).unbind(1)
    return row, parent, child, [len(turns[turn]) for turn in sorted(turns)]


def _order(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    order = sorted(_in_turn(shape), key=lambda one: one[0])
    together = torch.tensor([node for _, *node in order], device=device, dtype=torch.long).view(-1, 2)
    parent, child = together.unbind(1)
    return parent, child, list(Counter(turn for turn, _, _ in order).values())


_known_order = functools.lru_cache(maxsize=64)(_order)


def _in_turn(parents: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield turn, parent and number of every node that has a parent."""
    last = [0] * len(parents)  # the turn of each node, then of its latest child
    for node, parent in enumerate(parents):
        if parent >= 0:
            last[node] = last[parent] = last[parent] + 1
            yield last[node], parent, node


def _chain_probs(proposal: Proposal, p: Tensor, q: Tensor, joint: bool) -> tuple[Tensor, Residual]:
    """Do as ``_tree_probs`` for all draft tokens at once: four times faster where the vocabulary is small.

    Let w be the probability that the path to a node is accepted, and the mass what a rejected child leaves of w p.
    Then mass / (mass + 1 - w) is the h of Algorithm 2 in arXiv 2403.10444.
    """
    tokens, q = proposal.tokens[:, 1:], _with_points(proposal, q)
    probability, not_sampled = _sampled_probs(q, tokens, None if proposal.is_unpadded else proposal.present[:, 1:])
    weights, proposed = p[:, :-1], q.masked_fill(not_sampled[..., None], 0)
    ratio = _ratio(weights, tokens, probability)  # (batch, draft tokens)
    if joint:
        reach = _least_products(ratio)  # (batch, nodes)
        before = reach[:, :-1]
        rest = _rest(weights * before[..., None], proposed)
        mass = rest.sum(-1)
        accept = torch.cat([mass / (mass + (1 - before)), reach[:, -1:]], dim=1)
    else:
        rest = _rest(weights, proposed)
        accept = functional.pad(ratio.clamp(max=1), (1, 0), value=1.0)
    left, row = torch.cat([rest, p[:, -1:]], dim=1), cached_arange(len(p), p.device)
    return accept, lambda node: left[row, node]


def _large_chain_probs(proposal: Proposal, p: Tensor, q: Tensor, joint: bool) -> tuple[Tensor, Residual]:
    """Do as ``_chain_probs`` with one new tensor as large as ``p`` instead of six: a CPU takes its time to get memory.

    The residual is worked out after the last accepted node alone, in a dozen more operators.
    """
    tokens, q = proposal.tokens[:, 1:], _with_points(proposal, q)
    probability, not_sampled = _sampled_probs(q, tokens, None if proposal.is_unpadded else proposal.present[:, 1:])
    ratio = _ratio(p[:, :-1], tokens, probability)  # (batch, draft tokens)
    if joint:
        reach = _least_products(ratio)  # (batch, nodes)
        before = reach[:, :-1]
        mass = (p[:, :-1] * before[..., None]).sub_(q).clamp_(min=0).sum(-1).add_(before, alpha=RESIDUAL_EPS)
        mass = torch.where(not_sampled, before, mass)
        accept = torch.cat([mass / (mass + (1 - before)), reach[:, -1:]], dim=1)
    else:
        accept = functional.pad(ratio.clamp(max=1), (1, 0), value=1.0)
        reach = torch.ones_like(accept)
    not_sampled = functional.pad(not_sampled, (0, 1), value=True)  # after the last node there is no draft token

    def residual(node: Tensor) -> Tensor:
        row = cached_arange(len(node), node.device)
        if q.shape[1] == 0:
            return p[:, 0]
        proposed = q[row, node.clamp(max=q.shape[1] - 1)].masked_fill(not_sampled[row, node, None], 0)
        return _rest(p[row, node] * reach[row, node, None], proposed)

    return accept, residual


def _least_products(ratios: Tensor) -> Tensor:
    """Return the probability that the path to each node is accepted, min(1, ratio * that before): (batch, nodes).

    It is the smallest product of the last 0, 1, 2, ... ``ratios`` (batch, draft tokens), worked out in logarithms.
    """
    sums = functional.pad(running_sums(ratios.log(), widest_float(ratios.device)), (1, 0))
    return (sums - sums.cummax(1).values).exp().to(ratios.dtype)


def _with_points(proposal: Proposal, q: Tensor) -> Tensor:
    """Return ``q`` (batch, draft tokens, vocab) of each draft token, a point mass for deterministic ones."""
    if proposal.deterministic is None:
        return q
    points = torch.zeros_like(q).scatter_(-1, proposal.tokens[:, 1:, None], 1)
    return torch.where(proposal.deterministic[:, 1:, None], points, q)


def _sampled_probs(q: Tensor, token: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q of each ``token`` (...), infinity for one that was not sampled, and which were not; both (...).

    ``q`` (..., vocab) is what it was sampled from. ``present`` is None if all nodes are.
    """
    probability = q.gather(-1, token[..., None])[..., 0]
    sampled = probability > torch.finfo(q.dtype).tiny  # p / q of anything smaller could overflow; a nan is none
    if present is not None:
        sampled = sampled & present
    return probability.masked_fill_(not_sampled := ~sampled, torch.inf), not_sampled


def _ratio(weights: Tensor, token: Tensor, probability: Tensor) -> Tensor:
    """Return the weight of ``token`` (...) among ``weights`` (..., vocab), divided by its ``probability`` (...)."""
    return weights.gather(-1, token[..., None])[..., 0] / probability


def _rest(weights: Tensor, proposed: Tensor) -> Tensor:
    """Take a rejected child, sampled from ``proposed``, out of its parent's ``weights``, both (..., vocab)."""
    # Where p = q nothing is left, or what rounding leaves. The next token is sampled from p then: a trace of p stays.
    return torch.maximum(weights - proposed, weights * RESIDUAL_EPS)
