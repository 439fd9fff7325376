"""Measure what packed weights gain in forwards over some tokens, plain and packed in turns.

    python examples/packed_forwards.py --json packed.json
    python examples/packed_forwards.py --shapes llama-1b --dtypes bfloat16 --tokens 1 6 16 --cores 1 2

The model is a Llama of random weights, which cost as much as trained ones. A forward reads some tokens without a text
before them. A figure is the least of all turns. Where ``pack`` leaves all weights plain, they are packed by force,
because such a processor is worth a look, too. Rows that the raw file has are not measured again.

The dtype "float32/bfloat16" is float32 with values of bfloat16, as in a checkpoint of that dtype.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import earlier, machine  # the folder is no package
from invariant_cost import SHAPES, model_of

import hf_spec
from hf_spec.whole_files import write_files


@torch.no_grad()
def least(model: Any, ids: torch.Tensor, times: int) -> float:
    """Return the seconds of the fastest of some forwards."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False)
        found.append(time.perf_counter() - start)
    return min(found)


def measure(shape: str, dtype: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the milliseconds of forwards, plain and packed, by the number of tokens."""
    own, _, values = dtype.partition("/")
    model = model_of(shape, getattr(torch, values or own)).to(getattr(torch, own))
    found: dict[str, dict[str, float]] = {"plain": {}, "packed": {}}
    for _ in range(args.turns):
        for way, times in found.items():
            if way == "packed" and not hf_spec.pack(model).packed:
                hf_spec.pack(model, force=True)
            for count in args.tokens:
                ids = torch.arange(count)[None] % model.config.vocab_size
                took = 1000 * least(model, ids, args.times + 1)  # the first one warms up
                times[str(count)] = min(times.get(str(count), took), took)
            hf_spec.unpack(model)
    return found


def table(content: dict[str, Any]) -> str:
    """Write the milliseconds of a raw file as Markdown."""
    tokens = list(next(iter(content["forwards"].values()))["plain"])
    lines = [f"| tokens | {' | '.join(tokens)} |", f"|{'---|' * (1 + len(tokens))}"]
    for name, ways in content["forwards"].items():
        for way, times in ways.items():
            lines.append(f"| {name}, {way} | {' | '.join(f'{times[one]:.1f}' for one in tokens)} |")
        ratios = (ways["packed"][one] / ways["plain"][one] for one in tokens)
        lines.append(f"| {name}, packed / plain | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-135m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32/bfloat16", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16, 32, 64])
    parser.add_argument("--cores", type=int, nargs="+", default=[1])
    parser.add_argument("--times", type=int, default=4, help="forwards of each number of tokens in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures")
    args = parser.parse_args()
    made_from = machine() | {"argv": sys.argv[1:]}
    content: dict[str, Any] = {"made_from": made_from, "forwards": {}} | earlier(args.json, made_from)
    for cores, shape, dtype in itertools.product(args.cores, args.shapes, args.dtypes):
        torch.set_num_threads(cores)
        name = f"{shape}, {dtype}" + (f", {cores} cores" if cores > 1 else "")
        if name not in content["forwards"]:
            content["forwards"][name] = measure(shape, dtype, args)
            if args.json:
                write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)
    print(table(content))


if __name__ == "__main__":
    main()
