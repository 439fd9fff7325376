"""Draw tokens from distributions, and take the best ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .device_tensors import cached_arange

Shape = tuple[int, ...]
NoiseSource = torch.Generator | Tensor | None  # where random numbers come from, or those that were drawn beforehand

NO_TOKEN = -1  # where no token can be drawn
SMALLEST_RANDOM_SEED = 1 << 32  # of torch's own, 53 bits on a CUDA or XPU device, one in two million is below
WITHOUT_FLOAT64: tuple[str, ...] = ("mps",)  # types of devices
BY_COIN_FROM = 1024  # words, from which on random numbers for all of them take a CPU longer than finding one
IN_PARTS_FROM, PART_SIZE = (
    1 << 16,
    128,
)  # probabilities that a CPU does not add up one by one, and the parts that it takes instead


def uniform_noise(like: Shape, device: torch.device, source: NoiseSource = None) -> Tensor:
    """Draw a number in [0, 1) for each place of the shape ``like``: ``noise < 0`` never holds, ``noise < 1`` always.

    As precise as ``device`` can, so that rounding does not matter. A ``source`` that is such a tensor is returned.
    """
    if isinstance(source, Tensor):
        return source
    return torch.rand(like, dtype=widest_float(device), device=device, generator=source)


def draw(p: Tensor, source: NoiseSource = None) -> Tensor:
    """Draw one token from each distribution ``p`` (..., vocabulary) float32, which need not sum to one: (...).

    Never a token with ``p = 0``; -1 where there is no other, or a nan. Works in float64 if it can: a float32 sum over
    a large vocabulary would round the tail away. ``torch.multinomial`` waits for the accelerator and needs a random
    number per token.
    """
    token = _at(uniform_noise((*p.shape[:-1], 1), p.device, source), p)
    most, safe = p.max(-1, keepdim=True)
    possible = p.gather(-1, token) > 0  # a parallel sum may fall by a rounding error where it should stand still
    return torch.where(most > 0, torch.where(possible, token, safe), cached_arange(1, p.device, NO_TOKEN))[..., 0]


def _at(noise: Tensor, p: Tensor) -> Tensor:
    """Return the token where the sum of ``p`` (..., vocabulary) passes ``noise`` (..., 1) of the whole: (..., 1)."""
    if p.device.type == "cpu" and p.numel() >= IN_PARTS_FROM:
        return _at_in_parts(noise, p)
    below = running_sums(p, noise.dtype)
    return torch.searchsorted(below, noise * below[..., -1:], right=True).clamp_(max=p.shape[-1] - 1)


def _at_in_parts(noise: Tensor, p: Tensor) -> Tensor:
    """Do as ``_at`` without a sum for each token: find the part of the vocabulary, then the token in it.

    Memory for so many sums is new each time, and a CPU takes twenty times as long to get it as to add them up.
    """
    parts = _in_parts(p, missing=0.0)
    sums = parts.sum(-1, dtype=noise.dtype)
    below = sums.cumsum(-1)
    point = noise * below[..., -1:]
    part = torch.searchsorted(below, point, right=True).clamp_(max=sums.shape[-1] - 1)
    within = parts.gather(-2, part[..., None].expand(*part.shape, PART_SIZE))[..., 0, :].cumsum(-1, dtype=noise.dtype)
    point = point - (below - sums).gather(-1, part)
    return (part * PART_SIZE + torch.searchsorted(within, point, right=True)).clamp_(max=p.shape[-1] - 1)


def running_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums of the first 1, 2, ... entries along the last dimension, as ``cumsum`` does.

    ``cumsum`` raises an error on accelerators under ``torch.use_deterministic_algorithms``.
    """
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1, dtype=dtype)
    return sums_by_doubling(x.to(dtype or x.dtype))


def sums_by_doubling(sums: Tensor) -> Tensor:
    """Do as ``cumsum`` along the last dimension: add what stands 1, 2, 4, ... places before."""
    step = 1
    while step < sums.shape[-1]:
        sums, step = sums + functional.pad(sums[..., :-step], (step, 0)), 2 * step
    return sums


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise type that ``device`` computes in."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def is_seeded(device: torch.device) -> bool:
    """Tell whether somebody has set the seed of random numbers on ``device``.

    Until then torch's generators have one of 64 random bits, on a CUDA or XPU device of 53. What people set, and what
    numpy takes, has at most 32.
    """
    own = (
        torch if device.type in ("cpu", "meta") else torch.get_device_module(device)
    )  # an offloaded model's is "meta"
    seed: int = getattr(own, "initial_seed", torch.initial_seed)()
    return seed < SMALLEST_RANDOM_SEED


def set_seed(seed: int, process: int = 0) -> None:
    """Seed torch with 32 bits of any ``seed``, other ones in each ``process``, so that ``is_seeded`` holds."""
    torch.manual_seed((seed + process * 0x9E3779B1) % SMALLEST_RANDOM_SEED)


@contextlib.contextmanager
def other_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the CPU and ``device`` when the context ends."""
    accelerators = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"):
        yield


def likeliest(scores: Tensor) -> Tensor:
    """Return the token with the largest of ``scores`` (..., vocabulary), the first if there are several: (...)."""
    return largest(scores)[1] if _is_quick_in_parts(scores) else _place_of_largest(scores)


def _place_of_largest(scores: Tensor) -> Tensor:
    # ``argmax`` takes a CPU five times as long in half precision, and ``max`` takes it longer in float32.
    place: Tensor = scores.argmax(-1) if scores.dtype == torch.float32 else scores.max(-1).indices
    return place


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of ``scores`` (..., vocabulary) and its token, the first if there are several: (...) each.

    A nan is larger than all. It takes a CPU several times as long to keep track of tokens as to compare: so of many
    scores the part with the largest one is found first, and then the token in it.
    """
    if not _is_quick_in_parts(scores):
        value, token = scores.max(-1)
        return value, token
    parts = _in_parts(scores, missing=-torch.inf)
    part = _place_of_largest(parts.amax(-1))  # (...)
    value, token = parts.gather(-2, part[..., None, None].expand(*part.shape, 1, PART_SIZE))[..., 0, :].max(-1)
    return value, part * PART_SIZE + token


def _is_quick_in_parts(scores: Tensor) -> bool:
    # In float16 parts were measured to gain nothing.
    quick = scores.device.type == "cpu" and scores.dtype != torch.float16 and scores.numel() >= IN_PARTS_FROM
    return quick and not torch.compiler.is_compiling()


def _in_parts(scores: Tensor, missing: float) -> Tensor:
    """See ``scores`` (..., vocabulary) as (..., parts, part), filled up with what is ``missing``."""
    count = -scores.shape[-1] % PART_SIZE
    whole = functional.pad(scores, (0, count), value=missing) if count else scores
    parts: Tensor = whole.unflatten(-1, (-1, PART_SIZE))
    return parts


def best(log_probs: Tensor, count: int) -> Tensor:
    """Return the ``count`` most probable tokens of ``log_probs`` (..., vocabulary), best first: (..., count)."""
    return log_probs.topk(min(count, log_probs.shape[-1])).indices


def noise_shapes(draws: Sequence[tuple[Sequence[int], int]], vocabulary: int, device: torch.device) -> list[Shape]:
    """Return the shapes of what ``draw_distinct`` draws with, for each of ``draws``: rows (...), and tokens of each.

    That is a number per token (..., count) where random numbers take longer than operators, and otherwise the negative
    of a Gumbel variable per word (..., vocabulary).
    """
    by_coin = _draws_by_coin(vocabulary, device)
    return [(*rows, count if by_coin else vocabulary) for rows, count in draws]


def noise_for(shapes: Sequence[Shape], vocabulary: int, device: torch.device) -> list[Tensor]:
    """Draw what ``draw_distinct`` draws with, of ``noise_shapes``."""
    if not shapes:  # deterministic draft tokens need no noise
        return []
    sizes = [math.prod(shape) for shape in shapes]
    noise = torch.empty(sum(sizes), dtype=widest_float(device), device=device)
    noise = noise.uniform_() if _draws_by_coin(vocabulary, device) else noise.exponential_().log_()
    return [part.view(*shape) for part, shape in zip(noise.split(sizes), shapes, strict=True)]


def draw_distinct(log_probs: Tensor, count: int, noise: Tensor | None = None) -> Tensor:
    """Draw ``count`` different tokens without replacement from the log-probabilities (..., vocabulary): (..., count).

    The order is that of successive draws; with Gumbel variables they are one top-k (arXiv 1903.06059). Tokens of
    probability zero come last. ``noise`` is what ``noise_for`` gave, if it was drawn beforehand.
    """
    vocabulary = log_probs.shape[-1]
    count = min(count, vocabulary)
    if noise is None:
        shapes = noise_shapes([(log_probs.shape[:-1], count)], vocabulary, log_probs.device)
        (noise,) = noise_for(shapes, vocabulary, log_probs.device)
    if not _draws_by_coin(vocabulary, log_probs.device):
        return (log_probs - noise).topk(count).indices
    left = log_probs.exp()
    if count == 1:
        return _at(noise, left)
    least, drawn = left.argmin(-1, keepdim=True), []  # where nothing is left
    for number in noise[..., :count].split(1, dim=-1):
        token = _at(number, left)
        drawn.append(torch.where(left.gather(-1, token) > 0, token, least))
        left.scatter_(-1, token, 0.0)
    return torch.cat(drawn, dim=-1)


def _draws_by_coin(vocabulary: int, device: torch.device) -> bool:
    return device.type == "cpu" and vocabulary >= BY_COIN_FROM
