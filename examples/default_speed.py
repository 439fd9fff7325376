"""Measure default settings beside plain ``generate``: every draft of the demo family, alone and in batches of eight.

    python examples/default_speed.py
    python examples/default_speed.py --processors  # with a minimum length, a repetition penalty and an n-gram ban

Each call decodes 96 tokens. Methods take turns, so that all of them meet the same machine; a figure is the median of
the ratios of neighbouring calls. "random" is an EAGLE-3 draft of random weights, which is never right. Greedy calls
leave the depth to the clock, sampled ones ask for that (``num_speculative_tokens="auto"``).
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo

PROMPTS = (
    "Once upon a time, there was a little dog",
    "Tom and Lily went to",
    "The sun was shining and",
    "One day a girl named",
    "Ben had a big",
    "In the forest there",
    "Mom said that",
    "A small bird sat",
)
PROCESSORS = {"min_new_tokens": 96, "repetition_penalty": 1.1, "no_repeat_ngram_size": 6}


def drafts() -> dict[str, Any]:
    """Return what guesses, by name."""
    found: dict[str, Any] = {"ngram": "ngram"}
    found["vanilla"] = AutoModelForCausalLM.from_pretrained(demo.path("draft-vanilla"), dtype=torch.float32)
    for kind in ("eagle3", "medusa", "mtp", "dspark"):
        found[kind] = AutoModel.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32)
    torch.manual_seed(0)
    found["random"] = type(found["eagle3"])(found["eagle3"].config).eval()
    return found


def compare(
    target: Any, inputs: Any, ways: dict[str, dict[str, Any]], options: dict[str, Any], rounds: int
) -> list[float]:
    """Return how many times faster than the first of ``ways`` the others are."""

    def seconds(way: dict[str, Any]) -> float:
        torch.manual_seed(1)
        start = time.perf_counter()
        target.generate(**inputs, **options, **way)
        return time.perf_counter() - start

    for way in ways.values():
        seconds(way)  # the first tokens of a process
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(way))
    plain, *others = times.values()
    return [median(base / own for base, own in zip(plain, other, strict=True)) for other in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--fixed", type=int, help="guess so many tokens in every step instead")
    parser.add_argument("--processors", action="store_true", help="use processors that look at the text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo.path(), padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    named = drafts()
    print("| | " + " | ".join(named) + " |\n|---|" + "---|" * len(named))
    for batch in args.batch:
        inputs = tokenizer(list(PROMPTS[:batch]), return_tensors="pt", padding=True)
        for do_sample in (False, True):
            options = {
                "max_new_tokens": args.new_tokens,
                "do_sample": do_sample,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            options |= PROCESSORS if args.processors else {}
            depth = args.fixed or ("auto" if do_sample else None)
            given = {} if depth is None else {"num_speculative_tokens": depth}
            ways = {"plain": {"speculator": False}} | {
                name: {"speculator": one} | given for name, one in named.items()
            }
            ratios = compare(target, inputs, ways, options, args.rounds)
            label = f"batch {batch}, {'sampled' if do_sample else 'greedy'}"
            print(f"| {label} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


if __name__ == "__main__":
    main()
