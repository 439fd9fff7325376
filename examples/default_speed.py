"""Compare default settings with plain ``generate``: every draft of the demo family, batch sizes 1 and 8.

    python examples/default_speed.py
    python examples/default_speed.py --processors  # with a minimum length, a repetition penalty and an n-gram ban
    python examples/default_speed.py --size 1152 4608 16 --batch 1 --assisted 3 5 8  # a target of 300 M parameters
    python examples/default_speed.py --packed --cores 2  # plain and speculative calls with packed weights
    python examples/default_speed.py --json speeds.json            # keeps the seconds of every call, and goes on
    python examples/default_speed.py --read speeds.json                              # the table of such a file

Each call decodes 96 tokens. Methods take turns, so that drift of the machine affects all of them. A figure is the
median of the ratios of neighbouring calls. In brackets: the seconds of target, draft and the rest, by the shares in
one more call. "random" is an EAGLE-3 draft of random weights, never accepted. The draft length is adaptive. Calls that
sample have a seed, so their length does not depend on measured times. "assisted" is assisted generation of
transformers, one prompt at a time, with the draft model and a fixed number of its tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import earlier, machine  # the folder is no package

import hf_spec
from hf_spec import demo
from hf_spec.bench.runner import parts_of
from hf_spec.demo.inflation import Narrowed, inflate
from hf_spec.drafts.base import network_of
from hf_spec.whole_files import write_files

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
DRAFTS = ("ngram", "vanilla", "eagle3", "medusa", "mtp", "dspark", "random")
PROCESSORS = {"min_new_tokens": 96, "repetition_penalty": 1.1, "no_repeat_ngram_size": 6}


def drafts(small: Any, is_inflated: bool) -> dict[str, Any]:
    """Return the drafts by name, for a target that ``small`` was inflated to, or for ``small``."""
    found: dict[str, Any] = {"ngram": "ngram"}
    found["vanilla"] = AutoModelForCausalLM.from_pretrained(demo.path("draft-vanilla"), dtype=torch.float32)
    for kind in ("eagle3", "medusa", "mtp", "dspark"):
        found[kind] = AutoModel.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32)
    torch.manual_seed(0)
    found["random"] = type(found["eagle3"])(found["eagle3"].config).eval()
    if is_inflated:
        found |= {name: Narrowed(one, small) for name, one in found.items() if name not in ("ngram", "vanilla")}
    return found


def assisted(small: Any, tokens: int) -> dict[str, Any]:
    """Return the options of assisted generation with ``tokens`` draft tokens in every step."""
    assistant = copy.deepcopy(small)
    assistant.generation_config.update(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return {"speculator": False, "assistant_model": assistant}


def compare(
    target: Any, inputs: Any, ways: dict[str, dict[str, Any]], options: dict[str, Any], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of every call of each of ``ways``, and those of target, draft and the rest in one."""

    def run(way: dict[str, Any]) -> None:
        torch.manual_seed(1)
        target.generate(**inputs, **options, **way)

    def seconds(way: dict[str, Any]) -> float:
        start = time.perf_counter()
        run(way)
        return time.perf_counter() - start

    for way in ways.values():
        seconds(way)  # the first tokens of a process
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(way))
    parts = {}
    for name, way in ways.items():
        draft = way.get("assistant_model", way["speculator"])
        network = None if isinstance(draft, str | bool) else network_of(draft)
        given, again = (median(times[name]), target), partial(run, way)
        # An adaptive length may be 0 throughout; then the draft is not called.
        parts[name] = parts_of(*given, network, again) or parts_of(*given, None, again)
    return times, parts


def row(label: str, times: dict[str, list[float]], parts: dict[str, Any]) -> str:
    """Write a row of the table: how many times faster than the first way the others are, and the parts of each."""
    plain, *others = times.values()
    ratios = [1.0, *(median(base / own for base, own in zip(plain, other, strict=True)) for other in others)]
    cells = [f"{ratio:.2f}" for ratio in ratios]
    if parts:
        seconds = (" + ".join(f"{one:.2f}" for one in parts[name] or (median(times[name]),)) for name in times)
        cells = [f"{cell} ({one} s)" for cell, one in zip(cells, seconds, strict=True)]
    return f"| {label} | {' | '.join(cells)} |"


def header(names: Sequence[str]) -> str:
    """Write the first two rows of the table."""
    return "| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names)


def table(content: dict[str, Any]) -> str:
    """Write the table of a raw file; early ones have no parts."""
    kept, parts = content["seconds"], content.get("parts", {})
    rows = [row(label, times, parts.get(label, {})) for label, times in kept.items()]
    return "\n".join([header(list(next(iter(kept.values())))), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--fixed", type=int, help="draft tokens of every step, instead of an adaptive number")
    parser.add_argument("--processors", action="store_true", help="use processors that look at the text")
    parser.add_argument(
        "--size", type=int, nargs=3, metavar=("HIDDEN", "MLP", "LAYERS"), help="inflate the target to it"
    )
    parser.add_argument("--packed", action="store_true", help="pack the weights of the target and of its drafts")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument(
        "--assisted", type=int, nargs="+", default=[], help="also measure assisted generation with these draft lengths"
    )
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, help="only these")
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the seconds of every call")
    parser.add_argument("--read", type=Path, help="measure nothing: write the table of a file of --json")
    args = parser.parse_args()
    if args.read:
        print(table(json.loads(args.read.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(args.cores)
    tokenizer = AutoTokenizer.from_pretrained(demo.path(), padding_side="left")
    small = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    target = inflate(small, *args.size) if args.size else small
    named = drafts(small, bool(args.size))
    peers = {f"assisted, {tokens}": assisted(named["vanilla"], tokens) for tokens in args.assisted}
    named = {name: named[name] for name in args.drafts or named}
    if peers and args.batch != [1]:
        parser.error("assisted generation takes one prompt at a time: --batch 1")
    if args.packed:
        models = [one for one in named.values() if one != "ngram"]
        models += [way["assistant_model"] for way in peers.values()]
        print(hf_spec.pack(target, *models, force=True), file=sys.stderr)
    print(header(["plain", *named, *peers]))
    made_from = machine() | {"argv": sys.argv[1:]}
    kept: dict[str, Any] = {"made_from": made_from, "seconds": {}, "parts": {}} | earlier(args.json, made_from)
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
            given = {} if args.fixed is None else {"num_speculative_tokens": args.fixed}
            ways = {"plain": {"speculator": False}} | {
                name: {"speculator": one} | given for name, one in named.items()
            }
            label = f"batch {batch}, {'sampled' if do_sample else 'greedy'}"
            if label not in kept["seconds"]:
                found = compare(target, inputs, ways | peers, options, args.rounds)
                kept["seconds"][label], kept["parts"][label] = found
                if args.json:
                    write_files({args.json.name: json.dumps(kept, indent=1) + "\n"}, args.json.absolute().parent)
            print(row(label, kept["seconds"][label], kept["parts"].get(label, {})), flush=True)


if __name__ == "__main__":
    main()
