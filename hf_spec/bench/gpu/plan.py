"""What is measured, in parts that take minutes at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .decoding import BATCHED, SINGLE, Cells, trees, ways_at
from .training import training_step

PART_SECONDS = 540  # after which a part begins no further cell; one of them takes less than a minute
TINY, ONE, EIGHT = "tiny", "1b", "8b"
# Hidden size, intermediate size, layers: about Llama 3.2 1B and Llama 3.1 8B, without their vocabulary.
SHAPES: dict[str, tuple[int, int, int] | None] = {TINY: None, ONE: (2016, 8192, 16), EIGHT: (4032, 14336, 32)}
TREE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Part:
    """One table: ``cells`` lists the names of its cells, each with the function that measures it."""

    name: str
    title: str
    cells: Callable[[], Cells]


def parts(tiny: bool, device: str) -> list[Part]:
    """List the parts, the most wanted first."""
    shapes = [TINY] if tiny else [ONE, EIGHT]
    found = []
    for shape in shapes:
        for batch in (1, 2) if tiny else (1, 8, 32):
            found.append(_decoding(shape, batch, SINGLE if batch == 1 else BATCHED, device))
        title = f"Trees of draft tokens, {shape}, one sequence"
        ways = trees((4, 8) if tiny else TREE_SIZES)
        found.append(Part(f"trees-{shape}", title, partial(ways_at, SHAPES[shape], 1, ways, device)))
    tokens = 64 if tiny else 4096
    for shape in shapes:
        title = f"A training step of EAGLE-3, {shape}, {tokens:,} tokens"
        found.append(Part(f"training-{shape}", title, partial(training_step, SHAPES[shape], tokens, device)))
    return found


def _decoding(shape: str, batch: int, ways: tuple[str, ...], device: str) -> Part:
    title = f"Decoding, {shape}, {batch} sequence{'s' if batch > 1 else ''}"
    return Part(f"decoding-{shape}-{batch}", title, partial(ways_at, SHAPES[shape], batch, ways, device))
