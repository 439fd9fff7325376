"""Measure the gain of a history of earlier calls: tokens per forward of the target, with and without it.

    python examples/history.py                                    # the demo family, offline
    python examples/history.py --target DIR --draft DIR --prompts prompts.jsonl --json history.json

Each set is a series of calls, one prompt each, in which a history (``history``) grows from nothing. Four sets ship:
ten small changes to one function, shown or only described; a support chat; ten beginnings of one story. A file of JSON
lines, as for ``hf-spec bench``, adds one per category. Draft lengths are fixed, so another run finds the same figures.

    python examples/history.py --target DIR --prompts prompts.jsonl --write-texts texts.json    # plain generate, once
    python examples/history.py --texts texts.json --min-token-prob 0.05 0.1 0.2 0.3                 # no model

Greedy text is the same with any draft, so lookups can be measured over saved texts.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import machine  # the folder is no package

from hf_spec import (
    AcceptedTokens,
    DraftContext,
    HybridSpeculator,
    NgramSpeculator,
    SpeculationConfig,
    SpeculationStats,
    as_speculator,
    demo,
)
from hf_spec.bench.prompts import Prompt, read_prompts
from hf_spec.whole_files import write_files

FUNCTION = '''\
def mean_of_column(path, column):
    """Return the mean of a column of a CSV file."""
    total = 0.0
    count = 0
    with open(path) as file:
        header = file.readline().strip().split(",")
        index = header.index(column)
        for line in file:
            fields = line.strip().split(",")
            total += float(fields[index])
            count += 1
    return total / count
'''
TASK = "Write a Python function mean_of_column(path, column) that reads a CSV file and returns the mean of one column."
CHANGES = (
    "Rename it to average_of_column.",
    "Skip empty lines.",
    "Take the separator as a parameter.",
    "Return 0.0 for an empty file.",
    "Add type annotations.",
    "Skip lines that are not numbers.",
    "Raise a KeyError for an unknown column.",
    "Return the number of lines as well.",
    "Take the encoding as a parameter.",
    "Write a longer docstring.",
)
# A replay needs no model: one of any token leaves nothing out.
NO_TARGET = types.SimpleNamespace(config=LlamaConfig(vocab_size=1 << 31), get_output_embeddings=lambda: None)
GREETING = "Thank you for your message. Please be polite, and end with 'I hope this helps. Have a nice day!'"
THINGS = ("dog", "garden", "red ball", "birthday", "old house", "boat", "school", "new friend", "cake", "bicycle")
FIXED = {
    "edits": [f"Here is a Python function:\n\n{FUNCTION}\nRewrite the whole function. {change}" for change in CHANGES],
    "rewrites": [f"{TASK} {change}" for change in CHANGES],
    "chat": [f"{GREETING} Tell me something about a {thing}." for thing in THINGS],
    "stories": [f"Tell a story about a girl named Lily and her {thing}. They play in the park." for thing in THINGS],
}


def main() -> None:
    options = arguments()
    report: dict[str, Any] = {"made_from": machine() | {"argv": sys.argv[1:]}}
    if options.only_costs:
        report["costs"] = costs()
        print(costs_table(report))
        keep(report, options)
        return
    if options.texts:
        with open(options.texts, encoding="utf-8") as file:
            texts = json.load(file)
        for name in named(texts, options):
            report[name] = {way: replay(texts[name], *one) for way, one in ways(None, options.min_token_prob).items()}
            print_table(name, report[name])
            keep(report, options)
        return
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).eval()
    sets = prompts_of(tokenizer, options)
    if options.write_texts:
        write_texts(target, sets, options)
        return
    draft = noisy(target, options.noise) if options.noise else as_speculator(options.draft, target)
    for name, prompts in sets.items():
        report[name] = {}
        for way, (speculator, config) in ways(draft, options.min_token_prob).items():
            if options.ways and way not in options.ways:
                continue
            set_seed(0)
            stats = [decode(target, ids, speculator, config, options) for ids in prompts]
            found = SpeculationStats.merge(stats).to_dict()
            report[name][way] = {key: value for key, value in found.items() if key != "per_row"}
        print_table(name, report[name])
        keep(report, options)
    report["costs"] = costs()
    print(json.dumps(report["costs"], indent=1))
    keep(report, options)


def keep(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the raw file, if one is asked for."""
    if options.json:
        write_files({options.json.name: json.dumps(report, indent=1) + "\n"}, options.json.absolute().parent)


def table(report: dict[str, Any]) -> str:
    """Write the sets of a raw file as Markdown."""
    sets = {name: one for name, one in report.items() if name not in ("made_from", "costs")}
    names = list(next(iter(sets.values())))
    lines = [f"| | {' | '.join(names)} |", f"|{'---|' * (1 + len(names))}"]
    for name, ways in sets.items():
        cells = (
            f"{one['mean_accepted_length']:.2f} ({one['proposed'] / one['row_steps']:.1f})" for one in ways.values()
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def costs_table(report: dict[str, Any]) -> str:
    """Write what the history of a raw file cost."""
    rows = (f"| {name} | {value:.0f} |" for name, value in report["costs"].items())
    return "\n".join(["| a full history of 100,000 tokens | |", "|---|---|", *rows])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo.path()))
    parser.add_argument("--draft", default=str(demo.path("draft-eagle3")))
    parser.add_argument(
        "--noise", type=float, help="instead of a draft, a copy of the target with noise in its weights"
    )
    parser.add_argument("--prompts", help="JSON lines, see docs/benchmarking.md")
    parser.add_argument("--sets", nargs="+", help="some of the sets, by name or category")
    parser.add_argument("--ways", nargs="+", help="some of the columns, by name")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--max-length", type=int, default=700, help="skip longer prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--min-token-prob", type=float, nargs="+", default=[0.1], help="several: compare thresholds")
    parser.add_argument("--write-texts", type=Path, help="only write plain greedy texts to this file")
    parser.add_argument(
        "--only-costs", action="store_true", help="memory and processor time of a full history, no model"
    )
    parser.add_argument("--texts", help="measure lookups over the texts in this file")
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures of every set")
    return parser.parse_args()


def noisy(target: PreTrainedModel, noise: float) -> PreTrainedModel:
    """Return a substitute for a draft; its acceptance depends on ``noise`` alone."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return draft


def ways(draft: Any, chances: Sequence[float]) -> dict[str, tuple[Any, SpeculationConfig]]:
    """Return the speculator and settings of each column; histories are empty."""

    def chain(count: int) -> SpeculationConfig:
        return SpeculationConfig(num_speculative_tokens=count)

    found: dict[str, tuple[Any, SpeculationConfig]] = {
        "n-gram": (NgramSpeculator(), chain(5)),
        "n-gram, 16": (NgramSpeculator(), chain(16)),
    }
    for chance in chances:
        name = "history" if len(chances) == 1 else f"history {chance}"
        found[name] = (NgramSpeculator(history_size=100_000, min_token_prob=chance), chain(16))
    if draft is None:
        return found
    tree = SpeculationConfig(num_speculative_tokens=5, tree="dynamic", tree_topk=4, num_tree_tokens=12)
    return found | {
        "draft": (draft, chain(5)),
        "hybrid": (HybridSpeculator(draft, draft_tokens=5), chain(16)),
        "draft, tree": (draft, tree),
        "hybrid, tree": (HybridSpeculator(draft, draft_tokens=5), tree.merge(num_speculative_tokens=16)),
    }


def named(sets: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return the names of the sets that are asked for. Errors: a SystemExit for one that is not there."""
    if unknown := [name for name in options.sets or () if name not in sets]:
        raise SystemExit(f"--sets: there is no set {unknown[0]}, but {', '.join(sets)}")
    return options.sets or list(sets)


def prompts_of(tokenizer: Any, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the token ids of the prompts by set. Prompts that are too long are left out, and sets without others."""
    sets = {name: [Prompt((text,), name) for text in texts] for name, texts in FIXED.items()}
    for prompt in read_prompts(options.prompts) if options.prompts else ():
        sets.setdefault(prompt.category, []).append(prompt)
    found = {}
    for name in named(sets, options):
        rows = [prompt.render([], tokenizer) for prompt in sets[name][: options.limit]]
        if kept := [ids for ids in rows if len(ids) <= options.max_length]:
            found[name] = kept
        if len(kept) < len(rows):
            print(f"{name}: {len(rows) - len(kept)} prompts exceed --max-length", file=sys.stderr, flush=True)
    return found


def decode(
    target: Any, ids: list[int], speculator: Any, config: SpeculationConfig, options: argparse.Namespace
) -> SpeculationStats:
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    out = target.generate(
        torch.tensor([ids]),
        max_new_tokens=options.max_new_tokens,
        speculator=speculator,
        speculation_config=config,
        return_dict_in_generate=True,
        **sampling,
    )
    stats: SpeculationStats = out.speculation
    return stats


def write_texts(target: Any, sets: dict[str, list[list[int]]], options: argparse.Namespace) -> None:
    """Write the tokens of prompts and greedy answers, by set."""
    texts: dict[str, list[Any]] = {}
    for name, prompts in sets.items():
        texts[name] = []
        for ids in prompts:
            out = target.generate(torch.tensor([ids]), max_new_tokens=options.max_new_tokens, do_sample=False)
            texts[name].append([ids, out[0, len(ids) :].tolist()])
    write_files({options.write_texts.name: json.dumps(texts)}, options.write_texts.absolute().parent)


def replay(pairs: Any, speculator: NgramSpeculator, config: SpeculationConfig) -> dict[str, Any]:
    """Let ``speculator`` draft chains along prompts and answers, as ``generate`` does."""
    counts = {"row_steps": 0, "proposed": 0, "emitted": 0}
    for prompt, answer in pairs:
        ids = torch.tensor([prompt[:-1]])  # the first draft tokens are read together with the prompt
        request: Any = (NO_TARGET, ids, torch.ones_like(ids), None, speculator.settings(config), None, False)
        context = DraftContext(*request)
        drafter, new, at = speculator.drafter(context), prompt[-1:], 0
        while at < len(answer):
            accepted = AcceptedTokens(torch.tensor([new]), torch.tensor([len(new)]))
            room = min(len(answer) - at - 1, config.num_speculative_tokens)  # type: ignore[type-var]
            proposal = drafter.propose(accepted, room)
            draft = proposal.tokens[0, 1:][proposal.present[0, 1:]].tolist()
            right = [ours == token for ours, token in zip(draft, answer[at:], strict=False)]
            new = answer[at : at + [*right, False].index(False) + 1]
            at += len(new)
            counts["row_steps"] += 1
            counts["proposed"] += len(draft)
            counts["emitted"] += len(new)
        speculator.learn([[*prompt, *answer]])
    return counts | {"mean_accepted_length": counts["emitted"] / counts["row_steps"]}


def print_table(name: str, figures: dict[str, dict[str, Any]]) -> None:
    cells = (
        f"{way} {one['mean_accepted_length']:.2f} ({one['proposed'] / one['row_steps']:.1f})"
        for way, one in figures.items()
    )
    print(f"{name}: tokens (draft tokens) per step: {', '.join(cells)}", flush=True)


def costs(tokens: int = 100_000) -> dict[str, float]:
    """Fill a history with nearly random text, and return its bytes and microseconds of processor time per token."""
    generator = torch.Generator().manual_seed(0)
    texts = (torch.rand(tokens // 500, 500, generator=generator) ** 3 * 5_000).long().tolist()
    speculator = NgramSpeculator(history_size=tokens)
    start = time.process_time()
    speculator.learn(texts)
    learnt = time.process_time() - start
    assert speculator.history is not None
    memory, text = speculator.history, texts[7]
    start = time.process_time()
    for end in range(8, 408):
        for size in (8, 4, 2, 1):
            memory.find(text[:end], size, 16)
    found = (time.process_time() - start) / 400
    return {
        "bytes per token": memory.nbytes / tokens,
        "microseconds to remember a token": 1e6 * learnt / tokens,
        "microseconds to look up the end of a text, all four lengths": 1e6 * found,
    }


if __name__ == "__main__":
    main()
