"""Count what a model's own first layers are worth as a draft, at some exits.

    python examples/early_exits.py                                # the demo target, which was not trained for it
    python examples/early_exits.py --model ORG/MODEL --exits 4 8  # any other

Greedy, the same number of draft tokens in every step. The last column says how many layers a step runs over, in steps
of plain generate: the first layers once for each draft token and once more, the others once. It pays if there are more
tokens per step than that. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import machine  # the folder is no package
from other_tokenizer import PROMPTS

from hf_spec import EarlyExitSpeculator, SpeculationConfig, SpeculationStats, demo
from hf_spec.whole_files import write_files


def figures(model: Any, tokenizer: Any, exit_layer: int, args: argparse.Namespace) -> dict[str, float]:
    """Return what is accepted of the draft tokens that the first ``exit_layer`` layers propose."""
    config = SpeculationConfig(num_speculative_tokens=args.draft_tokens)
    options = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"speculator": EarlyExitSpeculator(exit_layer), "speculation_config": config}
    calls = [
        model.generate(**tokenizer(text, return_tensors="pt"), **options, return_dict_in_generate=True).speculation
        for text in PROMPTS[: args.texts]
    ]
    stats = SpeculationStats.merge(calls)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    passes = exit_layer * (stats.proposed / stats.steps + 1) + layers - exit_layer
    accepted = {"acceptance_rate": stats.acceptance_rate, "mean_accepted_length": stats.mean_accepted_length}
    return accepted | {"plain_steps": passes / layers}


def table(content: dict[str, Any]) -> str:
    """Write a raw file as Markdown."""
    head = ("exit after layer", "accepted draft tokens", "tokens per step (τ)", "layers run per step, in plain steps")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, one in content["exits"].items():
        cells = (
            name,
            f"{one['acceptance_rate']:.0%}",
            f"{one['mean_accepted_length']:.2f}",
            f"{one['plain_steps']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo.path()))
    parser.add_argument("--exits", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    content: dict[str, Any] = {"made_from": machine() | {"argv": sys.argv[1:]}}
    content["exits"] = {str(one): figures(model, tokenizer, one, args) for one in args.exits}
    print(table(content))
    if args.json:
        write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)


if __name__ == "__main__":
    main()
