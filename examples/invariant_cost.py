"""Measure what the mode that is exact to the bit costs, beside the same packed weights outside of it.

    python examples/invariant_cost.py --json costs.json                      # 135 M in float32: about 150 seconds
    python examples/invariant_cost.py --shape llama-1b --dtypes bfloat16     # needs 8 GiB of memory
    python examples/invariant_cost.py --rounds 30 --nodes 1 6 16 32          # more of everything
    python examples/invariant_cost.py --read costs.json                      # the table of such a file

The target is a Llama of random weights, which cost as much as trained ones. A forward reads some tokens, a chain or a
tree of draft tokens, after a text in the cache. Each way has a copy of the target; ways take turns, and a time is the
least of all. Operators are those that torch's profiler sees, with the ones that they call.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import machine  # the folder is no package

import hf_spec
from hf_spec import Proposal
from hf_spec.scoring.factory import runner_for
from hf_spec.whole_files import write_files

# Hidden size, intermediate size, layers, heads, key heads, vocabulary.
SHAPES = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 49_152),
    "llama-1b": (2048, 5632, 22, 32, 4, 32_000),
    "tiny": (64, 128, 2, 4, 2, 256),
}
TREE = 32  # nodes from which on they are a tree
DTYPES = ("float32", "bfloat16", "float16")
WAYS = ("plain", "packed", "invariant")


def model_of(shape: str, dtype: torch.dtype) -> Any:
    hidden, intermediate, layers, heads, key_heads, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def way_of(name: str, model: Any, stack: contextlib.ExitStack) -> Any:
    """Return a copy of ``model`` that computes in a way until the end of ``stack``, and say which."""
    found = copy.deepcopy(model)
    said = "" if name == "plain" else str(stack.enter_context(hf_spec.packed(found)))
    if name == "invariant":
        said += f"; {stack.enter_context(hf_spec.invariant(found))}"
    print(f"{name}: {said}" if said else name, flush=True)
    return found


def proposal_of(nodes: int, is_tree: bool, vocabulary: int) -> Proposal:
    """Return random draft tokens: a chain, or a tree in which each node has two children."""
    tokens = torch.randint(vocabulary, (1, nodes), generator=torch.Generator().manual_seed(nodes))
    parents = torch.tensor([[(node - 1) // 2 if is_tree and node else node - 1 for node in range(nodes)]])
    return Proposal(tokens, parents, nodes - 1, is_chain=not is_tree)


def after_text(model: Any, text: int) -> Any:
    """Return a runner that has read ``text`` tokens."""
    ids = torch.randint(model.config.vocab_size, (1, text), generator=torch.Generator().manual_seed(1))
    runner = runner_for(model, DynamicCache(config=model.config), hidden_states=False, one_chain=False)
    runner.prefill_tokens(ids, torch.ones_like(ids))
    return runner


def scored(runner: Any, proposal: Proposal) -> float:
    """Return the seconds of a forward that scores ``proposal``, and take it back."""
    start = time.perf_counter()
    runner.score(proposal)
    seconds = time.perf_counter() - start
    runner.rollback()
    return seconds


@torch.no_grad()
def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Return seconds and operators by way, length of the text, and number of tokens."""
    model, found = model_of(args.shape, dtype), {}
    with contextlib.ExitStack() as stack:
        models = {way: way_of(way, model, stack) for way in WAYS}
        for text in args.texts:
            runners = {way: after_text(one, text) for way, one in models.items()}
            for nodes in args.nodes:
                proposal = proposal_of(nodes, nodes >= TREE, model.config.vocab_size)
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(args.rounds + 1):
                    for way, runner in runners.items():
                        seconds[way].append(scored(runner, proposal))
                for way, runner in runners.items():
                    # A mode of torch, which sees each operator too, would make packed weights plain.
                    with profile(activities=[ProfilerActivity.CPU]) as profiled:
                        scored(runner, proposal)
                    operators = len(profiled.events())
                    found[f"{way}, {text}, {nodes}"] = {"seconds": min(seconds[way]), "operators": operators}
    return found


def table(content: dict[str, Any]) -> str:
    """Write the tables of a file of ``--json``."""
    lines = []
    for dtype in (name for name in DTYPES if name in content):
        lines += [
            f"{content['shape']}, {dtype}, threads: {content['threads']}",
            "",
            "| text | tokens | plain, ms | packed, ms | exact, ms | ratio to packed | operators, packed | exact |",
            "|---|---|---|---|---|---|---|---|",
        ]
        found = content[dtype]
        for _, text, nodes in (key.split(", ") for key in found if key.startswith("plain")):
            plain, packed, exact = (found[f"{way}, {text}, {nodes}"] for way in WAYS)
            times = " | ".join(f"{one['seconds'] * 1000:.1f}" for one in (plain, packed, exact))
            ratio = exact["seconds"] / packed["seconds"]
            kind = f"{nodes}, tree" if int(nodes) >= TREE else nodes
            lines.append(f"| {text} | {kind} | {times} | {ratio:.2f} | {packed['operators']} | {exact['operators']} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--texts", nargs="+", type=int, default=[256, 1024], help="lengths of the text in the cache")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 6, 32], help=f"tokens; from {TREE} on, a tree")
    parser.add_argument("--rounds", type=int, default=10, help="of each forward")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and all figures")
    parser.add_argument("--read", type=Path, help="measure nothing: write the table of a file of --json")
    args = parser.parse_args()
    if args.read:
        print(table(json.loads(args.read.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(args.threads)
    kept: dict[str, Any] = {"made_from": machine() | {"argv": sys.argv[1:]}}
    kept |= {"shape": args.shape, "threads": args.threads}
    for dtype in args.dtypes:
        kept[dtype] = measure(args, getattr(torch, dtype))
        if args.json:
            write_files({args.json.name: json.dumps(kept, indent=1) + "\n"}, args.json.absolute().parent)
    print(table(kept))


if __name__ == "__main__":
    main()
