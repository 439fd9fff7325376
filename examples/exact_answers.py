"""Count the answers of a chat model that change with the draft or the batch: without and with bits that are exact.

    python examples/exact_answers.py TARGET spec_bench.jsonl --json answers.json                # 200 answers
    python examples/exact_answers.py TARGET spec_bench.jsonl --json answers.json --answers 48   # fewer
    python examples/exact_answers.py TARGET spec_bench.jsonl --json answers.json --outside 48   # fewer outside of it
    python examples/exact_answers.py TARGET spec_bench.jsonl --json answers.json --packed       # with packed weights
    python examples/exact_answers.py --read answers.json                                        # the file's table

Every answer is compared with what plain ``generate`` writes for that prompt alone, outside of ``hf_spec.invariant``
or in it. The prompts are the shortest of the file. The draft model is the target with noise in its weights. So some of
its draft tokens are accepted, and some are not. Draft lengths are fixed, so that a text does not depend on a clock.

Eight answers make a round. The file is replaced after each round, and the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import file_digest, files_digest, machine, made_otherwise  # the folder is no package

import hf_spec
from hf_spec import EarlyExitSpeculator, HybridSpeculator, NgramSpeculator, SpeculationConfig
from hf_spec.bench import read_prompts
from hf_spec.whole_files import write_files

BATCHES = (1, 4, 8)
ROUND = max(BATCHES)
HISTORY = 100_000  # tokens
NOISE = 0.02  # of a weight's own size
MODES = ("outside", "in the mode")


def noisy(target: Any) -> Any:
    """Return a copy of ``target`` whose weights have noise."""
    draft = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + NOISE * torch.randn_like(weight))
    return draft


def ways_of(target: Any, draft: Any) -> dict[str, dict[str, Any]]:
    """Return options of ``generate`` by the name of a way."""
    chain = SpeculationConfig(num_speculative_tokens=4)
    tree = SpeculationConfig(num_speculative_tokens=4, tree="dynamic", num_tree_tokens=12)
    layers = target.config.num_hidden_layers
    drafts: dict[str, tuple[Any, SpeculationConfig]] = {
        "n-grams": (NgramSpeculator(), chain),
        "history of n-grams": (NgramSpeculator(history_size=HISTORY), chain),
        "early exit": (EarlyExitSpeculator(layers * 2 // 3), chain),
        "draft model": (draft, chain),
        "draft model, trees": (draft, tree),
        "history and draft model": (HybridSpeculator(draft), chain),
    }
    plain = {"plain": {"speculator": False}}
    return plain | {name: {"speculator": one, "speculation_config": config} for name, (one, config) in drafts.items()}


def answered(
    target: Any, prompts: Sequence[list[int]], new_tokens: int, options: dict[str, Any]
) -> tuple[list[list[int]], int]:
    """Return greedy answers to ``prompts`` in one batch, and how many of their tokens were accepted draft tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    given = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    out = target.generate(ids, **given, **options, return_dict_in_generate=True)
    stats = getattr(out, "speculation", None)
    return out.sequences[:, longest:].tolist(), 0 if stats is None else sum(stats.counts.accepted_at)


def without_padding(tokens: list[int], ends: set[int]) -> list[int]:
    """Return ``tokens`` up to the first end of a text."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def round_of(
    target: Any, ways: dict[str, dict[str, Any]], prompts: Sequence[list[int]], new_tokens: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield for each way and size of batches how many answers differ from plain ones, alone."""
    wanted = target.generation_config.eos_token_id
    ends = set(wanted) if isinstance(wanted, list) else {wanted}

    def texts(size: int, options: dict[str, Any]) -> tuple[list[list[int]], int]:
        rows, accepted = [], 0
        for begin in range(0, len(prompts), size):
            found, more = answered(target, prompts[begin : begin + size], new_tokens, options)
            rows += [without_padding(row, ends) for row in found]
            accepted += more
        return rows, accepted

    alone, _ = texts(1, ways["plain"])
    for name, options in ways.items():
        for size in BATCHES:
            rows, accepted = texts(size, options)
            differ = sum(one != other for one, other in zip(rows, alone, strict=True))
            tokens = sum(map(len, rows))
            yield f"{name}, {size}", {"answers": len(rows), "differ": differ, "tokens": tokens, "accepted": accepted}


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Add the rounds that are missing to the file."""
    settings = {"target": Path(args.target).name, "dtype": args.dtype, "new_tokens": args.new_tokens}
    settings |= {"packed": args.packed, "threads": torch.get_num_threads(), "weights": files_digest(args.target)}
    settings |= {"prompts": file_digest(args.prompts)}
    here = machine()
    content: dict[str, Any] = {"made_from": here, "settings": settings, "rounds": {mode: [] for mode in MODES}}
    if args.json.exists():
        content = json.loads(args.json.read_text(encoding="utf-8"))
        if content["settings"] != settings:
            other = ", ".join(name for name in settings if content["settings"].get(name) != settings[name])
            raise SystemExit(f"{args.json} has other settings ({other}): {content['settings']}; name another file")
        if other := made_otherwise(content["made_from"], here):
            raise SystemExit(f"{args.json} was made with {', '.join(other)}; name another file")
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = sorted((one.render([], tokenizer) for one in read_prompts(args.prompts)), key=len)
    counts = (args.answers if args.outside is None else args.outside, args.answers)
    wanted = {mode: min(count, len(prompts)) for mode, count in zip(MODES, counts, strict=True)}
    targets, draft = dict(zip(MODES, (copy.deepcopy(target), target), strict=True)), noisy(target)
    if args.packed:
        print(hf_spec.pack(*targets.values(), draft), flush=True)
    ways = {mode: ways_of(one, draft) for mode, one in targets.items()}
    with hf_spec.invariant(target) as on:
        print(on, flush=True)
        # The mode with fewer answers is next, so that a run that is stopped has compared as many in both.
        while some_left := [(done, one) for one in MODES if (done := answers_in(content, one)) < wanted[one]]:
            begin, mode = min(some_left)
            some = prompts[begin : min(begin + ROUND, wanted[mode])]
            content["rounds"][mode].append(dict(round_of(targets[mode], ways[mode], some, args.new_tokens)))
            write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.parent)
            print(f"{mode}: {begin + len(some)} answers", flush=True)


def answers_in(content: dict[str, Any], mode: str) -> int:
    """Return how many answers have been compared."""
    return sum(one["plain, 1"]["answers"] for one in content["rounds"][mode])


def table(content: dict[str, Any]) -> str:
    """Write the table of a file of ``--json``."""
    settings, sums = content["settings"], {mode: summed(content["rounds"][mode]) for mode in MODES}
    outside, inside = (answers_in(content, mode) for mode in MODES)
    kind = f"{settings['dtype']}{', packed' * settings['packed']}, {settings['threads']} thread(s)"
    counts = f"{inside} answers in the mode and {outside} outside"
    title = f"{settings['target']}, {kind}: {counts}, of at most {settings['new_tokens']} tokens"
    sizes = [f"{mode}, batches of {size}" for mode in MODES for size in BATCHES]
    header = ["different answers", *sizes, "accepted draft tokens"]
    lines = [title, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name in dict.fromkeys(cell.rpartition(", ")[0] for cell in sums["in the mode"]):
        cells = [sums[mode].get(f"{name}, {size}") for mode in MODES for size in BATCHES]
        counts = " | ".join("-" if one is None else str(one["differ"]) for one in cells)
        found = [one for one in cells[len(BATCHES) :] if one is not None]
        share = sum(one["accepted"] for one in found) / sum(one["tokens"] for one in found)
        lines.append(f"| {name} | {counts} | {share:.0%} of the text |")
    return "\n".join(lines) + "\n"


def summed(rounds: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up the rounds of a mode, cell by cell."""
    found: dict[str, dict[str, int]] = {}
    for one in rounds:
        for cell, numbers in one.items():
            before = found.get(cell, {})
            found[cell] = {name: before.get(name, 0) + number for name, number in numbers.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="a chat model")
    parser.add_argument("prompts", nargs="?", type=Path, help="prompts of hf-spec bench")
    parser.add_argument("--json", type=Path, help="raw file")
    parser.add_argument("--read", type=Path, help="measure nothing; print the table of this file")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--outside", type=int, help="answers outside of the mode; by default as many")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--packed", action="store_true", help="pack the weights of target and draft")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args()
    if args.read is None:
        if None in (args.target, args.prompts, args.json):
            parser.error("TARGET, PROMPTS and --json are needed, or --read FILE")
        measure(args)
    print(table(json.loads((args.read or args.json).read_text(encoding="utf-8"))), end="")


if __name__ == "__main__":
    main()
