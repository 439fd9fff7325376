"""Measure prompts of unequal length in one batch: plain generate, and plain steps of hf_spec, in turns.

    python examples/padded_prompts.py --json padded.json
    python examples/padded_prompts.py --shape tiny --rounds 1

The model is a Llama of random weights, which cost as much as trained ones. The first token is that of the prompts; the
other steps are one figure, their median. The run ends with an error if the two write other texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import machine  # the folder is no package
from invariant_cost import SHAPES, model_of
from step_costs import Timestamps

from hf_spec.whole_files import write_files

LENGTHS = (40, 52, 61, 70, 84, 101, 138, 769)
WAYS = {"plain `generate`": False, '`speculator="plain"`': "plain"}


def times_of(model: Any, lengths: tuple[int, ...], speculator: Any, tokens: int) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of the first token and of each step after it, and the texts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - one).long() for one in lengths])
    clock = Timestamps()
    options = {"max_new_tokens": tokens, "do_sample": False, "stopping_criteria": StoppingCriteriaList([clock])}
    start = perf_counter()
    out = model.generate(input_ids=ids * mask, attention_mask=mask, speculator=speculator, **options)
    first, *others = (after - before for before, after in pairwise([start, *clock.times]))
    return [first, median(others)], out


def table(content: dict[str, Any]) -> str:
    """Write a raw file as Markdown."""
    lines = [f"| seconds | {' | '.join(content['seconds'])} |", f"|{'---|' * (1 + len(content['seconds']))}"]
    for place, name in enumerate(("the first token", "each step after it")):
        cells = (", ".join(f"{one[place]:.3g}" for one in rounds) for rounds in content["seconds"].values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(args.shape, torch.float32)
    model.generation_config.pad_token_id = 0
    times_of(model, (5, 9), "plain", 3)  # warms up, and is the target's self-check
    content: dict[str, Any] = {"made_from": machine() | {"argv": sys.argv[1:]}, "seconds": {}}
    texts = []
    for _ in range(args.rounds):
        for name, speculator in WAYS.items():
            seconds, text = times_of(model, tuple(args.lengths), speculator, args.tokens)
            content["seconds"].setdefault(name, []).append(seconds)
            texts.append(text)
    if not all(torch.equal(text, texts[0]) for text in texts):
        sys.exit("the texts differ")
    print(table(content))
    if args.json:
        write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)


if __name__ == "__main__":
    main()
