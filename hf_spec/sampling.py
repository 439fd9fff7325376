"""Draw tokens from distributions, and take the best ones."""

from __future__ import annotations

from collections.abc import Sequence

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


def gumbel_noise(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return independent variables of ``shape``, each of them minus a Gumbel variable, for ``draw_distinct``."""
    return torch.empty(shape, dtype=widest_float(device), device=device).exponential_().log_()


def draw_distinct(log_probs: Tensor, count: int, noise: Tensor | None = None) -> Tensor:
    """Draw ``count`` different tokens without replacement from the log-probabilities (..., vocabulary): (..., count).

    The order is that of successive draws (Gumbel top-k, arXiv 1903.06059). Tokens of probability zero come last.
    ``noise`` is what ``gumbel_noise`` of the same shape gave, if it was drawn beforehand.
    """
    noise = gumbel_noise(log_probs.shape, log_probs.device) if noise is None else noise
    return (log_probs - noise).topk(min(count, log_probs.shape[-1])).indices
