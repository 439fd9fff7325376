"""Compare the acceptance of the demo family's drafts over hidden states, on stories that training never saw.

    python examples/prepare_demo_corpus.py --corpus DIR --work WORK
    python examples/compare_demo_drafts.py --stories WORK/validation.jsonl

Each seed chooses its own stories, the same for all drafts. Their beginnings are the prompts. Figures are means over
the seeds with their standard errors: τ, the tokens per forward of the target, in chains and trees, greedily and at
temperature 1. The last columns are of a proposal for one sequence: its operators, how many of them are products of
matrices or attention, and its time, which needs a quiet machine.

`--raw FILE` keeps the figures of each draft, and the same command goes on where it was stopped. All figures of a file
have the same settings, commit and machine. `--read` writes the table of such a file. `--only-speed` measures only the
last columns, in a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engine_speed import file_digest, files_digest, machine, made_otherwise
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import demo
from hf_spec.whole_files import write_files

CHAINS: dict[str, Any] = {"tree": None}
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
BATCH = 16
POSITIONS = "accepted, if those before were: greedy chains"
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "scaled_dot_product", "mkldnn_linear")


class Operators(TorchDispatchMode):
    """Counts the operators of torch that run, by name, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def counted(target: Any, draft: Any, ids: torch.Tensor, options: argparse.Namespace) -> dict[str, list[float]]:
    """Count the operators of a proposal, as the mean over the steps of one story."""
    operators, steps, original = Operators(), 0, draft.drafter

    def drafter(request: Any) -> Any:
        made = original(request)
        propose = made.propose

        @functools.wraps(propose)
        def proposed(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            with operators:
                return propose(*args, **kwargs)

        made.propose = proposed
        return made

    draft.drafter = drafter
    try:
        measured(target, draft, ids[:1], options, shape=CHAINS, temperature=0.0, batch=1)
    finally:
        del draft.drafter
    products = sum(count for name, count in operators.found.items() if name.strip("_").startswith(PRODUCTS))
    return {
        "operators per proposal": [sum(operators.found.values()) / steps],
        "products": [products / steps],
    }


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


def compare(place: Path, target: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the figures of one draft, one for each seed."""
    draft = hf_spec.as_speculator(str(place), target)
    stories = [json.loads(line)["text"] for line in options.stories.read_text(encoding="utf-8").splitlines()]
    figures: dict[str, list[float]] = {}
    counts: list[hf_spec.SpeculationStats] = []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        ids = prompts(stories, tokenizer, options, seed)
        for shape, given in {} if options.only_speed else shapes(options).items():
            for how, temperature in TEMPERATURES.items():
                stats = measured(target, draft, ids, options, shape=given, temperature=temperature, batch=BATCH)
                figures.setdefault(f"{shape}, {how}", []).append(stats.mean_accepted_length)
                if not temperature and given is CHAINS:
                    counts.append(stats)
        if not seed:
            figures |= counted(target, draft, ids, options)
        alone = measured(target, draft, ids[:4], options, shape=CHAINS, temperature=0.0, batch=1)
        figures.setdefault("ms per proposal", []).append(1000 * alone.propose_seconds / alone.steps)
    if counts:
        reached = [1.0, *hf_spec.SpeculationStats.merge(counts).acceptance_by_position]
        figures[POSITIONS] = [after / before for before, after in pairwise(reached) if before]
    return figures


def cell(values: list[float]) -> str:
    """Write mean and standard error, or a single value."""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def kept(raw: Path | None) -> dict[str, Any]:
    """Return the content of the raw file, if it is there."""
    if raw is None or not raw.exists():
        return {"drafts": {}}
    found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    return found


def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Add the drafts that are missing to ``found`` and to the raw file. Errors: a SystemExit if they do not fit in."""
    here = machine()
    names = [Path(name).name for name in options.drafts]
    if len(set(names)) < len(names):  # folders of the same name
        names = options.drafts
    pairs = zip(names, options.drafts, strict=True)
    places = {name: demo.path(one) if one in demo.MODELS else Path(one) for name, one in pairs}
    weights = {name: files_digest(place) for name, place in places.items()}
    settings = {name: value for name, value in vars(options).items() if name not in ("raw", "read", "drafts")}
    settings["stories"] = file_digest(options.stories)
    if found["drafts"]:
        other = made_otherwise(found["made_from"], here)
        other += [f"other {name}" for name in settings if found.get("settings", {}).get(name) != settings[name]]
        before = found.get("weights", {})
        other += [f"another {name}" for name in found["drafts"] if weights.get(name) not in (None, before.get(name))]
        if other:
            raise SystemExit(f"{options.raw} was made with {', '.join(other)}; name another file")
    found |= {"settings": settings, "weights": found.get("weights", {}) | weights}
    found["made_from"] = here | {"date": f"{datetime.now(UTC):%d %B %Y}"}
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    for name, place in places.items():
        if name in found["drafts"]:
            continue
        found["drafts"][name] = compare(place, target, tokenizer, options)
        if options.raw:
            write_files({options.raw.name: json.dumps(found, indent=1) + "\n"}, options.raw.absolute().parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, help="a text in each line")
    parser.add_argument("--raw", type=Path, help="file that keeps the figures; drafts that it has are not run again")
    parser.add_argument("--read", action="store_true", help="run nothing; write the table of the raw file")
    parser.add_argument("--only-speed", action="store_true", help="no τ, only operators and time of a proposal")
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

    found = kept(options.raw)
    if options.read:
        if not found["drafts"]:
            parser.error("--read writes the table of a raw file that is there: name it by --raw FILE")
    elif options.stories is None:
        parser.error("give the texts whose beginnings are the prompts: --stories WORK/validation.jsonl")
    else:
        measure(options, found)
    print(table(found["drafts"]))


def table(drafts: dict[str, dict[str, list[float]]]) -> str:
    """Write the figures of the drafts as Markdown, those that the first one has."""
    names = [name for name in next(iter(drafts.values())) if name != POSITIONS]
    lines = [f"| | {' | '.join(names)} |", f"|{'---|' * (1 + len(names))}"]
    return "\n".join(
        [
            *lines,
            *(f"| `{one}` | {' | '.join(cell(found[name]) for name in names)} |" for one, found in drafts.items()),
        ]
    )


def positions_table(drafts: dict[str, dict[str, list[float]]]) -> str:
    """Write how often each token of greedy chains was accepted, if those before it were."""
    rows = {name: found[POSITIONS] for name, found in drafts.items() if POSITIONS in found}
    count = max(map(len, rows.values()))
    lines = [f"| | {' | '.join(str(one + 1) for one in range(count))} |", f"|{'---|' * (1 + count)}"]
    for name, values in rows.items():
        cells = [f"{value:.2f}" for value in values] + ["-"] * (count - len(values))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
