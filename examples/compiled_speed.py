"""Measure plain and speculative decoding, eager and compiled, side by side in one run.

    python examples/compiled_speed.py                                    # the demo target, float32, one core
    python examples/compiled_speed.py --json compiled.json               # keeps the figures; the same command goes on
    python examples/compiled_speed.py --device cuda --dtype bfloat16 --shape 1b 8b --batch 1 8 32

All methods decode the same prompts and take turns. Two rounds warm up and compile. The table shows the fastest of the
other rounds, as tokens per second and relative to plain, and what target, draft and the rest took of its seconds by
the shares in one more call. With `--sample`, texts differ by round, and it shows their
mean. Shapes other than "demo" are the demo target inflated: to 0.2 billion parameters, and to about the sizes of Llama
3.2 1B and Llama 3.1 8B, without their vocabulary. Text and acceptance stay those of the demo target. On CUDA, mode
"reduce-overhead" uses CUDA graphs. The last column says whether texts are those of plain `generate`. In 16 bits
near-ties may change, compiled or not. With the draft model, assisted generation runs, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import earlier, machine  # the folder is no package

from hf_spec import SpeculationConfig, demo
from hf_spec.bench.gpu.decoding import PROMPTS
from hf_spec.bench.runner import parts_of
from hf_spec.demo.inflation import Narrowed, inflate
from hf_spec.drafts.base import network_of
from hf_spec.whole_files import write_files

SHAPES = {
    "demo": None,  # or hidden size, intermediate size, layers
    "0.2b": (1008, 4032, 14),
    "1b": (2016, 8192, 16),
    "8b": (4032, 14336, 32),
}


def models(shape: str, device: str, dtype: torch.dtype, draft: str) -> tuple[Any, Any]:
    """Load the demo target, inflated to ``shape``, and a draft for it."""
    small = LlamaForCausalLM.from_pretrained(demo.path(), dtype=dtype).to(device).eval()
    auto: Any = AutoModelForCausalLM if draft == "vanilla" else AutoModel
    model: Any = auto.from_pretrained(demo.path(f"draft-{draft}"), dtype=dtype).to(device).eval()
    if (sizes := SHAPES[shape]) is None:
        return small, model
    return inflate(small, *sizes), model if draft == "vanilla" else Narrowed(model, small)


def measure(methods: dict[str, Callable[[], Any]], rounds: int, of_all: Callable[..., float]) -> Any:
    """Return ``of_all`` the seconds of each method's rounds, and what the last one returned."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    returned: dict[str, Any] = {}
    for number in range(rounds + 2):
        for name, run in methods.items():
            torch.manual_seed(number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            returned[name] = run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            if number < 2:
                print(f"    warming up: {name}, {took:.1f} s", flush=True)
            else:
                seconds[name].append(took)
    return {name: (of_all(seconds[name]), returned[name]) for name in methods}


def compare(shape: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one table."""
    dtype = getattr(torch, args.dtype)
    target, draft = models(shape, args.device, dtype, args.draft)
    tokenizer = AutoTokenizer.from_pretrained(demo.path(), padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [PROMPTS[row % len(PROMPTS)] for row in range(batch)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(args.device)
    config = CompileConfig(fullgraph=True, backend=args.backend, mode=args.mode)
    config._compile_all_devices = True  # on a CPU, too
    options = {"max_new_tokens": args.tokens, "do_sample": args.sample, "eos_token_id": None}
    options |= {"pad_token_id": tokenizer.pad_token_id, "return_dict_in_generate": True}
    options |= {"temperature": 1.0, "top_k": 0} if args.sample else {}
    compiled = {"cache_implementation": "static", "compile_config": config}
    tree = args.tree or None
    length = args.draft_length or None
    settings = SpeculationConfig(num_speculative_tokens=length, tree=tree, tree_topk=4, num_tree_tokens=args.nodes)
    ours = {"speculator": draft, "speculation_config": settings}
    ways: dict[str, dict[str, Any]] = {
        "plain, eager": {},
        "plain, compiled": compiled,
        f"{args.draft}, eager": ours,
        f"{args.draft}, compiled": ours | compiled,
    }
    if args.draft == "vanilla" and batch == 1:
        draft.generation_config.update(
            num_assistant_tokens=args.draft_length or 5,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        ways["assisted, eager"] = {"assistant_model": draft}
    methods = {name: lambda way=way: target.generate(**inputs, **options, **way) for name, way in ways.items()}
    found = measure(methods, args.rounds, statistics.mean if args.sample else min)
    plain = found["plain, eager"][1].sequences
    rows = {}
    for name, (seconds, out) in found.items():
        stats = getattr(out, "speculation", None)
        same = "sampled" if args.sample else "yes" if torch.equal(out.sequences, plain) else "no"
        length = stats.mean_accepted_length if stats else None
        network = network_of(draft) if {"speculator", "assistant_model"} & ways[name].keys() else None
        rows[name] = {"seconds": seconds, "accepted_length": length, "same_text": same}
        # Compiled drafting calls no module of the draft, so that the clock would see it in the prompt only.
        is_seen = network is None or not name.endswith("compiled")
        rows[name]["parts"] = parts_of(seconds, target, network, methods[name]) if is_seen else None
    return {"title": title(shape, batch, args), "tokens": batch * args.tokens, "rows": rows}


def title(shape: str, batch: int, args: argparse.Namespace) -> str:
    """Name a table by what it was measured with."""
    chain = f"{args.draft_length} draft tokens" if args.draft_length else "adaptive draft length"
    return f"{shape}, {args.dtype}, batch {batch}, {args.tokens} tokens, {chain}, {args.device}"


def written(found: dict[str, Any]) -> str:
    """Write one table."""
    rows = found["rows"]
    bases = [rows[name]["seconds"] for name in ("plain, eager", "plain, compiled")]
    head = ("", "tokens/s", "x plain eager", "x plain compiled", "seconds", "target", "draft", "rest")
    lines = [found["title"], "", f"| {' | '.join((*head, 'tokens per step', 'same text'))} |", f"|{'---|' * 10}"]
    for name, one in rows.items():
        cells = [name, f"{found['tokens'] / one['seconds']:.0f}", *(f"{base / one['seconds']:.2f}" for base in bases)]
        cells += [
            f"{one['seconds']:.3f}",
            *(["?"] * 3 if one["parts"] is None else [f"{it:.3f}" for it in one["parts"]]),
        ]
        unknown = "1" if name.startswith("plain") else "?"
        cells += [unknown if one["accepted_length"] is None else f"{one['accepted_length']:.2f}", one["same_text"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["demo"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--draft", choices=("eagle3", "mtp", "medusa", "dspark", "vanilla"), default="eagle3")
    parser.add_argument(
        "--tree", choices=("", "dynamic", "sampled"), default="", help="of draft tokens; empty for a chain"
    )
    parser.add_argument("--nodes", type=int, default=12, help="of a tree")
    parser.add_argument(
        "--draft-length",
        type=int,
        nargs="+",
        default=[5],
        help="one, or one for each batch; 0: adaptive, as by default",
    )
    parser.add_argument("--sample", action="store_true", help="sample at temperature 1 instead of greedy decoding")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="cores of a CPU")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--mode", help="of torch.compile: default on a CPU, reduce-overhead elsewhere")
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures")
    args = parser.parse_args()
    lengths = args.draft_length * len(args.batch) if len(args.draft_length) == 1 else args.draft_length
    if len(lengths) != len(args.batch):
        parser.error(f"--draft-length: give one, or {len(args.batch)}, one for each --batch")
    if args.backend == "inductor":
        args.mode = args.mode or ("default" if args.device == "cpu" else "reduce-overhead")
    torch.set_num_threads(args.threads)
    made_from = machine() | {"argv": sys.argv[1:]}
    kept: dict[str, Any] = {"made_from": made_from, "tables": []} | earlier(args.json, made_from)
    for shape in args.shape:
        for batch, length in zip(args.batch, lengths, strict=True):
            args.draft_length = length
            if title(shape, batch, args) in [one["title"] for one in kept["tables"]]:
                continue
            kept["tables"].append(compare(shape, batch, args))
            print(f"\n{written(kept['tables'][-1])}", flush=True)
            if args.json:
                write_files({args.json.name: json.dumps(kept, indent=1) + "\n"}, args.json.absolute().parent)


if __name__ == "__main__":
    main()
