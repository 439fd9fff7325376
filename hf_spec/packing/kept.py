"""Products with weights that keep torch's layout, for processors with AVX2 alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .float16 import HALF, has_avx2_alone
from .graphs import quick_operator

# Measured on an AMD EPYC of Zen 3, with one and two threads, as a share of the time with oneDNN's blocks: one token
# took 0.5 to 0.9, several tokens 0.7 to 1.2. Large weights with few inputs, such as the output layer of a small model,
# gained 0.1 for one token and lost 0.2 for several.
INPUTS, BYTES = 1024, 8 << 20
FEW = 4  # rows up to which torch's product the other way round is the fastest; it takes as long for three as for four
MANY = 64  # rows up to which parts are the fastest; with 256 they took up to 1.6 times as long as oneDNN's product
WIDEST, NARROWEST = 256, 48  # outputs of a part
# In half precision, torch's own product takes as long for each row as for one. So more rows are multiplied in float32.
ALONE = 2  # rows up to which torch's product takes less time
CONVERTED = 1 << 19  # values that are converted to float32 at a time, and stay in the processor's cache


def is_better_kept(weight: Tensor) -> bool:
    """Tell whether products with ``weight`` (outputs, inputs) are faster in torch's layout than in oneDNN's blocks."""
    return (
        has_avx2_alone()
        and torch.backends.mkl.is_available()  # torch's products with another library were not measured
        and weight.is_contiguous()
        and (weight.dtype in HALF or (weight.dtype is torch.float32 and _is_deep_or_small(weight)))
    )


def _is_deep_or_small(weight: Tensor) -> bool:
    return weight.shape[1] >= INPUTS or weight.nbytes <= BYTES


def number_of_parts(outputs: int, threads: int) -> int:
    """Return into how many parts of equal size ``outputs`` are divided for ``threads``; 0 if they cannot be."""
    widest = min(WIDEST, max(NARROWEST, outputs // (2 * threads)))
    return next((outputs // width for width in range(widest, NARROWEST - 1, -1) if outputs % width == 0), 0)


def half_product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply ``states`` (..., inputs) by the transpose of ``weight`` (outputs, inputs), and add ``bias``.

    All are in half precision. Values are added up in float32, as in torch's own product, and rounded at the end.
    """
    if states.numel() <= ALONE * weight.shape[1]:
        return functional.linear(states, weight, bias)
    rows = states.float()
    parts = weight.split(max(1, CONVERTED // weight.shape[1]))
    found = torch.cat([functional.linear(rows, part.float()) for part in parts], -1)
    return (found if bias is None else found.add_(bias)).to(states.dtype)


half_product_in_graphs = quick_operator(
    "half_product",
    "Tensor states, Tensor weight, Tensor? bias",
    half_product,
    lambda states, weight, bias: states.new_empty(*states.shape[:-1], len(weight)),
)


def kept_product(
    states: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor], threads: int, parts: int
) -> Tensor:
    """Multiply ``states`` (..., inputs) by the transpose of ``weight`` (outputs, inputs), and add ``bias``.

    torch multiplies the ``parts`` of a weight as a batch, and several ``threads`` share its members. A product of one
    row runs on one thread otherwise. ``multiply`` is oneDNN's product, which reads such a weight as it is.
    """
    outputs, inputs = weight.shape
    rows = states.numel() // inputs
    is_few = 1 < rows <= FEW
    if rows == 1 and threads == 1:
        return functional.linear(states, weight, bias)
    if rows > MANY or not (parts or is_few):
        return multiply(states, weight, bias)
    flat = states.reshape(rows, inputs)
    if is_few:
        flat = torch.cat([flat, flat[:1]]) if rows == FEW - 1 else flat
        found = torch.mm(weight, flat.t()).t()[:rows].contiguous()
    elif rows == 1 and inputs < INPUTS:
        found = torch.bmm(weight.view(parts, -1, inputs), flat.t().expand(parts, inputs, 1))  # (parts, outputs, 1)
    else:
        found = torch.bmm(flat.expand(parts, rows, inputs), weight.view(parts, -1, inputs).transpose(1, 2))
        found = found.transpose(0, 1).contiguous()  # (rows, parts, outputs)
    found = found.view(*states.shape[:-1], outputs)
    return found if bias is None else found + bias
