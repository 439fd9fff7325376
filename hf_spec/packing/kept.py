"""Products with large weights that keep torch's layout, for processors with AVX2 alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# With so many inputs and bytes, one token took 0.6 to 0.8 of the time that oneDNN's blocks take, and several tokens
# 1.0 to 1.2 of it. Shorter rows and smaller weights are better in blocks. Measured on an AMD EPYC of Zen 3.
INPUTS, BYTES = 1024, 8 << 20
FEW = 4  # rows up to which torch's product the other way round is the fastest; it takes as long for three as for four


def is_better_kept(weight: Tensor) -> bool:
    """Tell whether products with ``weight`` (outputs, inputs) are faster in torch's layout than in oneDNN's blocks."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX2"
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and weight.shape[1] >= INPUTS
        and weight.nbytes >= BYTES
    )


def kept_product(
    states: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor], threads: int
) -> Tensor:
    """Multiply ``states`` (..., inputs) by the transpose of ``weight`` (outputs, inputs), and add ``bias``.

    ``multiply`` is oneDNN's product, which reads such a weight as it is. With one row it is faster than torch's if
    there are several ``threads``, since torch's uses one.
    """
    rows = states.numel() // weight.shape[1]
    if rows == 1 and threads == 1:
        return functional.linear(states, weight, bias)
    if not 1 < rows <= FEW:
        return multiply(states, weight, bias)
    flat = states.reshape(rows, -1)  # (rows, inputs)
    if rows == FEW - 1:
        flat = torch.cat([flat, flat[:1]])
    found = torch.mm(weight, flat.t()).t()[:rows].contiguous().view(*states.shape[:-1], -1)
    return found if bias is None else found + bias
