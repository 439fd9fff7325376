"""Functions of rows that give each row the same bits, however many rows are passed at once.

A matrix product sums each row in an order that depends on how many rows there are. So each function is tried with
several numbers of rows, and only those numbers are used that give the same bits. Other numbers of rows are padded to
the next one, or split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..packing.weight import PackedWeight, values_of

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # numbers of rows that are tried, and no others are used
MORE = (96, 128, 256, 512)  # of an accelerator, which computes so many in the time of a few
TRIED = 24  # rows of each size, at least
LARGE = 64  # numbers that cancel out, so that float16 has smaller ones than their rounding
CANCELLED, PARTS = 64, 8  # outputs of a row that are close to 0, at most; parts of the rows, each with other outputs
ALIGNMENT = 64  # bytes, as torch allocates: products of one library sum otherwise where an input begins elsewhere

Function = Callable[[Tensor], Tensor]
Functions = Callable[[Tensor], tuple[Tensor, ...]]


def sizes_on(device: torch.device) -> tuple[int, ...]:
    """Return the numbers of rows that are tried on ``device``, the fewest first."""
    return SIZES if device.type == "cpu" else SIZES + MORE


def agreeing_sizes(function: Function, sample: Tensor) -> tuple[int, ...]:
    """Return the numbers of rows for which ``function`` gives a row the same bits, at whichever place it stands.

    ``sample`` (rows, inputs) are random numbers, as many rows as are tried at most.
    """
    return agreeing(lambda rows: function(sample[rows]), len(sample), sizes_on(sample.device))


def agreeing(function: Callable[[list[int]], Tensor], count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Do as ``agreeing_sizes`` for a ``function`` of the numbers of rows, of which there are ``count``.

    The result is the largest group of ``sizes`` that agree, and of two the one that begins with fewer rows. It is
    empty if the place of a row matters for each number of rows.
    """
    groups: list[tuple[dict[int, Tensor], list[int]]] = []
    for size in reversed(sizes):
        found = _bits_by_row(function, count, size)
        if found is None:
            continue
        for known, members in groups:
            if all(torch.equal(known[row], bits) for row, bits in found.items() if row in known):
                members.append(size)
                break
        else:
            groups.append((found, [size]))
    best = max((members for _, members in groups), key=lambda members: (len(members), -min(members)), default=[])
    return tuple(sorted(best))


def _bits_by_row(function: Callable[[list[int]], Tensor], count: int, size: int) -> dict[int, Tensor] | None:
    """Return the results of some rows by number; ``None`` if a row's place among ``size`` changes its bits."""
    found: dict[int, Tensor] = {}
    windows = max(1, TRIED // size)
    firsts = [(count - size) * part // windows for part in range(windows)]
    orders = [list(range(first, first + size)) for first in firsts]
    if size > 1:  # turned by one, each row stands next to where it stood before; by half, all stand far from there
        first, last, half = orders[0], list(range(count - size, count)), size // 2
        orders += [first[1:] + first[:1], last[half:] + last[:half]]
    for rows in orders:
        for row, bits in zip(rows, function(rows), strict=True):
            if row in found and not torch.equal(found[row], bits):
                return None
            found[row] = bits
    return found


def cancelling(linear: nn.Module, rows: Tensor) -> Tensor:
    """Return random rows, as many as ``rows`` (rows, inputs), for which some outputs of ``linear`` are close to 0.

    Products are added up in float32 and then rounded, which hides nearly all differences between two orders: in
    bfloat16 one number of 10,000 differs. Where large numbers add up to less than their sum's own rounding, that
    rounding is the result, and differs as well.

    A quarter of a row is drawn. The other quarters make up for what those before them leave, each down to the rounding
    of its own, smaller numbers.
    """
    weight, bias = _weight_and_bias(linear, rows)
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(1)
    found = torch.zeros(rows.shape, dtype=torch.float64, device="cpu")
    some = max(1, min(CANCELLED, outputs, inputs // 8))
    for part in range(PARTS):  # rows that have other outputs close to 0
        chosen = torch.randperm(outputs, generator=generator, device="cpu")[:some]
        if not part:  # kernels may compute the last ones otherwise
            chosen = torch.arange(outputs - some, outputs, device="cpu")
        own = weight[chosen].double()
        drawn, *others = torch.randperm(inputs, generator=generator, device="cpu").tensor_split(4)
        some_rows = found[part::PARTS]  # a view
        values = LARGE * torch.randn(len(some_rows), len(drawn), generator=generator, device="cpu")
        some_rows[:, drawn] = values.to(rows.dtype).double()
        for quarter in others:
            left = some_rows @ own.T + bias[chosen]
            some_rows[:, quarter] = (-left @ torch.linalg.pinv(own[:, quarter]).T).to(rows.dtype).double()
    return found.to(rows)


def _weight_and_bias(linear: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight (outputs, inputs) and the bias of ``linear``, as far as rounding shows them, on the CPU."""
    weight = linear._parameters.get("weight")
    at_zero = linear(torch.zeros_like(rows[:1]))[0]
    if type(weight) is PackedWeight or type(weight) is nn.Parameter:
        own = values_of(weight)
        own = own if isinstance(linear, nn.Linear) else own.T  # a Conv1D's is the other way round
    else:  # what torch or another library made of it
        ones = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        own = torch.cat([linear(some) - at_zero for some in ones.split(SIZES[-1])]).T
    return own.cpu(), at_zero.cpu().double()  # on the CPU: Apple's devices have no float64


def with_float32(module: nn.Module) -> Function:
    """Return ``module`` with its results in float32 next to its own, which rounding makes look alike."""
    twin = copy.deepcopy(module).float()
    return lambda rows: torch.cat([module(rows).float(), twin(rows.float())], dim=-1)


def in_sizes(function: Function, states: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``function(states)``, (..., outputs), of ``states`` (..., inputs), called with ``sizes`` of rows only."""
    shape = states.shape
    rows = states if len(shape) == 2 else states.reshape(-1, shape[-1])
    if rows.shape[0] in sizes and _lie_as_tried(rows):  # each layer comes here in most forwards
        result = function(rows)
    elif not shape.numel():
        return function(states)
    else:
        (result,) = all_in_sizes(lambda some: (function(some),), states, sizes)
    return result if len(shape) == 2 else result.view(*shape[:-1], result.shape[-1])


def one_by_one(function: Function, states: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``function(states)`` of ``states`` (batch, ...), called with one row of the batch at a time."""
    return torch.cat([function(one) for one in states.split(1)])


def all_in_sizes(function: Functions, states: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Do as ``in_sizes`` for a ``function`` with several results, (rows, outputs) each."""
    rows = states.reshape(-1, states.shape[-1])
    if not _lie_as_tried(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    count, most = len(rows), sizes[-1]
    parts = [_padded(function, rows[first : first + most], sizes) for first in range(0, count, most)]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _lie_as_tried(rows: Tensor) -> bool:
    """Tell whether ``rows`` lie in memory as in trials: some kernels compute parts of a wider tensor otherwise."""
    return not rows.data_ptr() % ALIGNMENT and rows.is_contiguous()


def _padded(function: Functions, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    count = len(rows)
    if count in sizes:
        return function(rows)
    size = next(size for size in sizes if size > count)
    found = function(torch.nn.functional.pad(rows, (0, 0, 0, size - count)))
    return tuple(result[:count] for result in found)
