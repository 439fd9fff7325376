"""Rules of verification: which draft tokens are accepted, and which token follows the last accepted one.

``p`` (batch, nodes, vocab) float32 is the target's distribution after the user's processors. ``p[:, i]`` is the
distribution of the token after node i. ``q`` is the distribution that draft tokens were sampled from.

- Deterministic draft tokens (no ``q``) are compared with the target's own token: ``verify_target_samples``.
- Sampled ones are accepted by chance, from the root on (``token_verification``) or from the leaves back
  (``block_verification``). The probabilities come from ``residual.py``; a rule draws one random number for each node.

All rules keep the target's distribution, except ``accept_typical`` and ``accept_near_best``, which users ask for by
name. A drafter may end a branch or leave out a child because of what it sampled before. It must never drop a draft
token that it has sampled: the remaining ones would no longer follow ``q``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device_tensors import cached_arange
from ..proposal import Proposal
from ..sampling import NoiseSource, draw, uniform_noise
from ..settings import SpeculationConfig
from .residual import Residual, acceptance_probs
from .result import VerificationResult, deepest_node, emit_path, path_to

SampledRule = Callable[..., VerificationResult]  # (proposal, p, noise source) -> result
LossyRule = Callable[[Proposal, Tensor, SpeculationConfig, bool], VerificationResult]  # (proposal, p, config, sample)


def verify_target_samples(proposal: Proposal, sample: Callable[[Tensor], Tensor]) -> VerificationResult:
    """Take the target's own token after each node, for as long as it is a draft token.

    ``sample`` maps nodes (batch,) to the tokens after them (batch,). It is called ``max_depth + 1`` times. Lossless
    for draft tokens of any origin, and the only rule for deterministic ones.
    """
    node = torch.zeros_like(proposal.root)
    token = sample(node)
    for _ in range(proposal.max_depth):
        child = proposal.child(node, token)
        accepted = child >= 0  # a sequence that stops keeps node and token, so it stays stopped
        node = torch.where(accepted, child, node)
        token = torch.where(accepted, sample(node), token)
    return emit_path(proposal, node, token)


def verify_against_tokens(proposal: Proposal, tokens: Tensor) -> VerificationResult:
    """Do as ``verify_target_samples`` where the target's ``tokens`` (batch, nodes) after all nodes are known.

    Of two siblings with the same token it takes the one with the longer accepted path.
    """
    if not proposal.is_chain:
        return _verify_tree_against_tokens(proposal, tokens)
    equal = proposal.tokens[:, 1:] == tokens[:, :-1]
    if not proposal.is_unpadded:
        equal = equal & proposal.present[:, 1:]
    accepted = equal.cumprod(1).sum(1, keepdim=True)  # (batch, 1)
    path = cached_arange(tokens.shape[1], tokens.device).minimum(accepted)
    return VerificationResult(path, tokens.gather(1, path), accepted[:, 0] + 1)


def _verify_tree_against_tokens(proposal: Proposal, tokens: Tensor) -> VerificationResult:
    wrong = proposal.tokens != tokens.gather(1, proposal.parents.clamp(min=0))
    if not proposal.is_unpadded:
        wrong = wrong | ~proposal.present
    path, accepted = path_to(proposal, deepest_node(proposal, wrong))
    return VerificationResult(path, tokens.gather(1, path), accepted + 1)


def token_verification(proposal: Proposal, p: Tensor, source: NoiseSource = None) -> VerificationResult:
    """Decide token by token from the root on: accept a child, or try its next sibling against the residual of ``p``.

    On chains this is speculative sampling (arXiv 2211.17192, 2302.01318). On trees it is recursive rejection sampling
    of children that were sampled without replacement.
    """
    accept, residual = acceptance_probs(proposal, p, joint=False)
    noise = uniform_noise(accept.shape, p.device, source)
    accepted = noise < accept
    if proposal.is_chain:
        return _sample_after(proposal, accepted[:, 1:].cumprod(1).sum(1), residual, noise)
    return _first_accepted(proposal, accepted, residual, noise)


def block_verification(proposal: Proposal, p: Tensor, source: NoiseSource = None) -> VerificationResult:
    """Decide path by path from the leaves back: accept the whole path to a node, or try the next one.

    On trees this is traversal verification (arXiv 2505.12398), on chains block verification (arXiv 2403.10444). It
    accepts longer paths than ``token_verification`` on average.
    """
    accept, residual = acceptance_probs(proposal, p, joint=True)
    noise = uniform_noise(accept.shape, p.device, source)
    accepted = noise < accept
    if proposal.is_chain:  # the last accepted node counts, whatever happened before it
        node = (accepted * cached_arange(accepted.shape[1], p.device)).amax(1)
        return _sample_after(proposal, node, residual, noise)
    leads_there = (proposal.ancestors & accepted[:, :, None]).any(dim=1)  # (batch, nodes)
    return _first_accepted(proposal, leads_there, residual, noise)


def _first_accepted(proposal: Proposal, allowed: Tensor, residual: Residual, noise: Tensor) -> VerificationResult:
    """Go from the root to the first ``allowed`` (batch, nodes) child until there is none; sample a token there."""
    passed = ~allowed | (proposal.earlier_siblings & allowed[:, None]).any(2)  # or an earlier one is taken
    return _sample_after(proposal, deepest_node(proposal, passed), residual, noise)


def _sample_after(proposal: Proposal, node: Tensor, residual: Residual, noise: Tensor) -> VerificationResult:
    """Go to ``node`` (batch,) and sample a token from the residual there.

    Of the ``noise`` (batch, nodes) the root's number is used: the root itself needs no decision.
    """
    return emit_path(proposal, node, draw(residual(node), noise[:, :1]))


def accept_typical(
    proposal: Proposal, p: Tensor, config: SpeculationConfig, sample: bool = True
) -> VerificationResult:
    """Accept the longest path of draft tokens that are typical of the target, and emit its best token. NOT lossless.

    A token is typical if p(token) > min(``posterior_threshold``, ``posterior_alpha`` * exp(-entropy of p)). Of equally
    long paths the most probable one is taken. Nothing is sampled, although the rule is for sampling alone. Source:
    Medusa (arXiv 2401.10774, section 3.3.1), its code for the 1e-5.
    """
    rows = torch.arange(p.shape[0], device=p.device)
    entropy = -(p * (p + 1e-5).log()).sum(-1)  # (batch, nodes)
    least = (config.posterior_alpha * (-entropy).exp()).clamp(max=config.posterior_threshold)
    weight, parent = _target_probs(proposal, p)
    node = _longest_path(proposal, weight, weight > least.gather(1, parent))
    return emit_path(proposal, node, p[rows, node].argmax(-1))


def accept_near_best(proposal: Proposal, p: Tensor, config: SpeculationConfig, sample: bool) -> VerificationResult:
    """Accept the longest path of draft tokens that are nearly the target's best, then emit its own. NOT lossless.

    A token is near the best if fewer than ``accept_k`` tokens are more probable, or if the most probable one is so by
    at most ``accept_tolerance``; never if p(token) = 0. Of equally long paths the most probable one is taken. Source:
    ``verifier_accept_k`` and ``accept_tolerance`` of the speculators library.
    """
    weight, parent = _target_probs(proposal, p)
    rows = torch.arange(p.shape[0], device=p.device)
    after_parent = p[rows[:, None], parent]  # (batch, nodes, vocab)
    token = torch.arange(p.shape[-1], device=p.device)
    equal_before = (after_parent == weight[:, :, None]) & (token < proposal.tokens[:, :, None])  # as argmax has it
    rank = ((after_parent > weight[:, :, None]) | equal_before).sum(-1)  # (batch, nodes)
    near = rank < (config.accept_k or 1)
    if config.accept_tolerance:
        near = near | (after_parent.amax(-1) - weight <= config.accept_tolerance)
    node = _longest_path(proposal, weight, near & (weight > 0))
    return emit_path(proposal, node, draw(p[rows, node]) if sample else p[rows, node].argmax(-1))


def _target_probs(proposal: Proposal, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return p of each draft token and the number of its parent, both (batch, nodes); the root counts as its own."""
    parent = proposal.parents.clamp(min=0)
    return p[torch.arange(p.shape[0], device=p.device)[:, None], parent, proposal.tokens], parent


def _longest_path(proposal: Proposal, weight: Tensor, accepted: Tensor) -> Tensor:
    """Return the node (batch,) where the longest path of ``accepted`` (batch, nodes) draft tokens ends.

    Of equally long ones it is the most probable, by the ``weight`` (batch, nodes) of each draft token.
    """
    rejected = ~accepted | ~proposal.present
    weight, rejected = weight.clone(), rejected.clone()
    weight[:, 0], rejected[:, 0] = 1, False  # the root is emitted already
    reached = ~(proposal.ancestors & rejected[:, None]).any(-1)
    depth = proposal.depth.masked_fill(~reached, -1)
    likelihood = (proposal.ancestors * weight.log().clamp(min=torch.finfo(weight.dtype).min)[:, None]).sum(-1)
    longest = depth == depth.amax(1, keepdim=True)
    return likelihood.masked_fill(~longest, -torch.inf).argmax(1)


@dataclass(frozen=True)
class Rule:
    """How draft tokens are verified.

    ``sampled`` decides about draft tokens that were sampled, given p; deterministic ones are compared with the
    target's own. ``lossy`` decides about draft tokens of any origin, in greedy decoding only ``when_greedy``. A rule
    with neither emits token by token with the random numbers of plain ``generate``, and all sequences in lockstep.
    """

    sampled: SampledRule | None = None
    lossy: LossyRule | None = None
    when_greedy: bool = False


# By the names of SpeculationConfig.verification, and of SpeculationConfig.acceptance where that is not "lossless".
RULES: dict[str, Rule] = {
    "auto": Rule(sampled=block_verification),
    "block": Rule(sampled=block_verification),
    "token": Rule(sampled=token_verification),
    "exact": Rule(),
    "typical": Rule(lossy=accept_typical),
    "near_best": Rule(lossy=accept_near_best, when_greedy=True),
}


def rule_for(config: SpeculationConfig) -> Rule:
    """Return the rule that ``config`` asks for; a ValueError lists the known ones."""
    name = config.verification if config.acceptance == "lossless" else config.acceptance
    if name not in RULES:
        raise ValueError(f"no rule of verification is called {name!r}; there are {sorted(RULES)}")
    return RULES[name]
