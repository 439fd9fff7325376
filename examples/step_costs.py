"""Measure the cost of a step over draft tokens, batch size, prompt length and vocabulary.

    python examples/step_costs.py --json costs.json --png docs/step-costs.png
    python examples/step_costs.py --hidden 4096 --layers 32 --dtypes bfloat16 --device cuda

The target is a Llama of random weights, which cost as much as trained ones. Draft tokens are random, too. None is
accepted, so each step verifies the given number of nodes and emits one token. Times are medians over steps, divided by
a step of plain ``generate`` at the first point of the curve, in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import earlier, machine  # the folder is no package

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, Speculator
from hf_spec.bench import import_pyplot
from hf_spec.whole_files import write_files

# Curves: values of the varied quantity, and nodes that a step verifies; 0 nodes are plain generate.
CURVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "nodes": ((1, 2, 4, 8, 16, 32, 64, 128), ()),
    "rows": ((1, 2, 4, 8, 16, 32), (0, 1, 6, 16)),
    "prompt": ((64, 256, 1024, 4096, 8192), (0, 1, 6, 16)),
    "vocabulary": ((2_000, 8_000, 32_000, 128_000), (0, 1, 6, 16)),
}
USUAL = {"rows": 1, "prompt": 64, "vocabulary": 8_000}


class Timestamps(StoppingCriteria):
    """A criterion that never stops and records the time of each token of plain ``generate``."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Noise(Speculator, Drafter):
    """A draft of random tokens in chains, which records when each step began."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.times: list[float] = []

    def drafter(self, request: DraftContext) -> Drafter:
        return self

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        self.times.append(time.perf_counter())
        if not self.length:
            return Proposal.nothing(accepted.root)
        shape = (len(accepted.root), min(self.length, limit))
        return Proposal.chain(accepted.root, torch.randint(self.vocabulary, shape, device=accepted.root.device))

    def keep_rows(self, rows: torch.Tensor) -> None:
        return None


def model_of(args: argparse.Namespace, vocabulary: int, dtype: torch.dtype) -> Any:
    """Return a Llama of random weights with two heads per key head, as in many models."""
    torch.manual_seed(0)
    heads = max(2, args.hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=16_384,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(args.device):
        return LlamaForCausalLM(config).to(dtype).eval()


def step_seconds(model: Any, rows: int, prompt: int, nodes: int, steps: int) -> float:
    """Return the median over ``steps`` steps that verify ``nodes`` nodes for ``rows`` rows; 0 nodes: plain steps."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (rows, prompt), device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    if nodes == 0:
        timestamps = Timestamps()
        criteria = StoppingCriteriaList([timestamps])
        model.generate(ids, **options, max_new_tokens=steps + 1, stopping_criteria=criteria)
        times = timestamps.times
    else:
        noise = Noise(vocabulary, nodes - 1)
        config = SpeculationConfig(num_speculative_tokens=max(1, nodes - 1), self_check=False)
        length = {"max_new_tokens": steps + nodes + 1}  # draft tokens end with the text
        model.generate(ids, **options, **length, speculator=noise, speculation_config=config)
        times = noise.times[: steps + 1]
    return median(after - before for before, after in pairwise(times))


def places(curve: str) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield the varied value, the nodes, and all settings."""
    values, widths = CURVES[curve]
    for value in values:
        for nodes in widths or (value,):
            yield value, nodes, USUAL | ({} if curve == "nodes" else {curve: value})


def measure(args: argparse.Namespace, dtype: torch.dtype, curve: str) -> dict[str, dict[str, float]]:
    """Return costs in plain steps, for each number of nodes, by the varied value."""
    found: dict[str, dict[str, float]] = {}
    model, one = None, 0.0
    for value, nodes, setting in places(curve):
        if setting["prompt"] > args.most:
            continue
        if model is None or model.config.vocab_size != setting["vocabulary"]:
            model = model_of(args, setting["vocabulary"], dtype)
            step_seconds(model, 1, 64, 6, 3)  # warm-up, and the target's self-check
        if not one:
            one = step_seconds(model, 1, USUAL["prompt"], 0, args.steps)
        seconds = step_seconds(model, setting["rows"], setting["prompt"], nodes, args.steps)
        found.setdefault("nodes" if curve == "nodes" else str(nodes), {})[str(value)] = seconds / one
    print(f"{dtype} {curve}: {json.dumps(found)}", flush=True)
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Write a picture with a row for each curve and a column for each dtype."""
    pyplot = import_pyplot()
    curves = list(next(iter(found.values())))
    picture, axes = pyplot.subplots(
        len(curves), len(found), figsize=(4 * len(found), 2.8 * len(curves)), squeeze=False, layout="constrained"
    )
    for line, (dtype, measured) in zip(axes.T, found.items(), strict=True):
        for place, (curve, lines) in zip(line, measured.items(), strict=True):
            for nodes, points in lines.items():
                label = {"0": "plain", "1": "1 node"}.get(nodes, f"{nodes} nodes")
                place.plot([int(x) for x in points], list(points.values()), marker="o", label=label)
            place.set(xscale="log", xlabel=curve, ylabel="plain steps", title=dtype.removeprefix("torch."))
            place.set_ylim(bottom=0)
            place.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            place.set_xticks([int(x) for x in next(iter(lines.values()))])
            place.minorticks_off()
            if curve != "nodes":
                place.legend()
    picture.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--most", type=int, default=8192, help="longest prompt, in tokens (%(default)s)")
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    if args.png:
        import_pyplot()  # what is missing is said before anything is measured
    torch.set_num_threads(args.threads)
    made_from = machine() | {"argv": sys.argv[1:]}
    content: dict[str, Any] = {"made_from": made_from} | earlier(args.json, made_from)
    for name in args.dtypes:
        curves = content.setdefault(name, {})
        for curve in args.curves:
            if curve not in curves:
                curves[curve] = measure(args, getattr(torch, name), curve)
                if args.json:
                    write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)
    if args.png:
        draw({name: content[name] for name in args.dtypes}, args.png)


if __name__ == "__main__":
    main()
