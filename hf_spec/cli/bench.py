"""``hf-spec bench``: measure speculation against plain and assisted generation."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    TREE_HELP,
    add_device_options,
    add_invariant,
    add_no_pack,
    add_proposal_options,
    at_least,
    check_outputs,
    command,
    configured,
    draft_of,
    existing,
    picture,
    resumable,
    resume_hint,
    seed_of,
    temperature_of,
    tree_of,
    writable,
    write_result,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..bench import BenchReport, BenchSettings, Contender, Tree
    from ..drafts.base import Speculator
    from ..settings import SpeculationConfig

BUDGETS = (4, 8, 16, 32, 64)
PROMPTS_HELP = (
    'JSON lines: {"prompt": text}, {"messages": [...]} or {"turns": [text, ...]} each, and a "category" if you like'
)


def add_bench(commands: Any) -> None:
    """Declare ``hf-spec bench``."""
    add = command(commands, _bench, "bench", "measure speculation against plain and assisted generation",
                  resumes=resume_hint("rounds"))  # fmt: skip
    add("model", help="target: directory or Hub id")
    add("--draft", type=draft_of, nargs="+", default=["ngram"], metavar="X", help="ngram, history, mtp, early-exit, "
        "plain, directories or Hub ids, or history+DRAFT for both together (ngram)")  # fmt: skip
    add("--prompts", required=True, metavar="FILE", help=PROMPTS_HELP)
    add("--limit", "--prompts-per-category", type=at_least(1), metavar="N", help="prompts per category")
    add("--tree", type=tree_of, nargs="+", default=[None], metavar="SHAPE", help=TREE_HELP)
    add("--search-tree", type=at_least(1), nargs="*", metavar="N", help="find and measure static trees of so many "
        f"draft tokens instead ({' '.join(map(str, BUDGETS))})")  # fmt: skip
    add("--save-tree", type=writable, metavar="FILE", help="write the fastest tree found, for --tree FILE.json")
    add("--max-new-tokens", type=at_least(2), default=128, metavar="N", help="per turn (%(default)s)")
    add("--batch-size", type=at_least(1), default=1, metavar="N",
        help="prompts of a category decoded together (%(default)s)")  # fmt: skip
    add("--temperature", type=temperature_of, default=0.0, metavar="T", help="0 decodes greedily (%(default)s)")
    add("--warmup", type=at_least(0), default=1, metavar="N", help="untimed runs of every method first "
        "(%(default)s)")  # fmt: skip
    add("--repeats", type=at_least(1), default=1, metavar="N", help="timed runs, of which the median counts "
        "(%(default)s)")  # fmt: skip
    add("--seed", type=seed_of, default=0, metavar="N", help="set before each run (%(default)s)")
    add("--no-baselines", action="store_true", help="do not measure assisted generation and prompt lookup")
    add("--compiled", action="store_true", help="measure plain generate compiled over a static cache, too")
    add(
        "--rounds",
        type=resumable,
        metavar="FILE.jsonl",
        help="keep the results of every batch of prompts there, and resume after them",
    )
    add("--json", type=writable, metavar="FILE", help="write all results")
    add("--png", type=picture, metavar="FILE", help="write a picture")
    add("--card", type=existing, metavar="README.md", help="add a table to the model card of the draft")
    add_proposal_options(add)
    add_device_options(add)
    add_no_pack(add)
    add_invariant(add)


def _bench(args: argparse.Namespace) -> None:
    check_outputs(args, ("rounds", "json", "png", "save_tree"), ("prompts", "card"))
    budgets = _budgets(args)
    if args.compiled and args.invariant:
        raise ValueError("--invariant is for eager forwards, and --compiled measures compiled ones: pass one of them")
    if args.card and len(args.draft) != 1:
        raise ValueError(f"--card is that of one draft, but --draft names {len(args.draft)}")
    if args.card and (draft := Path(args.draft[0])).is_dir() and args.card.resolve().parent != draft.resolve():
        raise ValueError(
            f"--card {args.card} is not the card of {draft}, which is measured: name {draft / 'README.md'}"
        )
    from ..bench import import_pyplot, read_prompts, run_bench
    from ..bench.card import read_card
    from .loading import load_models, pack_models

    prompts = read_prompts(args.prompts, args.limit)
    if args.png:
        import_pyplot()
    if args.card:
        read_card(args.card)
    target, tokenizer, drafts = load_models(
        args.model,
        dict.fromkeys(args.draft),
        args.dtype,
        args.device,
        lambda draft: _settings_of(draft, args, budgets),
    )
    pack_models(args, target, *drafts.values())
    speculators = {name: drafts[draft] for name, draft in zip(_names(args.draft), args.draft, strict=True)}
    contenders: list[Contender] = []
    expected: dict[str, float] = {}
    if budgets:
        ids = [prompt.render([], tokenizer) for prompt in prompts]
        contenders, expected = _searched(speculators, target, ids, args, budgets)
    else:
        contenders = [
            contender(name, draft, configured(draft, args, tree))
            for name, draft in speculators.items()
            for tree in args.tree
        ]
        contenders = numbered(contenders)
    options = {"progress": sys.stderr.isatty(), "rounds_file": args.rounds}
    report = run_bench(target, tokenizer, prompts, contenders, _settings(args), **options)
    with contextlib.ExitStack() as rest:  # none of it loses the others: the measurement may have taken hours
        if expected:
            rest.callback(_print_trees, report, contenders, expected, args.save_tree)
        rest.callback(_print_tables, report)
        _write_files(rest, report, args)


def _settings_of(draft: Speculator, args: argparse.Namespace, budgets: Sequence[int]) -> list[SpeculationConfig]:
    """List the settings that ``draft`` is measured with. Errors: a ValueError if it cannot have the trees searched."""
    from ..bench.tree_search import refuse_unranked

    if budgets:
        refuse_unranked(draft)
    return [configured(draft, args, shape) for shape in (["chain"] if budgets else args.tree)]


def _names(drafts: Sequence[str]) -> Sequence[str]:
    """Name drafts by the last part of their paths, or as they are given if two would have one name."""
    from .loading import WITH_HISTORY

    names = []
    for draft in drafts:
        path = Path(draft.removeprefix(WITH_HISTORY))
        name = path.name if path.name not in ("", "..") else path.resolve().name  # ".": the directory one is in
        names.append(WITH_HISTORY * draft.startswith(WITH_HISTORY) + name)
    return names if len(set(names)) == len(names) else drafts


def _settings(args: argparse.Namespace) -> BenchSettings:
    from ..bench import BenchSettings

    return BenchSettings(
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        temperature=args.temperature,
        repeats=args.repeats,
        warmup=args.warmup,
        baselines=not args.no_baselines,
        compiled=args.compiled,
        seed=args.seed,
    )


def contender(name: str, speculator: Speculator, config: SpeculationConfig) -> Contender:
    """Make a contender that is named by its draft and the shape of its proposals."""
    from ..bench import Contender
    from .loading import with_own_history

    shape = "chain" if config.tree is None else f"{config.tree if isinstance(config.tree, str) else 'static'} tree"
    return Contender(f"{name} {shape}", with_own_history(speculator), config)


def numbered(contenders: Sequence[Contender]) -> list[Contender]:
    """Number contenders of the same name, such as two static trees of one draft."""
    names = [one.name for one in contenders]
    seen: Counter[str] = Counter()
    found = []
    for one in contenders:
        seen[one.name] += 1
        found.append(replace(one, name=f"{one.name} {seen[one.name]}") if names.count(one.name) > 1 else one)
    return found


def _write_files(rest: contextlib.ExitStack, report: BenchReport, args: argparse.Namespace) -> None:
    """Let ``rest`` write the files that were asked for."""
    from ..bench import add_to_card

    if args.card:
        rest.callback(add_to_card, report, args.card)
    if args.png:
        rest.callback(report.plot, args.png)
    if args.json:
        rest.callback(write_result, args.json, json.dumps(report.to_dict(), indent=2) + "\n")


def _print_tables(report: BenchReport) -> None:
    for category in report.figures:
        print(f"{category}\n{report.table(category)}\n")
    if note := report.note():
        print(f"{note}\n")


# -- trees to search for ----------------------------------------------------------------------------------------------


def _budgets(args: argparse.Namespace) -> Sequence[int]:
    """Return the numbers of draft tokens of the trees to search for; none without ``--search-tree``."""
    if args.search_tree is None:
        if args.save_tree:
            raise ValueError("--save-tree writes what --search-tree finds; add it")
        return ()
    if args.tree != [None]:
        raise ValueError("--search-tree finds the trees that are measured, and --tree names them: pass one of them")
    return args.search_tree or BUDGETS


def _searched(
    speculators: dict[str, Speculator],
    target: PreTrainedModel,
    prompts: list[list[int]],
    args: argparse.Namespace,
    budgets: Sequence[int],
) -> tuple[list[Contender], dict[str, float]]:
    """Return the trees found for every draft, and their expected acceptance lengths by name."""
    import torch

    from ..bench import Contender
    from ..scoring.plain import input_device
    from .loading import with_own_history

    ids = [torch.tensor([prompt], device=input_device(target)) for prompt in prompts]
    contenders, expected = [], {}
    for name, speculator in speculators.items():
        config = configured(speculator, args, "chain")
        for tree, length in _found_trees(speculator, target, ids, config, budgets, args.max_new_tokens):
            own = with_own_history(speculator)
            contenders.append(Contender(f"{name} tree of {len(tree)}", own, config.merge(tree=tree)))
            expected[contenders[-1].name] = length
    return contenders, expected


def _found_trees(
    speculator: Speculator,
    target: PreTrainedModel,
    prompts: list[Tensor],
    config: SpeculationConfig,
    budgets: Sequence[int],
    max_new_tokens: int,
) -> list[tuple[Tree, float]]:
    """Find a tree of each size, and its expected acceptance length."""
    from ..bench import expected_length, rank_accuracies, search_tree
    from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS

    depth = config.num_speculative_tokens
    depth = depth if isinstance(depth, int) else DEFAULT_NUM_SPECULATIVE_TOKENS
    accuracies = rank_accuracies(target, prompts, speculator, depth, max_new_tokens=max_new_tokens)
    found = {len(tree): tree for nodes in budgets if (tree := search_tree(accuracies, nodes))}
    if not found:
        raise ValueError("no draft token was accepted on these prompts, so there is no tree to find")
    return [(tree, expected_length(accuracies, tree)) for tree in found.values()]


def _print_trees(
    report: BenchReport, contenders: list[Contender], expected: dict[str, float], path: Path | None
) -> None:
    """Print expected and measured acceptance lengths of the trees found, and the fastest tree."""
    trees = {one.name: one.config.tree for one in contenders if one.config}
    best = max(expected, key=lambda name: report.overall[name].ratio_to_plain)
    text = json.dumps(trees[best])
    try:
        if path:
            write_result(path, text + "\n")
    finally:
        for name, length in expected.items():
            print(f"{name}: expected τ {length:.2f}, measured {report.overall[name].mean_accepted_length:.2f}")
        print(f"\nThe fastest is {best}:\n{text}")
