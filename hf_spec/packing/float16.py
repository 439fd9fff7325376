"""Weights as float16 numbers in FBGEMM's layout, for processors with AVX2 alone.

oneDNN multiplies no half precision there, and torch's own product takes six times as long for six rows as for one.
FBGEMM reads float16 numbers, and multiplies and adds up in float32. A weight is stored so if float16 holds its values:
those in float16 and bfloat16, and those in float32 that were loaded from a checkpoint in half precision.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .graphs import quick_operator
from .layout import bits_of

HALF = (torch.bfloat16, torch.float16)
ENGINES = ("fbgemm", "x86")  # of torch.backends.quantized, that make FBGEMM's layout
AT_ONCE = 1 << 22  # values of a block; while it is made, they are in memory as float32
COMPARED = 1 << 18  # values that are compared at a time
WIDTH, DEPTH = 16, 512  # FBGEMM pads outputs and inputs to multiples of these
LARGEST = 15  # power of two below which the largest value is brought, as float16 ends at 2 ** 16
FACTORS = 40  # powers of two that values are multiplied or divided by, at most
MOST_MEMORY = 1.05  # of a packed weight, as a share of the plain one
ROUNDED = 1 / 1024  # share of the values that may be too small for float16
LEAST = 2.0**-25  # half of the least number of float16, which such values are rounded by at most


class Float16Weight:
    """A weight (outputs, inputs) of ``dtype``, as float16 numbers times a power of two.

    bfloat16 has a wider range than float16, so values are multiplied by a power of two first. Very few values are
    still rounded, by less than 2 ** -39 of the largest one. ``dense`` has their own bits. ``table`` holds the same
    values in half precision, for a weight in float32 that is looked up in.
    """

    def __init__(
        self, weight: Tensor, factor: float, rounded: tuple[Tensor, Tensor], table: Tensor | None = None
    ) -> None:
        """Store ``weight`` times ``factor``; ``rounded`` are places and values that come back otherwise."""
        self.shape, self.dtype, self.table = weight.shape, weight.dtype, table
        # of one dimension, so that half precision times it is float32
        self.scale = torch.tensor([1 / factor], dtype=torch.float32, device="cpu")
        blocks = weight.split(_rows_for(weight, AT_ONCE))
        self._blocks = [torch.ops.quantized.linear_prepack_fp16(block.float() * factor, None) for block in blocks]
        self._rounded = None if table is not None else rounded
        self._divided = self._blocks[0], self._blocks[1:]  # torch takes several microseconds to read a list
        self.in_graphs = torch.empty(0, device="cpu")  # stands for the weight where torch.compile takes only tensors
        self.in_graphs.blocks = self._divided  # type: ignore[attr-defined]
        _scripted()  # compiled now, and not by several threads in their first forwards

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return bytes_in_float16(self.shape, 0 if self.table is None else self.table.nbytes)

    def product(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``states`` (..., inputs) by the transpose of the weight, and add ``bias``."""
        rows = states if states.ndim > 1 else states[None]
        found: Tensor = _scripted()(rows, *self._divided, self.scale, bias)
        return found if states.ndim > 1 else found[0]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` of the table, of any shape: (*ids.shape, inputs)."""
        assert self.table is not None
        return functional.embedding(ids, self.table).to(self.dtype)

    def dense(self) -> Tensor:
        """Return a copy of the values, with the bits they had."""
        if self._rounded is None:
            assert self.table is not None
            return self.table.to(self.dtype)
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        first = 0
        for block in self._blocks:
            own = block.unpack()[0] * self.scale  # (some outputs, inputs), in float32
            found[first : first + len(own)].copy_(own)
            first += len(own)
        places, values = self._rounded
        found.view(-1)[places] = values
        return found


def float16_weight(weight: Tensor, is_looked_up: bool) -> Float16Weight | None:
    """Return ``weight`` (outputs, inputs) as float16 numbers; ``None`` if they would have other values."""
    factor = _factor_of(weight)
    rounded = _rounded_values(weight, factor) if factor else None
    table = _table_of(weight) if is_looked_up and rounded is not None else None
    if rounded is None or (is_looked_up and table is None):
        return None
    return Float16Weight(weight, factor, rounded, table)


def has_avx2_alone() -> bool:
    """Tell whether torch runs kernels for AVX2 here, so that oneDNN multiplies no half precision."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def is_better_in_float16(weight: Tensor, is_looked_up: bool, spare: int) -> bool:
    """Tell whether products with ``weight`` are faster as float16 numbers, and there is memory for it.

    ``spare`` are the bytes that other weights of the model no longer take.
    """
    return (
        has_avx2_alone()  # no other processor was measured
        and "fbgemm" in torch.backends.quantized.supported_engines
        and torch.backends.quantized.engine in ENGINES
        and len(weight) % WIDTH == 0
        and weight.dtype in (torch.float32, *HALF)
        and bytes_in_float16(weight.shape, 2 * weight.numel() if is_looked_up else 0)
        <= MOST_MEMORY * weight.nbytes + max(0, spare)
    )


def bytes_in_float16(shape: torch.Size, table: int) -> int:
    """Return the bytes of a weight of ``shape`` (outputs, inputs) with a ``table`` of so many bytes."""
    return 2 * shape[0] * -(-shape[1] // DEPTH) * DEPTH + table


def product_in_graphs(states: Tensor, weight: Float16Weight, bias: Tensor | None) -> Tensor:
    """Do as ``Float16Weight.product`` in a graph, which joins all but the product with other operations."""
    if states.ndim == 1:
        return product_in_graphs(states[None], weight, bias)[0]
    found: Tensor = _blocks_product(states * weight.scale, weight.in_graphs, weight.shape[0])
    return (found if bias is None else found + bias).to(states.dtype)


def _factor_of(weight: Tensor) -> float:
    """Return the power of two that brings the largest value just below the end of float16; 0 if there is none."""
    least, most = weight.aminmax()
    largest = torch.maximum(-least, most).float()
    if not largest.isfinite():
        return 0.0
    exponent = LARGEST - int(largest.frexp().exponent) if largest and weight.dtype is not torch.float16 else 0
    return 2.0**exponent if abs(exponent) <= FACTORS else 0.0


def _rounded_values(weight: Tensor, factor: float) -> tuple[Tensor, Tensor] | None:
    """Return which values have other bits after they were stored in float16, times ``factor``: places and values.

    ``None`` if they are too many or too large.
    """
    places, values, first = [], [], 0
    for part in weight.split(_rows_for(weight, COMPARED)):
        flat = part.flatten()
        stored = ((flat.float() * factor).half().float() / factor).to(flat.dtype)
        places.append(first + (found := (bits_of(stored) != bits_of(flat)).nonzero().flatten()))
        values.append(flat[found])
        first += len(flat)
        small = values[-1].float() * factor
        are_small = bool(((small - small.half().float()).abs() <= LEAST).all())
        if not are_small or sum(map(len, places)) > ROUNDED * weight.numel():
            return None
    return torch.cat(places), torch.cat(values)


def _table_of(weight: Tensor) -> Tensor | None:
    """Return the values in half precision, or ``None`` if they have none there."""
    parts = weight.split(_rows_for(weight, COMPARED))
    for dtype in HALF:
        if all(torch.equal(bits_of(part.to(dtype).to(weight.dtype)), bits_of(part)) for part in parts):
            return weight.to(dtype)
    return None


def _rows_for(weight: Tensor, values: int) -> int:
    """Return how many rows have so many ``values``, in multiples of what FBGEMM pads to."""
    return max(WIDTH, values // weight.shape[1] // WIDTH * WIDTH)


@functools.cache
def _scripted() -> Callable[..., Tensor]:
    """Return ``_multiply`` without Python in between: torch.ops takes 15 microseconds to look at such a block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[..., Tensor] = torch.jit.script(_multiply)
    return scripted


def _multiply(
    states: Tensor,
    block: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
    others: list[torch.classes.quantized.LinearPackedParamsBase],  # type: ignore[name-defined]
    scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    rows = states if scale is None else states * scale
    found = torch.ops.quantized.linear_dynamic_fp16(rows, block)
    if len(others) > 0:
        parts = [found]
        for other in others:
            parts.append(torch.ops.quantized.linear_dynamic_fp16(rows, other))
        found = torch.cat(parts, -1)
    if bias is not None:
        found.add_(bias)
    return found.to(states.dtype)  # type: ignore[no-any-return]


_blocks_product = quick_operator(
    "blocks_product",
    "Tensor states, Tensor weight, int outputs",
    lambda states, weight, outputs: _scripted()(states, *weight.blocks, None, None),
    lambda states, weight, outputs: states.new_empty(*states.shape[:-1], outputs),
)
