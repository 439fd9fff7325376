"""Speculative decoding on one page: one sequence, a chain of draft tokens, token verification, no KV cache."""

import torch
from torch.nn.functional import one_hot


@torch.no_grad()
def speculative_decode(target, draft, tokens, max_length, num_speculative_tokens=4, temperature=1.0, generator=None):
    """Extend ``tokens`` (length,) to ``max_length`` tokens, distributed as if ``target`` alone had sampled them.

    Both models map ids (1, length) to an output with ``logits``. Temperature 0 is greedy decoding. Return the tokens,
    and how many draft tokens each step accepted. Source: Leviathan et al., arXiv 2211.17192.
    """
    accepted = []
    while len(tokens) < max_length:
        draft_length = min(num_speculative_tokens, max_length - len(tokens) - 1)
        draft_tokens, q = propose(draft, tokens, draft_length, temperature, generator)
        p = score(target, torch.cat([tokens, draft_tokens]), draft_length, temperature)
        num_accepted, next_token = verify(p, q, draft_tokens, generator)
        # Commit. With a KV cache, rejected draft tokens would now be rolled back.
        tokens = torch.cat([tokens, draft_tokens[:num_accepted], next_token])
        accepted.append(num_accepted)
    return tokens, accepted


def propose(draft, tokens, draft_length, temperature, generator):
    """Sample draft tokens one by one; return them, and the distributions they were sampled from."""
    q = []
    for _ in range(draft_length):
        q.append(distribution(draft(tokens[None]).logits[0, -1], temperature))  # (vocab,)
        tokens = torch.cat([tokens, torch.multinomial(q[-1], 1, generator=generator)])
    return tokens[len(tokens) - draft_length :], q


def score(target, tokens, draft_length, temperature):
    """Return the target's distributions after the last emitted token and after each draft token, in one forward."""
    return distribution(target(tokens[None]).logits[0, -1 - draft_length :], temperature)  # (1 + draft tokens, vocab)


def verify(p, q, draft_tokens, generator):
    """Accept draft tokens from the left while they pass; return how many, and one more token from the target."""
    for i, token in enumerate(draft_tokens.tolist()):
        # q >= p accepts with probability p / q; q < p accepts always.
        if torch.rand((), generator=generator) * q[i][token] < p[i, token]:
            continue
        # The first rejection ends the chain. What the draft proposed too seldom makes up for it.
        residual = (p[i] - q[i]).clamp(min=0)
        return i, torch.multinomial(residual, 1, generator=generator)
    return len(draft_tokens), torch.multinomial(p[-1], 1, generator=generator)  # the bonus token


def distribution(logits, temperature):
    """Return probabilities over the vocabulary; at temperature 0 all of it stands on the best token."""
    if temperature == 0:
        return one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.float() / temperature).softmax(-1)
