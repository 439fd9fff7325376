"""Compare fixed batches and continuous batching on prompts of mixed length, plain and speculative.

    python examples/batch_speed.py
    python examples/batch_speed.py --size 1152 4608 16 --at-once 4 16 64 --rounds 3 --json batches.json

All prompts are there from the beginning, so a request's time ends when its text is complete. Methods take turns.
Figures are medians over the rounds, with minimum and maximum. The target is the demo family's, inflated to a hidden
size, an MLP size and a number of layers. Drafts are accepted as by the small target. The first method is plain
continuous batching. The run ends with an error if another method writes other texts. The raw file says what target,
draft and the rest took. The same command goes on after the last run that it has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import earlier, machine  # the folder is no package

from hf_spec import demo
from hf_spec.bench.runner import ForwardClock
from hf_spec.cli.demo import STORIES
from hf_spec.demo.inflation import Narrowed, inflate
from hf_spec.drafts.base import network_of
from hf_spec.whole_files import write_files

Texts = list[list[int]]
Timed = tuple[Texts, list[float]]


class Workload:
    """The prompts with their numbers of new tokens, and a count of the target's forwards."""

    def __init__(self, target: Any, tokenizer: Any, count: int, new_tokens: list[int]) -> None:
        draw = random.Random(0)
        stories = [tokenizer(story)["input_ids"] for story in STORIES]
        self.prompts = [
            [draw.randrange(8, 2000), *draw.choice(stories)[: draw.randrange(4, 12)]] for _ in range(count)
        ]
        self.lengths = [draw.randint(*new_tokens) for _ in range(count)]
        self.target, self.forwards = target, 0
        target.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def in_batches(self, speculator: Any, size: int) -> Timed:
        """Answer in batches of ``size``, one after the other; each lasts as long as its longest text."""
        start, texts, seconds = time.perf_counter(), [], []
        for first in range(0, len(self.prompts), size):
            prompts, lengths = self.prompts[first : first + size], self.lengths[first : first + size]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            out = self.target.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                speculator=speculator,
            )
            texts += [row[longest : longest + length] for row, length in zip(out.tolist(), lengths, strict=True)]
            seconds += [time.perf_counter() - start] * len(prompts)
        return texts, seconds

    def in_engine(self, speculator: Any, size: int) -> Timed:
        """Answer by continuous batching, at most ``size`` requests at once."""
        options = GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
        longest = max(map(len, self.prompts)) + max(self.lengths)
        blocks = max(16, longest // 16 + 4)  # of a request: its whole text and draft tokens have room
        sizes = ContinuousBatchingConfig(
            max_requests_per_batch=size, num_blocks=blocks * size, page_size=16, max_batch_tokens=max(256, 16 * size)
        )
        start, texts, seconds = time.perf_counter(), {}, {}
        engine = {"continuous_batching_config": sizes, "warmup": False, "speculator": speculator}
        with self.target.continuous_batching_context_manager(options, **engine) as manager:
            for number, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=length)
            while len(texts) < len(self.prompts):
                if (output := manager.get_result(timeout=1)) is not None:
                    if output.error:
                        raise RuntimeError(f"the engine did not finish request {output.request_id}: {output.error}")
                    texts[output.request_id] = output.generated_tokens
                    seconds[output.request_id] = time.perf_counter() - start
        names = [str(number) for number in range(len(self.prompts))]
        return [texts[name] for name in names], [seconds[name] for name in names]

    def measured(
        self, method: Callable[[Any, int], Timed], speculator: Any, size: int
    ) -> tuple[dict[str, Any], Texts]:
        """Run a method; return its figures, and the texts."""
        self.forwards = 0
        network = None if isinstance(speculator, str | bool) else network_of(speculator)
        with ForwardClock([self.target] if network is None else [self.target, network]) as clock:
            texts, seconds = method(speculator, size)
        target, *draft = clock.by_model()
        found = {"forwards": self.forwards, "seconds": max(seconds), "tokens": sum(self.lengths)}
        found |= {"parts": [target, sum(draft), max(seconds) - target - sum(draft)]}
        return found | {"median": median(seconds), "late": quantiles(seconds, n=20)[-1]}, texts


def table(content: dict[str, Any]) -> str:
    """Write the figures of a raw file as Markdown."""
    head = (
        "at once",
        "method",
        "x engine, plain",
        "forwards",
        "target + draft + rest s",
        "request: median s",
        "95th percentile",
    )
    lines = [f"{content['stories']} stories:", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for size, ways in content["at_once"].items():
        base = [one["seconds"] for one in ways["engine, plain"]]
        for name, rounds in ways.items():
            ratios = [plain / one["seconds"] for plain, one in zip(base, rounds, strict=False)]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            parts = " + ".join(f"{median(one):.1f}" for one in zip(*(one["parts"] for one in rounds), strict=True))
            forwards, middle, late = (median(one[what] for one in rounds) for what in ("forwards", "median", "late"))
            cells = (
                size,
                name,
                f"{median(ratios):.2f}{spread}",
                f"{forwards:.0f}",
                parts,
                f"{middle:.1f}",
                f"{late:.1f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=(1152, 4608, 16), help="hidden, MLP, layers (300 M)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[16, 96], help="least and most of a prompt")
    parser.add_argument("--drafts", nargs="+", default=["ngram", "draft-eagle3", "draft-mtp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="raw file with commit, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    work = Workload(
        inflate(small, *args.size), AutoTokenizer.from_pretrained(demo.path()), args.prompts, args.new_tokens
    )
    speculators = {
        name: name
        if name == "ngram"
        else Narrowed(AutoModel.from_pretrained(demo.path(name), dtype=torch.float32), small)
        for name in args.drafts
    }
    ways: dict[str, tuple[Any, Any]] = {"engine, plain": (work.in_engine, False)}
    ways |= {f"engine, {name}": (work.in_engine, one) for name, one in speculators.items()}
    ways |= {"batches, plain": (work.in_batches, False)}
    ways |= {f"batches, {name}": (work.in_batches, one) for name, one in speculators.items()}

    made_from = machine() | {"argv": sys.argv[1:]}
    content: dict[str, Any] = {"made_from": made_from, "at_once": {}, "texts": None, "stories": args.prompts}
    content |= earlier(args.json, made_from)
    for size in args.at_once:
        for turn in range(args.rounds):
            for name, (method, speculator) in ways.items():
                done = content["at_once"].setdefault(str(size), {}).setdefault(name, [])
                if len(done) > turn:
                    continue
                figures, texts = work.measured(method, speculator, size)
                written = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
                content["texts"] = content["texts"] or written
                if written != content["texts"]:
                    sys.exit(f"{name} wrote other texts than the first method")
                done.append(figures)
                print(f"{size} at once, round {turn}, {name}: {figures}", file=sys.stderr, flush=True)
                if args.json:
                    write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)
    print(table(content))


if __name__ == "__main__":
    main()
