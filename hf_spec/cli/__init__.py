"""The command ``hf-spec``: try, use and measure speculation without writing a program.

Built on argparse: it needs no package of its own, and transformers' ``HfArgumentParser`` for training arguments is one
of its parsers. A subcommand is a function that declares its options and one that runs; ``COMMANDS`` lists the former.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from .. import demo
from ..bench import (
    BenchReport,
    BenchSettings,
    Contender,
    Prompt,
    Tree,
    add_to_card,
    expected_length,
    import_pyplot,
    rank_accuracies,
    read_prompts,
    run_bench,
    search_tree,
)
from ..checkpoints.conversion import convert
from ..checkpoints.inspection import inspect
from ..checkpoints.kinds import layouts
from ..configuration import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from ..drafts.base import Speculator
from ..metrics import RowStats, text_pieces
from ..scoring.runner import input_device
from .common import (
    TEMPERATURE_HELP,
    add_device_options,
    command,
    existing,
    load_speculator,
    load_target,
    sampling,
    writable,
)
from .training import add_prepare, add_train

TREE_HELP = "chain, dynamic, sampled, a list of paths of ranks such as [[0],[1],[0,0]], or a .json file with one"
BUDGETS = (4, 8, 16, 32, 64)
GUESSED, NORMAL = "\x1b[30;42m", "\x1b[0m"
DEMO_COLUMNS = ("τ", "x plain", "accepted", "same text")
DEMO_LEGEND = (
    "τ: tokens per forward of the target.  x plain: tokens per second, plain generate in the same run being 1.\n"
    "τ is what a larger target would gain from: the forwards of this one, {millions:.1f} million parameters,\n"
    "cost little more than guessing."
)
DEMO_SHAPES = ({"tree": None}, {"tree": "dynamic", "tree_top_k": 4, "tree_nodes": 12})
STORIES = (
    "Once upon a time, there was a little dog named Max.",
    "One day, Lily and her mom went to the park.",
    "Tom had a big red ball. He liked to play with it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hf-spec`` with ``argv``, the process's own arguments by default, and return its exit status."""
    parser = argparse.ArgumentParser(prog="hf-spec", description="Speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(argv)
    try:
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        return int(args.run(args) or 0)
    except (ValueError, OSError, ImportError) as error:
        if args.traceback:
            raise
        print(f"hf-spec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_demo(commands: Any) -> None:
    add = command(commands, _demo, "demo", "compare plain and speculative decoding on the shipped models, offline")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="length of each story (%(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="small models gain nothing from more (%(default)s)")
    add("--png", type=writable, metavar="FILE", help="write a picture of the table")


def _demo(args: argparse.Namespace) -> int:
    if args.png:
        import_pyplot()
    logging.disable_progress_bar()
    target, tokenizer = load_target(str(demo.path()), "float32", "cpu")
    contenders = [Contender("ngram chain", "ngram")]
    for name in demo.MODELS[1:]:
        speculator = load_speculator(str(demo.path(name)), target, "float32")
        contenders += [
            _contender(name.removeprefix("draft-"), speculator, speculator.settings(**shape)) for shape in DEMO_SHAPES
        ]
    prompts = [Prompt((story,), chat=False) for story in STORIES]
    settings = BenchSettings(max_new_tokens=args.max_new_tokens, baselines=False)
    print(f"{len(prompts)} stories of up to {args.max_new_tokens} tokens, plainly and with guesses:\n", flush=True)
    report = run_bench(target, tokenizer, prompts, contenders, settings, progress=sys.stderr.isatty())
    print(report.table(columns=DEMO_COLUMNS))
    print(f"\n{DEMO_LEGEND.format(millions=target.num_parameters() / 1e6)}")
    if args.png:
        report.plot(args.png)
        print(f"The picture is in {args.png}.")
    best = max(contenders, key=lambda one: report.overall[one.name].mean_accepted_length or 0)
    inputs = tokenizer(STORIES[0], return_tensors="pt")
    out: Any = target.generate(
        **inputs,
        speculator=best.speculator,
        speculation_config=best.config,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"\nGuessed by {best.name} and accepted are the words {_mark('marked like this', colour)}:\n")
    print(STORIES[0] + highlighted(out.speculation.per_row[0], tokenizer, colour))
    different = sum(report.overall[one.name].differing_rows or 0 for one in contenders)
    print(f"\nGreedy text {'is the same as' if not different else 'DIFFERS from'} that of plain generate.")
    return 1 if different else 0


def highlighted(row: RowStats, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """Return the text of ``row`` with accepted guesses in green, or in brackets where there is no colour."""
    pieces = ((guessed, text) for guessed, text in text_pieces(row, tokenizer) if text)
    return "".join(_mark(text, colour) if guessed else text for guessed, text in pieces)


def _mark(text: str, colour: bool) -> str:
    return f"{GUESSED}{text}{NORMAL}" if colour else f"[{text}]"


# -- generate ---------------------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    add = command(commands, _generate, "generate", "stream text decoded with a speculator, then say how it went")
    add("model", help="target: directory or Hub id")
    add("--speculator", required=True, metavar="X", help="ngram, mtp, or a draft: directory or Hub id")
    add("--prompt", metavar="TEXT", help="read from standard input if left out")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="length of the answer (%(default)s)")
    add("--temperature", type=float, metavar="T", help=TEMPERATURE_HELP)
    add("--seed", type=int, metavar="N", help="of the sampled tokens")
    add("--tree", type=tree_of, metavar="SHAPE", help=TREE_HELP)
    _add_proposal_options(add)
    add_device_options(add)


def _generate(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.prompt is None else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; pass --prompt TEXT or write it to standard input")
    target, tokenizer = load_target(args.model, args.dtype, args.device)
    speculator = load_speculator(args.speculator, target, args.dtype)
    prompt = Prompt((text,), chat=args.chat)
    input_ids = torch.tensor([prompt.render([], tokenizer)], device=input_device(target))
    if args.seed is not None:
        torch.manual_seed(args.seed)
    out: Any = target.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        speculator=speculator,
        speculation_config=_configured(speculator, args, args.tree),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
        **sampling(args.temperature),
    )
    print(out.speculation, file=sys.stderr)


# -- bench ------------------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    add = command(commands, _bench, "bench", "measure speculation against plain and assisted generation")
    add("model", help="target: directory or Hub id")
    add("--draft", nargs="+", default=["ngram"], metavar="X", help="ngram, mtp, directories or Hub ids (ngram)")
    add("--prompts", required=True, metavar="FILE", help="JSON lines; see docs/benchmarking.md")
    add("--limit", type=int, metavar="N", help="prompts per category")
    add("--tree", type=tree_of, nargs="+", default=[None], metavar="SHAPE", help=TREE_HELP)
    add("--search-tree", type=int, nargs="*", metavar="N", help="find and measure static trees of so many guesses "
        f"instead ({' '.join(map(str, BUDGETS))})")  # fmt: skip
    add("--save-tree", type=writable, metavar="FILE", help="write the fastest tree found, for --tree FILE.json")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per turn (%(default)s)")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts of a category decoded together (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 decodes greedily (%(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="runs of every method that do not count (%(default)s)")
    add("--repeats", type=int, default=1, metavar="N", help="runs of which the middle one counts (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="set before each run (%(default)s)")
    add("--no-baselines", action="store_true", help="leave out assisted generation and prompt lookup")
    add("--json", type=writable, metavar="FILE", help="write all figures")
    add("--png", type=writable, metavar="FILE", help="write a picture")
    add("--card", type=existing, metavar="README.md", help="add a table to the model card of the draft")
    _add_proposal_options(add)
    add_device_options(add)


def _bench(args: argparse.Namespace) -> None:
    prompts = read_prompts(args.prompts, args.limit)
    settings = BenchSettings(
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        temperature=args.temperature,
        repeats=args.repeats,
        warmup=args.warmup,
        baselines=not args.no_baselines,
        seed=args.seed,
    )
    budgets = _budgets(args)
    if args.card and len(args.draft) != 1:
        raise ValueError(f"--card is that of one draft, but --draft names {len(args.draft)}")
    if args.png:
        import_pyplot()
    target, tokenizer = load_target(args.model, args.dtype, args.device)
    names = [Path(draft).name for draft in args.draft]
    names = names if len(set(names)) == len(names) else args.draft
    drafts = {name: load_speculator(draft, target, args.dtype) for name, draft in zip(names, args.draft, strict=True)}
    contenders: list[Contender] = []
    expected: dict[str, float] = {}
    for name, speculator in drafts.items():
        if not budgets:
            contenders += [_contender(name, speculator, _configured(speculator, args, tree)) for tree in args.tree]
            continue
        ids = [torch.tensor([prompt.render([], tokenizer)], device=input_device(target)) for prompt in prompts]
        config = _configured(speculator, args, "chain")
        for tree, length in _found_trees(speculator, target, ids, config, budgets, args.max_new_tokens):
            contenders.append(Contender(f"{name} tree of {len(tree)}", speculator, config.merge(tree=tree)))
            expected[contenders[-1].name] = length
    report = run_bench(target, tokenizer, prompts, contenders, settings, progress=True)
    for category in report.figures:
        print(f"{category}\n{report.table(category)}\n")
    if expected:
        _tell_trees(report, contenders, expected, args.save_tree)
    if args.json:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if args.png:
        report.plot(args.png)
    if args.card:
        add_to_card(report, args.card)


def _budgets(args: argparse.Namespace) -> Sequence[int]:
    """Return how many guesses the trees to search for may have; none unless a search is asked for."""
    if args.search_tree is None:
        if args.save_tree:
            raise ValueError("--save-tree writes what --search-tree finds; add it")
        return ()
    if args.search_tree and min(args.search_tree) < 1:
        raise ValueError(f"a tree has at least 1 guess, got --search-tree {min(args.search_tree)}")
    return args.search_tree or BUDGETS


def _found_trees(
    speculator: Speculator,
    target: PreTrainedModel,
    prompts: list[Tensor],
    config: SpeculationConfig,
    budgets: Sequence[int],
    max_new_tokens: int,
) -> list[tuple[Tree, float]]:
    """Find a tree of each size, and the acceptance length that it promises."""
    depth = config.num_speculative_tokens
    depth = depth if isinstance(depth, int) else DEFAULT_NUM_SPECULATIVE_TOKENS
    accuracies = rank_accuracies(target, prompts, speculator, depth, max_new_tokens=max_new_tokens)
    found = {len(tree): tree for nodes in budgets if (tree := search_tree(accuracies, nodes))}
    if not found:
        raise ValueError("no guess of the draft was right on these prompts: there is no tree to find")
    return [(tree, expected_length(accuracies, tree)) for tree in found.values()]


def _tell_trees(
    report: BenchReport, contenders: list[Contender], expected: dict[str, float], path: Path | None
) -> None:
    """Compare what the trees found promised with what they did, and print the fastest one."""
    trees = {one.name: one.config.tree for one in contenders if one.config}
    for name, length in expected.items():
        print(f"{name}: expected τ {length:.2f}, measured {report.overall[name].mean_accepted_length:.2f}")
    best = max(expected, key=lambda name: report.overall[name].ratio_to_plain)
    text = json.dumps(trees[best])
    print(f"\nThe fastest is {best}:\n{text}")
    if path:
        path.write_text(text + "\n", encoding="utf-8")


# -- inspect and convert ----------------------------------------------------------------------------------------------


def _add_inspect(commands: Any) -> None:
    add = command(commands, _inspect, "inspect", "say what a draft checkpoint is and which engines read it")
    add("draft", help="directory or Hub id, of any format")


def _inspect(args: argparse.Namespace) -> None:
    print(inspect(args.draft))


def _add_convert(commands: Any) -> None:
    add = command(commands, _convert, "convert", "write a draft checkpoint in the layout of another project")
    add("draft", help="directory or Hub id, of any format")
    add("out", help="directory to write, which must not exist")
    add("--to", choices=layouts(), default="speculators", help="layout (%(default)s)")
    add("--verifier", metavar="ID", help="Hub id of the target, which vLLM wants to find in the config")


def _convert(args: argparse.Namespace) -> None:
    convert(args.draft, args.out, args.to, verifier=args.verifier)
    if args.to == "native":  # no draft by itself any more
        print(f"{args.out} holds mtp.safetensors: put it beside the target's files and name it in their index")
    else:
        print(inspect(args.out))


# -- how to guess -----------------------------------------------------------------------------------------------------


def _add_proposal_options(add: Any) -> None:
    add("--num-speculative-tokens", type=length_of, metavar="N", help="length of a chain, depth of a tree, or auto")
    add("--tree-top-k", type=int, metavar="N", help="children per node of a dynamic or sampled tree")
    add("--tree-nodes", type=int, metavar="N", help="guesses in a dynamic or sampled tree")


def _configured(speculator: Speculator, args: argparse.Namespace, tree: Any) -> SpeculationConfig:
    """Add the options that are given to what the draft itself wants."""
    options = {name: getattr(args, name) for name in ("num_speculative_tokens", "tree_top_k", "tree_nodes")}
    changes = {name: value for name, value in {**options, "tree": tree}.items() if value is not None}
    return speculator.settings(**changes | ({"tree": None} if tree == "chain" else {}))


def _contender(name: str, speculator: Speculator, config: SpeculationConfig) -> Contender:
    shape = "chain" if config.tree is None else f"{config.tree if isinstance(config.tree, str) else 'static'} tree"
    return Contender(f"{name} {shape}", speculator, config)


def tree_of(text: str) -> Any:
    """Read a tree from the command line."""
    try:
        text = Path(text).read_text(encoding="utf-8") if text.endswith(".json") else text
        tree: Any = json.loads(text) if text.startswith("[") else text
        if tree == "chain" or SpeculationConfig(tree=tree).tree:
            return tree
    except (TypeError, ValueError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is not {TREE_HELP}") from None


def length_of(text: str) -> int | str:
    """Read a number of guesses, or ``auto``."""
    if text == "auto" or (text.isdecimal() and int(text) > 0):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of at least 1 nor auto")


COMMANDS = (_add_demo, _add_generate, _add_bench, add_prepare, add_train, _add_inspect, _add_convert)
