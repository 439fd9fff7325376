"""The lossless rules: which guesses become text and which token follows, so that the distribution is the target's.

The exceptions are ``accept_typical`` and ``accept_near_best``, which the user has to ask for by name.

``p`` (batch, nodes, vocabulary) float32 is the target's distribution after the user's processors; ``p[:, i]`` is the
distribution of the token after node i. ``q`` is the distribution the guesses were drawn from. Chosen guesses (no
``q``) are only looked up: ``follow``. Drawn ones are weighed: ``reject`` goes from the root to the leaves,
``traverse`` back from the leaves.

Both weigh siblings alike: a rejected child takes ``q`` out of ``p``, and itself out of ``q``, for children are drawn
without replacement. So every acceptance probability is known before the first coin is thrown, and a rule is a table of
them, one coin per node, and one walk from the root. Nothing here waits for the accelerator, unless for the shape of a
drawn tree that nobody else knows.

A drafter may end a branch or leave out a child because of earlier draws, but must not drop a guess once it is drawn.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proposal import Proposal
from ..sampling import draw, widest_float
from ..settings import SpeculationConfig


@dataclass(frozen=True)
class Verdict:
    """Hold the accepted path and the emitted tokens of every row.

    ``path`` (batch, max_depth + 1) are the accepted nodes, the root first; columns beyond them repeat the last one.
    ``tokens`` (batch, max_depth + 1): ``tokens[:, j]`` is the token emitted after node ``path[:, j]``. ``counts``
    (batch,) of them count: the accepted guesses and one more token; columns beyond repeat that one.
    """

    path: Tensor
    tokens: Tensor
    counts: Tensor


def follow(proposal: Proposal, choose: Callable[[Tensor], Tensor]) -> Verdict:
    """Take the target's own token after each node for as long as it was guessed.

    ``choose`` maps nodes (batch,) to the tokens after them (batch,) and is called ``max_depth + 1`` times. Lossless
    for guesses of any origin, and the only rule for those that were not drawn.
    """
    node = torch.zeros_like(proposal.root)
    token = choose(node)
    for _ in range(proposal.max_depth):
        child = proposal.child(node, token)
        guessed = child >= 0  # a row that stops keeps node and token, so it stays stopped
        node = torch.where(guessed, child, node)
        token = torch.where(guessed, choose(node), token)
    return _verdict(proposal, node, token)


def match(proposal: Proposal, picks: Tensor) -> Verdict:
    """Do as ``follow`` where the target's token after every node, ``picks`` (batch, nodes), is known beforehand."""
    if not proposal.is_chain:
        return follow(proposal, lambda node: picks.gather(1, node[:, None])[:, 0])
    guessed = (proposal.tokens[:, 1:] == picks[:, :-1]) & proposal.present[:, 1:]
    accepted = guessed.cumprod(1).sum(1, keepdim=True)  # (batch, 1)
    path = torch.arange(picks.shape[1], device=picks.device).minimum(accepted)
    return Verdict(path, picks.gather(1, path), accepted[:, 0] + 1)


def reject(proposal: Proposal, p: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Decide guess by guess from the root on: accept a child, or go on to its next sibling with what is left of ``p``.

    On chains this is speculative sampling (arXiv 2211.17192, 2302.01318); on trees, recursive rejection sampling of
    children drawn without replacement.
    """
    accept, distributions = _weigh(proposal, p, carry=False)
    return _walk(proposal, _coins(accept, generator) < accept, distributions, generator)


def traverse(proposal: Proposal, p: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Decide path by path from the leaves on: accept the path to a node as a whole, or try the next one.

    Traversal verification (arXiv 2505.12398); on chains it equals block verification (arXiv 2403.10444). It accepts
    longer paths than ``reject`` on average.
    """
    accept, distributions = _weigh(proposal, p, carry=True)
    accepted = _coins(accept, generator) < accept
    leads_there = (proposal.ancestors & accepted[:, :, None]).any(dim=1)  # (batch, nodes)
    return _walk(proposal, leads_there, distributions, generator)


def accept_typical(proposal: Proposal, p: Tensor, config: SpeculationConfig, sample: bool = True) -> Verdict:
    """Accept the longest path of guesses that are typical of the target, and emit its best token. NOT lossless.

    A guess is typical if p(guess) > min(``typical_threshold``, ``typical_alpha`` * exp(-entropy of p)); of paths
    equally long the most probable one is taken. Nothing is drawn, though it is for sampling alone. Source: Medusa
    (arXiv 2401.10774, section 3.3.1), its code for the 1e-5.
    """
    rows = torch.arange(p.shape[0], device=p.device)
    entropy = -(p * (p + 1e-5).log()).sum(-1)  # (batch, nodes)
    least = (config.typical_alpha * (-entropy).exp()).clamp(max=config.typical_threshold)
    weight, above = _weights(proposal, p)
    node = _longest_path(proposal, weight, weight > least.gather(1, above))
    return _verdict(proposal, node, p[rows, node].argmax(-1))


def accept_near_best(proposal: Proposal, p: Tensor, config: SpeculationConfig, sample: bool) -> Verdict:
    """Accept the longest path of guesses that are nearly the target's best, and emit its own next token. NOT lossless.

    A guess is near the best if fewer than ``accept_k`` tokens are more probable, or if the most probable one is so by
    at most ``accept_tolerance``; never if p(guess) = 0. Of paths equally long the most probable one is taken. Source:
    ``verifier_accept_k`` and ``accept_tolerance`` of the speculators library.
    """
    weight, above = _weights(proposal, p)
    rows = torch.arange(p.shape[0], device=p.device)
    behind = p[rows[:, None], above]  # (batch, nodes, vocabulary) what follows each node's parent
    token = torch.arange(p.shape[-1], device=p.device)
    equal_before = (behind == weight[:, :, None]) & (token < proposal.tokens[:, :, None])  # argmax takes the first
    rank = ((behind > weight[:, :, None]) | equal_before).sum(-1)  # (batch, nodes)
    near = rank < (config.accept_k or 1)
    if config.accept_tolerance:
        near = near | (behind.amax(-1) - weight <= config.accept_tolerance)
    node = _longest_path(proposal, weight, near & (weight > 0))
    return _verdict(proposal, node, draw(p[rows, node]) if sample else p[rows, node].argmax(-1))


def _weights(proposal: Proposal, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return p of each guess and the number of its parent, both (batch, nodes); the root stands in for its own."""
    above = proposal.parents.clamp(min=0)
    return p[torch.arange(p.shape[0], device=p.device)[:, None], above, proposal.tokens], above


def _longest_path(proposal: Proposal, weight: Tensor, accepted: Tensor) -> Tensor:
    """Return the node (batch,) where the longest path of ``accepted`` (batch, nodes) guesses ends.

    Of equally long ones it is the most probable, by the ``weight`` (batch, nodes) of each guess.
    """
    rejected = ~accepted | ~proposal.present
    weight, rejected = weight.clone(), rejected.clone()
    weight[:, 0], rejected[:, 0] = 1, False  # the root is text
    reached = ~(proposal.ancestors & rejected[:, None]).any(-1)
    depth = proposal.depth.masked_fill(~reached, -1)
    likelihood = (proposal.ancestors * weight.log().clamp(min=torch.finfo(weight.dtype).min)[:, None]).sum(-1)
    longest = depth == depth.amax(1, keepdim=True)
    return likelihood.masked_fill(~longest, -torch.inf).argmax(1)


@dataclass(frozen=True)
class Rule:
    """How guesses are verified when sampling.

    ``weigh`` decides about guesses that were drawn, given p; chosen ones are looked up by ``follow``. ``accept`` is a
    lossy rule for guesses of any origin, with parameters from the config, and told whether to sample; where
    ``when_greedy``, it decides in greedy decoding too. A rule with neither emits token by token, with the random draws
    of plain ``generate``, and all rows advance together.
    """

    weigh: Callable[[Proposal, Tensor], Verdict] | None = None
    accept: Callable[[Proposal, Tensor, SpeculationConfig, bool], Verdict] | None = None
    when_greedy: bool = False


# By the names of SpeculationConfig.verification, and of SpeculationConfig.acceptance where that is not "lossless".
RULES: dict[str, Rule] = {
    "auto": Rule(weigh=traverse),
    "block": Rule(weigh=traverse),
    "token": Rule(weigh=reject),
    "exact": Rule(),
    "typical": Rule(accept=accept_typical),
    "near_best": Rule(accept=accept_near_best, when_greedy=True),
}


def rule_for(config: SpeculationConfig) -> Rule:
    """Return the rule that ``config`` asks for; a ValueError lists the known ones."""
    name = config.verification if config.acceptance == "lossless" else config.acceptance
    if name not in RULES:
        raise ValueError(f"no rule of verification is called {name!r}; there are {sorted(RULES)}")
    return RULES[name]


def _weigh(proposal: Proposal, p: Tensor, carry: bool) -> tuple[Tensor, Tensor]:
    """Return how probably each node is accepted once it is its turn (batch, nodes), and what is drawn from behind it.

    ``carry`` makes it the whole path to the node (traversal) instead of the node alone. A guess that ``q`` gives no
    mass, a repeated sibling for example, was not drawn: it is passed over.
    """
    if proposal.q is None:
        raise ValueError("these guesses were chosen, not drawn from a distribution q; verify them with follow()")
    return (_weigh_chain if proposal.is_chain else _weigh_tree)(proposal, p, proposal.q, carry)


def _weigh_tree(proposal: Proposal, p: Tensor, q: Tensor, carry: bool) -> tuple[Tensor, Tensor]:
    distributions, q = p.clone(), q.clone()  # what the next child is weighed against
    accept, reach = proposal.present.to(p.dtype), torch.ones_like(p[..., 0])  # (batch, nodes)
    for row, parent, child in _turns(proposal):
        token = proposal.tokens[row, child]
        chosen = None if proposal.chosen is None else proposal.chosen[row, child]
        distribution = _normalised(distributions[row, parent])  # (..., vocabulary)
        guess = _guess(q[row, parent], token, chosen)
        ratio, drawn = _ratio(distribution, guess, token, proposal.present[row, child])
        accept[row, child] = (reach[row, parent] * ratio).clamp(max=1)
        distributions[row, parent], reach[row, parent] = _take_out(reach[row, parent], distribution, guess, drawn)
        left = drawn if chosen is None else drawn & ~chosen
        q[row, parent, token] = torch.where(left, 0, q[row, parent, token])
        if carry:
            reach[row, child] = accept[row, child]
    return (reach if carry else accept), distributions


def _turns(proposal: Proposal) -> list[tuple[Tensor, ...]]:
    """Group the guesses by whose turn it is at the same time: indices of rows, of parents, which differ, and of nodes.

    A guess has its turn after its parent and its elder siblings. They are a handful of groups where there are many
    nodes, and each operation on an accelerator takes its time, however little it does.
    """
    if proposal.shape is not None:
        row = torch.arange(len(proposal.tokens), device=proposal.tokens.device)[:, None]
        return [(row, parent, child) for parent, child in _groups(proposal.shape, proposal.tokens.device)]
    turns: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row_number, parents in enumerate(proposal.parents.tolist()):
        for turn, parent_number, number in _in_turn(parents):
            turns[turn].append((row_number, parent_number, number))
    return [torch.tensor(turns[turn], device=proposal.tokens.device).unbind(1) for turn in sorted(turns)]


@functools.lru_cache(maxsize=64)
def _groups(shape: tuple[int, ...], device: torch.device) -> list[tuple[Tensor, ...]]:
    turns: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for turn, parent, number in _in_turn(shape):
        turns[turn].append((parent, number))
    return [torch.tensor(turns[turn], device=device).unbind(1) for turn in sorted(turns)]


def _in_turn(parents: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield turn, parent and number of every node that has a parent."""
    last = [0] * len(parents)  # the turn of each node, then of its latest child
    for node, parent in enumerate(parents):
        if parent >= 0:
            last[node] = last[parent] = last[parent] + 1
            yield last[node], parent, node


def _weigh_chain(proposal: Proposal, p: Tensor, q: Tensor, carry: bool) -> tuple[Tensor, Tensor]:
    """Do as ``_weigh_tree`` for all guesses at once: four times faster where the vocabulary is small."""
    tokens, chosen = proposal.tokens[:, 1:], None if proposal.chosen is None else proposal.chosen[:, 1:]
    distribution, guess = _normalised(p[:, :-1]), _guess(q, tokens, chosen)  # (batch, guesses, vocabulary)
    ratio, drawn = _ratio(distribution, guess, tokens, proposal.present[:, 1:])
    one = torch.ones_like(p[:, 0, 0])
    reach = [one]
    for step in ratio.unbind(1):
        reach.append(((reach[-1] if carry else one) * step).clamp(max=1))
    accept = torch.stack(reach, dim=1)  # (batch, nodes)
    before = accept[:, :-1] if carry else torch.ones_like(ratio)
    rest, after = _take_out(before, distribution, guess, drawn)
    distributions = torch.cat([rest, p[:, -1:]], dim=1)
    return (torch.cat([after, accept[:, -1:]], dim=1) if carry else accept), distributions


def _guess(q: Tensor, token: Tensor, chosen: Tensor | None) -> Tensor:
    """Return what ``token`` (...) was drawn from, (..., vocabulary): one that was ``chosen``, from a point mass."""
    guess = _normalised(q)
    if chosen is None:
        return guess
    point = torch.zeros_like(guess).scatter_(-1, token[..., None], 1)
    return torch.where(chosen[..., None], point, guess)


def _ratio(distribution: Tensor, guess: Tensor, token: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return p / q of ``token`` (...), 0 where it was not drawn, and whether it was."""
    weight = guess.gather(-1, token[..., None])[..., 0]
    drawn = present & (weight > torch.finfo(weight.dtype).tiny)  # p / q of anything smaller could overflow
    return torch.where(drawn, distribution.gather(-1, token[..., None])[..., 0] / weight, 0), drawn


def _take_out(before: Tensor, distribution: Tensor, guess: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return distribution and acceptance of a node that has lost a child which was ``drawn`` (...) from ``guess``.

    With p the ``distribution``, q the ``guess`` and w the acceptance ``before``: p' = norm(max(w p - q, 0)), not yet
    divided by its mass, and w' = mass / (mass + 1 - w). Source: arXiv 2505.12398; on a chain w' is the h of Algorithm
    2 in arXiv 2403.10444.
    """
    rest = (before[..., None] * distribution).sub_(guess).relu_()
    mass = rest.sum(-1)
    total = mass + (1 - before)
    after = torch.where(total == 0, 1.0, mass / total)  # p = q leaves nothing; a nan stays one and accepts nothing
    return torch.where((drawn & (mass > 0))[..., None], rest, distribution), torch.where(drawn, after, before)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _coins(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Throw a coin in [0, 1) per node: ``coin < 0`` never holds and ``coin < 1`` always, whatever the rounding."""
    return torch.rand(like.shape, dtype=widest_float(like.device), device=like.device, generator=generator)


def _walk(proposal: Proposal, allowed: Tensor, distributions: Tensor, generator: torch.Generator | None) -> Verdict:
    """Go from the root to the first ``allowed`` (batch, nodes) child until there is none; draw a token there."""
    node = torch.zeros_like(proposal.root)
    for _ in range(proposal.max_depth):
        found, child = ((proposal.parents == node[:, None]) & allowed).max(dim=1)
        node = torch.where(found, child, node)
    rows = torch.arange(node.shape[0], device=node.device)
    return _verdict(proposal, node, draw(distributions[rows, node], generator))


def _verdict(proposal: Proposal, node: Tensor, emitted: Tensor) -> Verdict:
    """Write down the path to ``node`` (batch,) and the guesses on it, followed by ``emitted`` (batch,)."""
    rows = torch.arange(node.shape[0], device=node.device)
    accepted = proposal.depth[rows, node]
    path = node[:, None].repeat(1, proposal.max_depth + 2)  # the last column takes what is not on the path
    column = torch.where(proposal.ancestors[rows, node], proposal.depth, proposal.max_depth + 1)
    path = path.scatter(1, column, torch.arange(column.shape[1], device=node.device).expand_as(column))[:, :-1]
    guesses = proposal.tokens.gather(1, path[:, 1:])
    steps = torch.arange(proposal.max_depth, device=node.device)
    tokens = torch.where(steps < accepted[:, None], guesses, emitted[:, None])
    return Verdict(path, torch.cat([tokens, emitted[:, None]], dim=1), accepted + 1)
