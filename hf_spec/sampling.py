"""Draw tokens from distributions, and take the best ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .counting import numbers

NOTHING = -1  # where no token can be drawn
SMALLEST_RANDOM_SEED = 1 << 48  # one in 65,536 of torch's own is below


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token from each distribution ``p`` (..., vocabulary) float32, which need not sum to one: (...).

    Never a token with ``p = 0``; -1 where there is no other, or a nan. Works in float64 if it can: a float32 sum over
    a large vocabulary would round the tail away. ``torch.multinomial`` waits for the accelerator and needs a random
    number per token.
    """
    below = p.cumsum(-1, dtype=widest_float(p.device))
    coin = torch.rand(below[..., :1].shape, dtype=below.dtype, device=p.device, generator=generator)
    token = torch.searchsorted(below, coin * below[..., -1:], right=True).clamp_(max=p.shape[-1] - 1)
    most, likeliest = p.max(-1, keepdim=True)
    possible = p.gather(-1, token) > 0  # a parallel sum may fall by a rounding error where it should stand still
    return torch.where(most > 0, torch.where(possible, token, likeliest), numbers(1, p.device, NOTHING))[..., 0]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise type that ``device`` computes in: Apple's have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_seeded(device: torch.device) -> bool:
    """Tell whether somebody has set the seed of random numbers on ``device``.

    Until then torch's generators have one of 64 random bits; what people set, and what numpy takes, is far smaller.
    """
    own = torch if device.type == "cpu" else torch.get_device_module(device)
    seed: int = getattr(own, "initial_seed", torch.initial_seed)()
    return seed < SMALLEST_RANDOM_SEED


def best(log_probs: Tensor, count: int) -> Tensor:
    """Return the ``count`` most probable tokens of ``log_probs`` (..., vocabulary), best first: (..., count)."""
    return log_probs.topk(min(count, log_probs.shape[-1])).indices


def gumbel_noise(shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return tensors of all ``shapes``, of independent variables that are minus Gumbel's, for ``draw_distinct``."""
    if not shapes:  # guesses are chosen: no operator is spent
        return []
    sizes = [math.prod(shape) for shape in shapes]
    noise = torch.empty(sum(sizes), dtype=widest_float(device), device=device).exponential_().log_()
    return [part.view(*shape) for part, shape in zip(noise.split(sizes), shapes, strict=True)]


def draw_distinct(log_probs: Tensor, count: int, noise: Tensor | None = None) -> Tensor:
    """Draw ``count`` different tokens without replacement from the log-probabilities (..., vocabulary): (..., count).

    The order is that of successive draws (Gumbel top-k, arXiv 1903.06059). Tokens of probability zero come last.
    ``noise`` is what ``gumbel_noise`` gave for the same shape, if it was drawn beforehand.
    """
    if noise is None:
        (noise,) = gumbel_noise([log_probs.shape], log_probs.device)
    return (log_probs - noise).topk(min(count, log_probs.shape[-1])).indices
