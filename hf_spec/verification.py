"""The lossless rules: which guesses become text, and which token follows them, so that the text has the target's law.

``p`` is the target's law after the user's processors, (batch, nodes, vocabulary) float32; ``p[:, i]`` is the law of the
token after node i. ``q`` is the proposal's own law. Chosen guesses (no ``q``) are only looked up: ``follow``. Drawn ones
are weighed against ``q``: ``reject`` from the root to a leaf, ``traverse`` from the leaves to the root, which accepts more.

Both weigh siblings the same way: a rejected child takes ``q`` out of ``p``, and because children are drawn without
replacement it also takes itself out of ``q``. So everything but the coins is known before one is thrown, and a rule is
one table of acceptance probabilities, one coin per node, and one walk from the root. Nothing here waits for the
accelerator: the loops run over nodes and depths, which are Python numbers.

A drafter may end a branch or leave out a child because of what it has already drawn, never because of later draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .proposal import ABSENT, Proposal


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


def verify(
    proposal: Proposal, p: Tensor, rule: Literal["token", "block"], generator: torch.Generator | None = None
) -> Verdict:
    """Verify by the best rule for how the guesses were made: drawn guesses by ``rule``, chosen ones by a look-up."""
    if proposal.q is None:
        rows = torch.arange(p.shape[0], device=p.device)
        return follow(proposal, lambda node: draw(p[rows, node], generator))
    return (reject if rule == "token" else traverse)(proposal, p, generator)


def follow(proposal: Proposal, choose: Callable[[Tensor], Tensor]) -> Verdict:
    """Take the target's own token after each node for as long as it was guessed.

    ``choose`` maps nodes (batch,) to the tokens after them (batch,); it is called ``max_depth + 1`` times. Lossless for
    any guesses that do not depend on what ``choose`` will say; the only rule for guesses that were not drawn.
    """
    node = torch.zeros_like(proposal.root)
    token = choose(node)
    for _ in range(proposal.max_depth):
        child = proposal.child(node, token)
        guessed = child >= 0  # a row that stops keeps node and token, so it stays stopped
        node = torch.where(guessed, child, node)
        token = torch.where(guessed, choose(node), token)
    return _verdict(proposal, node, token)


def reject(proposal: Proposal, p: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Decide guess by guess from the root on: accept a child, or go on to its next sibling with what is left of ``p``.

    On chains this is speculative sampling (arXiv 2211.17192, 2302.01318); on trees, recursive rejection sampling of
    children drawn without replacement.
    """
    accept, laws = _weigh(proposal, p, carry=False)
    return _walk(proposal, _coins(accept, generator) < accept, laws, generator)


def traverse(proposal: Proposal, p: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Decide path by path from the leaves on: accept the path to a node as a whole, or try the next one.

    Traversal verification (arXiv 2505.12398); on chains it equals block verification (arXiv 2403.10444). It accepts at
    least as much as ``reject`` on average.
    """
    accept, laws = _weigh(proposal, p, carry=True)
    accepted = _coins(accept, generator) < accept
    below = (proposal.ancestors & accepted[:, :, None]).any(dim=1)  # some node of this subtree is accepted
    return _walk(proposal, below, laws, generator)


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token from each law ``p`` (..., vocabulary) float32, which need not sum to one: (...).

    Never a token with ``p = 0``, where there is any other. Works in float64: a float32 sum over a large vocabulary
    would round the tail away. ``torch.multinomial`` waits for the accelerator and needs a random number per token.
    """
    below = p.cumsum(-1, dtype=torch.float64)
    coin = torch.rand(below[..., :1].shape, dtype=below.dtype, device=p.device, generator=generator)
    token = torch.searchsorted(below, coin * below[..., -1:], right=True).clamp(max=p.shape[-1] - 1)
    possible = p.gather(-1, token) > 0  # a parallel sum may fall by a rounding error where it should stand still
    return torch.where(possible, token, p.argmax(-1, keepdim=True))[..., 0]


def _weigh(proposal: Proposal, p: Tensor, carry: bool) -> tuple[Tensor, Tensor]:
    """Return how probably each node is accepted once it is its turn (batch, nodes), and the law of the token after it.

    ``carry`` takes along how probable the path so far was (traversal); otherwise every node is judged on its own. A
    guess that ``q`` gives no mass, a repeated sibling for example, was not drawn: it is passed over.
    """
    if proposal.q is None:
        raise ValueError("these guesses were chosen, not drawn from a law q; verify them with follow()")
    rows = torch.arange(p.shape[0], device=p.device)
    laws, q = p.clone(), proposal.q.clone()  # what later children are weighed against; rewritten child by child
    accept = torch.ones_like(p[..., 0])  # (batch, nodes)
    reach = torch.ones_like(accept)
    for child in range(1, p.shape[1]):
        present, parent = proposal.parents[:, child] != ABSENT, proposal.parents[:, child].clamp(min=0)
        token = proposal.tokens[:, child]
        law, guess = _normalised(laws[rows, parent]), _normalised(q[rows, parent])  # (batch, vocabulary)
        drawn = present & (guess[rows, token] > 0)
        before = reach[rows, parent]
        accept[:, child] = torch.where(drawn, (before * law[rows, token] / guess[rows, token]).clamp(max=1), 0)
        rest = (before[:, None] * law - guess).relu()
        mass = rest.sum(-1)
        laws[rows, parent] = torch.where((drawn & (mass > 0))[:, None], rest, law)
        q[rows, parent, token] = torch.where(drawn, 0, q[rows, parent, token])
        if carry:
            reach[:, child] = accept[:, child]
            after = (mass / (mass + (1 - before))).nan_to_num(nan=1.0)
            reach[rows, parent] = torch.where(drawn, after, before)
    return (reach if carry else accept), laws


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _coins(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Throw a coin in [0, 1) per node: ``coin < 0`` never holds and ``coin < 1`` always, whatever the rounding."""
    return torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)


def _walk(proposal: Proposal, open_: Tensor, laws: Tensor, generator: torch.Generator | None) -> Verdict:
    """Go from the root to the first ``open_`` (batch, nodes) child for as long as there is one; draw the token there."""
    node = torch.zeros_like(proposal.root)
    for _ in range(proposal.max_depth):
        found, child = ((proposal.parents == node[:, None]) & open_).max(dim=1)
        node = torch.where(found, child, node)
    rows = torch.arange(node.shape[0], device=node.device)
    return _verdict(proposal, node, draw(laws[rows, node], generator))


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
