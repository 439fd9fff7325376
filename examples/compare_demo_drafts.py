"""Compare the acceptance of the demo family's drafts over hidden states, on stories that training never saw.

    python examples/prepare_demo_corpus.py --corpus DIR --work WORK
    python examples/compare_demo_drafts.py --stories WORK/validation.jsonl

Each seed chooses its own stories, the same for all drafts. Their beginnings are the prompts. Figures are means over
the seeds with their standard errors: τ, the tokens per forward of the target, in chains and trees, greedily and at
temperature 1. The last column is the time of a proposal for one sequence, which needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import demo

CHAINS: dict[str, Any] = {"tree": None}
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
BATCH = 16


def shapes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of chains and trees by name."""
    trees = {"tree": "dynamic", "tree_topk": options.tree_topk}
    return {"chains": CHAINS} | {f"trees of {one}": trees | {"num_tree_tokens": one} for one in options.tree_tokens}


def prompts(stories: list[str], tokenizer: Any, options: argparse.Namespace, seed: int) -> torch.Tensor:
    """Return the beginnings of some stories, (stories, prompt length)."""
    sample = random.Random(seed).sample(stories, min(options.count, len(stories)))
    return torch.stack(
        [tokenizer(story, return_tensors="pt").input_ids[0, : options.prompt_length] for story in sample]
    )


def measured(target: Any, draft: Any, ids: torch.Tensor, options: argparse.Namespace, **call: Any) -> Any:
    """Return the statistics of generating from prompts ``ids`` (prompts, length)."""
    config = draft.defaults().merge(num_speculative_tokens=options.draft_length, **call.pop("shape"))
    temperature = call["temperature"]
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    calls = [
        target.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=options.new_tokens,
            speculator=draft,
            speculation_config=config,
            return_dict_in_generate=True,
            **how,
        ).speculation
        for batch in ids.split(call["batch"])
    ]
    return hf_spec.SpeculationStats.merge(calls)


def compare(name: str, target: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the figures of one draft, one for each seed."""
    path = demo.path(name) if name in demo.MODELS else name
    draft = AutoModel.from_pretrained(path, dtype=torch.float32)
    stories = [json.loads(line)["text"] for line in options.stories.read_text(encoding="utf-8").splitlines()]
    figures: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        ids = prompts(stories, tokenizer, options, seed)
        for shape, given in shapes(options).items():
            for how, temperature in TEMPERATURES.items():
                stats = measured(target, draft, ids, options, shape=given, temperature=temperature, batch=BATCH)
                figures.setdefault(f"{shape}, {how}", []).append(stats.mean_accepted_length)
        alone = measured(target, draft, ids[:4], options, shape=CHAINS, temperature=0.0, batch=1)
        figures.setdefault("ms per proposal", []).append(1000 * alone.propose_seconds / alone.steps)
    return figures


def cell(values: list[float]) -> str:
    """Write mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="a text in each line")
    parser.add_argument(
        "--drafts", nargs="+", default=list(demo.MODELS[2:]), help="names of the family, or directories"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--count", type=int, default=32, help="stories of each seed")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--draft-length", type=int, default=7, help="of chains, and depth of trees; Medusa has four heads"
    )
    parser.add_argument("--tree-tokens", type=int, nargs="+", default=[12], help="draft tokens of the trees")
    parser.add_argument("--tree-topk", type=int, default=4, help="children of a node")
    options = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    for number, name in enumerate(options.drafts):
        figures = compare(name, target, tokenizer, options)
        if not number:
            print("| |", " | ".join(figures), "|\n|" + "---|" * (1 + len(figures)))
        print(f"| `{name}` |", " | ".join(map(cell, figures.values())), "|", flush=True)


if __name__ == "__main__":
    main()
