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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..counting import numbers, uploaded
from ..proposal import Proposal
from ..sampling import MANY, Chance, coins, draw, widest_float
from ..settings import SpeculationConfig

TRACE = 1e-30  # far below what rounding changes

Behind = Callable[[Tensor], Tensor]  # what tokens are drawn from behind nodes (batch,), (batch, vocabulary) of any sum


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


Weigh = Callable[..., Verdict]  # of a proposal, p, and a source of coins


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
    return _write_down(proposal, node, token)


def match(proposal: Proposal, picks: Tensor) -> Verdict:
    """Do as ``follow`` where the target's token after every node, ``picks`` (batch, nodes), is known beforehand.

    Of two siblings that guess the same token it follows the one that leads further.
    """
    if not proposal.is_chain:
        return _match_tree(proposal, picks)
    guessed = proposal.tokens[:, 1:] == picks[:, :-1]
    if not proposal.is_whole:
        guessed = guessed & proposal.present[:, 1:]
    accepted = guessed.cumprod(1).sum(1, keepdim=True)  # (batch, 1)
    path = numbers(picks.shape[1], picks.device).minimum(accepted)
    return Verdict(path, picks.gather(1, path), accepted[:, 0] + 1)


def _match_tree(proposal: Proposal, picks: Tensor) -> Verdict:
    wrong = proposal.tokens != picks.gather(1, proposal.parents.clamp(min=0))
    if not proposal.is_whole:
        wrong = wrong | ~proposal.present
    path, accepted = _path(proposal, _deepest(proposal, wrong))
    return Verdict(path, picks.gather(1, path), accepted + 1)


def _deepest(proposal: Proposal, wrong: Tensor) -> Tensor:
    """Return the deepest node (batch,) with no ``wrong`` (batch, nodes) one on its path; the root is never wrong."""
    blocked = (proposal.ancestors[:, :, 1:] & wrong[:, None, 1:]).any(2)
    return proposal.depth.masked_fill(blocked, -1).argmax(1)


def reject(proposal: Proposal, p: Tensor, source: Chance = None) -> Verdict:
    """Decide guess by guess from the root on: accept a child, or go on to its next sibling with what is left of ``p``.

    On chains this is speculative sampling (arXiv 2211.17192, 2302.01318); on trees, recursive rejection sampling of
    children drawn without replacement.
    """
    accept, behind = _weigh(proposal, p, carry=False)
    coin = coins(accept.shape, p.device, source)
    accepted = coin < accept
    if proposal.is_chain:
        return _verdict(proposal, accepted[:, 1:].cumprod(1).sum(1), behind, coin)
    return _walk(proposal, accepted, behind, coin)


def traverse(proposal: Proposal, p: Tensor, source: Chance = None) -> Verdict:
    """Decide path by path from the leaves on: accept the path to a node as a whole, or try the next one.

    Traversal verification (arXiv 2505.12398); on chains it equals block verification (arXiv 2403.10444). It accepts
    longer paths than ``reject`` on average.
    """
    accept, behind = _weigh(proposal, p, carry=True)
    coin = coins(accept.shape, p.device, source)
    accepted = coin < accept
    if proposal.is_chain:  # as far as the last one that is accepted
        node = (accepted * numbers(accepted.shape[1], p.device)).amax(1)
        return _verdict(proposal, node, behind, coin)
    leads_there = (proposal.ancestors & accepted[:, :, None]).any(dim=1)  # (batch, nodes)
    return _walk(proposal, leads_there, behind, coin)


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
    return _write_down(proposal, node, p[rows, node].argmax(-1))


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
    return _write_down(proposal, node, draw(p[rows, node]) if sample else p[rows, node].argmax(-1))


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

    weigh: Weigh | None = None
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


def _weigh(proposal: Proposal, p: Tensor, carry: bool) -> tuple[Tensor, Behind]:
    """Return how probably each node is accepted once it is its turn (batch, nodes), and what is drawn from behind it.

    ``carry`` makes it the whole path to the node (traversal) instead of the node alone. A guess that ``q`` gives no
    mass, a repeated sibling for example, was not drawn: it is passed over.
    """
    if proposal.q is None:
        raise ValueError("these guesses were chosen, not drawn from a distribution q; verify them with follow()")
    if proposal.q.shape[2] != p.shape[2]:
        raise ValueError(
            f"draft tokens were drawn from a q over {proposal.q.shape[2]} tokens, and the target's logits are over "
            f"{p.shape[2]}; make q (rows, parents, {p.shape[2]}), with 0 for tokens that the draft does not know."
        )
    large = p.device.type == "cpu" and p.numel() >= MANY and not torch.compiler.is_compiling()
    weigh_chain = _weigh_large_chain if large else _weigh_chain
    return (weigh_chain if proposal.is_chain else _weigh_tree)(proposal, p, proposal.q, carry)


def _weigh_tree(proposal: Proposal, p: Tensor, q: Tensor, carry: bool) -> tuple[Tensor, Behind]:
    """Take one turn after the other. What may happen behind a node are the tokens, and that it is not accepted itself.

    Of all these *outcomes*, vocabulary + 1 of them, a rejected child leaves max(w p - q, 0) and 1 - w as it was, to be
    divided by their sum. Source: arXiv 2505.12398.
    """
    tokens, guess = proposal.tokens[:, 1:], _with_points(proposal, _without_elders(proposal, q))
    probability, passed = _drawn(guess, tokens, proposal.present[:, 1:])
    guess = guess.masked_fill(passed[..., None], 0)
    outcomes, guess = functional.pad(p, (0, 1)), functional.pad(guess, (0, 1))  # (batch, nodes, vocabulary + 1)
    never = functional.pad(p.new_zeros(p.shape[-1]), (0, 1), value=1.0)  # the node is not accepted
    accept = p.new_zeros(p.shape[:2])  # (batch, nodes)
    row, parent, child, sizes = _turns(proposal)
    # All that a turn reads is put into the order of turns at once, (..., guesses) or (..., guesses, vocabulary + 1).
    number = child - 1  # among the guesses
    guess, behind = guess[row, number].split(sizes, dim=-2), outcomes[row, child].split(sizes, dim=-2)
    token, probability = (x[row, number].split(sizes, dim=-1) for x in (tokens, probability))
    rows = [row] * len(sizes) if row.dim() == 2 else row.split(sizes)
    for turn, (at, over, under) in enumerate(zip(rows, parent.split(sizes, dim=-1), child.split(sizes), strict=True)):
        weights = outcomes[at, over]
        own = _ratio(weights, token[turn], probability[turn]).clamp_(max=1)
        rest = _rest(weights, guess[turn])
        outcomes[at, over] = rest / rest.sum(-1, keepdim=True)
        if carry:
            outcomes[at, under] = torch.lerp(never, behind[turn], own[..., None])
        else:
            accept[at, under] = own
    every = numbers(len(outcomes), p.device)
    return (1 - outcomes[..., -1] if carry else accept), lambda node: outcomes[every, node, :-1]


def _without_elders(proposal: Proposal, q: Tensor) -> Tensor:
    """Return what each guess was drawn from, (batch, nodes - 1, vocabulary): ``q`` without its elder siblings."""
    parents, tokens = proposal.parents[:, 1:], proposal.tokens[:, 1:]
    row = numbers(len(parents), q.device)
    left = q[row[:, None], parents.clamp(min=0)]
    stays = ~proposal.elders[:, 1:, 1:]  # (batch, guess, other guess)
    if proposal.chosen is not None:
        stays = stays | proposal.chosen[:, None, 1:]
    left.scatter_reduce_(2, tokens[:, None].expand(stays.shape), stays.to(q.dtype), "prod")
    return left.div_(left.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny))


def _turns(proposal: Proposal) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """List the guesses in the order of their turns: indices of rows, of parents and of nodes, and each turn's size.

    A guess has its turn after its parent and its elder siblings, so that parents differ within one. There is a handful
    of turns where there are many nodes, and each operation on an accelerator takes its time, however little it does.
    Rows are (batch, 1) where all have the same shape, which nobody has to ask the accelerator for, and in a graph,
    where parents are (batch, guesses).
    """
    device = proposal.tokens.device
    if proposal.shape is not None:
        order = _order if torch.compiler.is_compiling() else _known_order
        parent, child, sizes = order(proposal.shape, device)
        return numbers(len(proposal.tokens), device)[:, None], parent, child, sizes
    if torch.compiler.is_compiling():  # a graph cannot ask how many turns there are: each guess has its own
        parent = proposal.parents[:, 1:].clamp(min=0)  # an ABSENT guess, drawn from nothing, takes nothing out of p
        count = parent.shape[1]
        return numbers(len(parent), device)[:, None], parent, numbers(count, device, 1), [1] * count
    turns: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, parents in enumerate(proposal.parents.tolist()):
        for turn, above, node in _in_turn(parents):
            turns[turn].append((number, above, node))
    together = uploaded([one for turn in sorted(turns) for one in turns[turn]], device)  # one upload
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


def _weigh_chain(proposal: Proposal, p: Tensor, q: Tensor, carry: bool) -> tuple[Tensor, Behind]:
    """Do as ``_weigh_tree`` for all guesses at once: four times faster where the vocabulary is small.

    With w how probably the path to a node is accepted, mass / (mass + 1 - w) is the h of Algorithm 2 in arXiv
    2403.10444. The mass is what a rejected guess leaves of w p.
    """
    tokens, q = proposal.tokens[:, 1:], _with_points(proposal, q)
    probability, passed = _drawn(q, tokens, None if proposal.is_whole else proposal.present[:, 1:])
    weights, guess = p[:, :-1], q.masked_fill(passed[..., None], 0)
    ratio = _ratio(weights, tokens, probability)  # (batch, guesses)
    if carry:
        reach = _least_products(ratio)  # (batch, nodes)
        before = reach[:, :-1]
        rest = _rest(weights * before[..., None], guess)
        mass = rest.sum(-1)
        accept = torch.cat([mass / (mass + (1 - before)), reach[:, -1:]], dim=1)
    else:
        rest = _rest(weights, guess)
        accept = functional.pad(ratio.clamp(max=1), (1, 0), value=1.0)
    left, row = torch.cat([rest, p[:, -1:]], dim=1), numbers(len(p), p.device)
    return accept, lambda node: left[row, node]


def _weigh_large_chain(proposal: Proposal, p: Tensor, q: Tensor, carry: bool) -> tuple[Tensor, Behind]:
    """Do as ``_weigh_chain`` with one new tensor as large as ``p`` instead of six: a CPU takes its time to get memory.

    What is left of p is worked out behind the last accepted node alone, in a dozen more operators.
    """
    tokens, q = proposal.tokens[:, 1:], _with_points(proposal, q)
    probability, passed = _drawn(q, tokens, None if proposal.is_whole else proposal.present[:, 1:])
    ratio = _ratio(p[:, :-1], tokens, probability)  # (batch, guesses)
    if carry:
        reach = _least_products(ratio)  # (batch, nodes)
        before = reach[:, :-1]
        mass = (p[:, :-1] * before[..., None]).sub_(q).clamp_(min=0).sum(-1).add_(before, alpha=TRACE)
        mass = torch.where(passed, before, mass)
        accept = torch.cat([mass / (mass + (1 - before)), reach[:, -1:]], dim=1)
    else:
        accept = functional.pad(ratio.clamp(max=1), (1, 0), value=1.0)
        reach = torch.ones_like(accept)
    passed = functional.pad(passed, (0, 1), value=True)  # behind the last node there is no guess

    def behind(node: Tensor) -> Tensor:
        row = numbers(len(node), node.device)
        if q.shape[1] == 0:
            return p[:, 0]
        guess = q[row, node.clamp(max=q.shape[1] - 1)].masked_fill(passed[row, node, None], 0)
        return _rest(p[row, node] * reach[row, node, None], guess)

    return accept, behind


def _least_products(ratios: Tensor) -> Tensor:
    """Return how probably the path to each node is accepted, min(1, ratio * that before): (batch, nodes).

    It is the smallest product of the last 0, 1, 2, ... ``ratios`` (batch, guesses), worked out in logarithms.
    """
    sums = functional.pad(ratios.log().cumsum(1, dtype=widest_float(ratios.device)), (1, 0))
    return (sums - sums.cummax(1).values).exp().to(ratios.dtype)


def _with_points(proposal: Proposal, q: Tensor) -> Tensor:
    """Return ``q`` (batch, guesses, vocabulary) of each guess, with a point mass for one that was chosen."""
    if proposal.chosen is None:
        return q
    points = torch.zeros_like(q).scatter_(-1, proposal.tokens[:, 1:, None], 1)
    return torch.where(proposal.chosen[:, 1:, None], points, q)


def _drawn(q: Tensor, token: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how probable each ``token`` (...) was in what it was drawn from, ``q`` (..., vocabulary), (...).

    Infinity for one that was not drawn; and whether it was not. ``present`` is None if all are.
    """
    probability = q.gather(-1, token[..., None])[..., 0]
    drawn = probability > torch.finfo(q.dtype).tiny  # p / q of anything smaller could overflow; a nan is none
    if present is not None:
        drawn = drawn & present
    return probability.masked_fill_(passed := ~drawn, torch.inf), passed


def _ratio(weights: Tensor, token: Tensor, probability: Tensor) -> Tensor:
    """Return how probable ``token`` (...) is by the ``weights`` (..., vocabulary), as a multiple."""
    return weights.gather(-1, token[..., None])[..., 0] / probability


def _rest(weights: Tensor, guess: Tensor) -> Tensor:
    """Take a rejected child, drawn from ``guess``, out of its parent's ``weights``, both (..., vocabulary)."""
    # Where p = q nothing is left, or what rounding leaves. The next token is drawn from p then: a trace of it stays.
    return torch.maximum(weights - guess, weights * TRACE)


def _walk(proposal: Proposal, allowed: Tensor, behind: Behind, coin: Tensor) -> Verdict:
    """Go from the root to the first ``allowed`` (batch, nodes) child until there is none; draw a token there."""
    passed = ~allowed | (proposal.elders & allowed[:, None]).any(2)  # by this one, or an elder sibling is taken
    return _verdict(proposal, _deepest(proposal, passed), behind, coin)


def _verdict(proposal: Proposal, node: Tensor, behind: Behind, coin: Tensor) -> Verdict:
    """Go to ``node`` (batch,) and draw a token from what is left behind it.

    Of each ``coin`` (batch, nodes) the root's is thrown for that: the root itself is text.
    """
    return _write_down(proposal, node, draw(behind(node), coin[:, :1]))


def _write_down(proposal: Proposal, node: Tensor, emitted: Tensor) -> Verdict:
    """Write down the path to ``node`` (batch,) and the guesses on it, followed by ``emitted`` (batch,)."""
    path, accepted = _path(proposal, node)
    following = proposal.tokens[:, 1:] if proposal.is_chain else proposal.tokens.gather(1, path[:, 1:])
    steps = numbers(path.shape[1], path.device)
    tokens = torch.cat([following, emitted[:, None]], dim=1)
    return Verdict(path, torch.where(steps < accepted[:, None], tokens, emitted[:, None]), accepted + 1)


def _path(proposal: Proposal, node: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes on the way to ``node`` (batch,), (batch, max_depth + 1), and how many of them are guesses."""
    width = proposal.max_depth + 1
    if proposal.is_chain:
        return numbers(width, node.device).minimum(node[:, None]), node
    nodes = proposal.tokens.shape[1]
    row, number = numbers(len(node), node.device), numbers(nodes, node.device)
    leads_there = proposal.ancestors[row, node]  # (batch, nodes)
    path = torch.where(leads_there, number, nodes).sort(dim=1).values[:, :width].minimum(node[:, None])
    return path, leads_there.sum(1) - 1
