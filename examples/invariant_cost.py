"""Measure what the mode that is exact to the bit costs, beside the same packed weights outside of it.

    python examples/invariant_cost.py --json costs.json
    python examples/invariant_cost.py --shape llama-1b --dtypes bfloat16

The target is a Llama of random weights, which cost as much as trained ones. A forward reads some tokens, a chain or a
tree of draft tokens, after a text in the cache. Ways take turns, and times are medians. Operators are counted where
torch dispatches them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_spec
from hf_spec import Proposal
from hf_spec.scoring.factory import runner_for

# Hidden size, intermediate size, layers, heads, key heads, vocabulary.
SHAPES = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 49_152),
    "llama-1b": (2048, 5632, 22, 32, 4, 32_000),
    "tiny": (64, 128, 2, 4, 2, 256),
}
FORWARDS = {"1": (1, False), "6": (6, False), "16": (16, False), "32, tree": (32, True)}  # nodes, whether a tree
WAYS = ("plain", "packed", "invariant")


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


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


@contextlib.contextmanager
def way_of(name: str, model: Any) -> Iterator[str]:
    """Let ``model`` compute in a way, and yield what is said of it."""
    with contextlib.ExitStack() as stack:
        said = "" if name == "plain" else str(stack.enter_context(hf_spec.packed(model)))
        yield said if name != "invariant" else f"{said}; {stack.enter_context(hf_spec.invariant(model))}"


def proposal_of(nodes: int, is_tree: bool, vocabulary: int) -> Proposal:
    """Return random draft tokens: a chain, or a tree in which each node has two children."""
    tokens = torch.randint(vocabulary, (1, nodes), generator=torch.Generator().manual_seed(nodes))
    parents = torch.tensor([[(node - 1) // 2 if is_tree and node else node - 1 for node in range(nodes)]])
    return Proposal(tokens, parents, nodes - 1, is_chain=not is_tree)


@torch.no_grad()
def forwards(model: Any, text: int, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return the seconds and the operators of each forward after ``text`` tokens."""
    ids = torch.randint(model.config.vocab_size, (1, text), generator=torch.Generator().manual_seed(1))
    runner = runner_for(model, DynamicCache(config=model.config), hidden_states=False, one_chain=False)
    runner.prefill_tokens(ids, torch.ones_like(ids))
    found = {}
    for name, (nodes, is_tree) in FORWARDS.items():
        proposal, seconds = proposal_of(nodes, is_tree, model.config.vocab_size), []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            runner.score(proposal)
            seconds.append(time.perf_counter() - start)
            runner.rollback()
        with Count() as count:
            runner.score(proposal)
        runner.rollback()
        found[name] = seconds[1:], count.operators  # without the first, which warms up
    return found


def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Return seconds and operators by way, length of the text, and forward."""
    model, table = model_of(args.shape, dtype), {}
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(args.turns):
        for way in WAYS:
            with way_of(way, model) as said:
                print(f"{way}: {said}" if said else way)
                for text in args.texts:
                    for name, (times, operators) in forwards(model, text, args.rounds).items():
                        seconds.setdefault((way, text, name), []).extend(times)
                        table[f"{way}, {text}, {name}"] = {"operators": operators}
    for (way, text, name), times in seconds.items():
        table[f"{way}, {text}, {name}"]["seconds"] = median(times)
    return table


def show(table: dict[str, Any], texts: list[int]) -> None:
    print(
        "| text | tokens | plain, ms | packed, ms | invariant, ms | ratio to packed | operators, packed | invariant |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for text in texts:
        for name in FORWARDS:
            plain, packed, exact = (table[f"{way}, {text}, {name}"] for way in WAYS)
            times = " | ".join(f"{one['seconds'] * 1000:.1f}" for one in (plain, packed, exact))
            ratio = exact["seconds"] / packed["seconds"]
            print(f"| {text} | {name} | {times} | {ratio:.2f} | {packed['operators']} | {exact['operators']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--texts", nargs="+", type=int, default=[256, 1024], help="lengths of the text in the cache")
    parser.add_argument("--rounds", type=int, default=10, help="of each forward in a turn")
    parser.add_argument("--turns", type=int, default=3, help="of the three ways")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {}
    for dtype in args.dtypes:
        found[dtype] = measure(args, getattr(torch, dtype))
        print(f"\n{args.shape}, {dtype}, {args.threads} threads\n")
        show(found[dtype], args.texts)
        if args.json:
            args.json.write_text(
                json.dumps({"shape": args.shape, "threads": args.threads, **found}, indent=1), "utf-8"
            )


if __name__ == "__main__":
    main()
