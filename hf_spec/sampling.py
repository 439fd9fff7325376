"""Draw tokens from distributions, and take the best ones."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token from each distribution ``p`` (..., vocabulary) float32, which need not sum to one: (...).

    Never a token with ``p = 0``; -1 where there is no other, or a nan. Works in float64 if it can: a float32 sum over
    a large vocabulary would round the tail away. ``torch.multinomial`` waits for the accelerator and needs a random
    number per token.
    """
    below = p.cumsum(-1, dtype=widest_float(p.device))
    coin = torch.rand(below[..., :1].shape, dtype=below.dtype, device=p.device, generator=generator)
    token = torch.searchsorted(below, coin * below[..., -1:], right=True).clamp(max=p.shape[-1] - 1)
    possible = p.gather(-1, token) > 0  # a parallel sum may fall by a rounding error where it should stand still
    token = torch.where(possible, token, p.argmax(-1, keepdim=True))
    return torch.where(below[..., -1:] > 0, token, -1)[..., 0]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise type that ``device`` computes in: Apple's have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def best(log_probs: Tensor, count: int) -> Tensor:
    """Return the ``count`` most probable tokens of ``log_probs`` (..., vocabulary), best first: (..., count)."""
    return log_probs.topk(min(count, log_probs.shape[-1])).indices


def draw_distinct(log_probs: Tensor, count: int) -> Tensor:
    """Draw ``count`` different tokens without replacement from the log-probabilities (..., vocabulary): (..., count).

    The order is that of successive draws (Gumbel top-k, arXiv 1903.06059). Tokens of probability zero come last.
    """
    wide = widest_float(log_probs.device)
    noise = torch.empty_like(log_probs, dtype=wide).exponential_().log_()  # minus a Gumbel variable
    return (log_probs - noise).topk(min(count, log_probs.shape[-1])).indices
