"""The commands that train drafts. Packages that only they need are imported when they run."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from .common import (
    TEMPERATURE_HELP,
    add_device_options,
    at_least,
    command,
    draft_of,
    json_object,
    resumable,
    resume_hint,
    sampling,
    temperature_of,
)

RECIPE_HELP = """\
RECIPE.yaml holds at least

  target: ORG/MODEL
  draft: {kind: eagle3}            # or eagle, medusa, mtp, peagle, dflash, dflash2, dspark, or a draft's path
  data: chats.jsonl                # or a dataset of the Hub, or what hf-spec prepare wrote
  trainer: {output_dir: my-draft}  # arguments of transformers' Trainer and of hf_spec.training

More keys of these, and the sections prepare, features and peft, are optional. An unknown key is refused with a list.
"""


# -- prepare ----------------------------------------------------------------------------------------------------------


def add_prepare(commands: Any) -> None:
    """Declare ``hf-spec prepare``."""
    add = command(commands, _prepare, "prepare", "turn conversations or plain text into a dataset to train drafts on",
                  resumes=resume_hint("regenerate", "features"))  # fmt: skip
    add("data", help="file of JSON lines (or json, csv, parquet, txt), or a dataset of the Hub")
    add("out", help="directory to write, which must not exist; for `data:` in the recipe of hf-spec train")
    add("--target", required=True, metavar="MODEL", help="directory or Hub id, whose tokenizer is used")
    add("--config", metavar="NAME", help="of a dataset of the Hub that has several configurations")
    add("--split", default="train", metavar="NAME", help="of a dataset, or a slice such as train[:2000] (%(default)s)")
    add("--text-column", default="text", metavar="NAME", help="of plain text (%(default)s); one that you name goes "
        "before conversations")  # fmt: skip
    add("--max-length", type=at_least(1), default=2048, metavar="N", help="tokens of an example (%(default)s)")
    add("--too-long", choices=("truncate", "drop"), default="truncate", help="what happens beyond (%(default)s)")
    add("--last-turn-only", action="store_true", help="train on the last answer of a conversation only")
    add("--packing", action="store_true", help="put several documents into an example")
    add("--held-out", type=at_least(0), metavar="N", help="examples kept for evaluation (a tenth, at most 64)")
    add("--num-proc", type=at_least(1), metavar="N", help="processes")
    add(
        "--regenerate",
        type=resumable,
        metavar="FILE.jsonl",
        help="let the target answer again, into this file; an existing one is continued",
    )
    add("--endpoint", metavar="URL", help="let a server answer that has OpenAI's chat completions below URL "
        "(http://localhost:8000/v1), --batch-size requests at once; its key: OPENAI_API_KEY")  # fmt: skip
    add("--endpoint-model", metavar="NAME", help="what the server calls the target (what --target says)")
    add("--max-new-tokens", type=at_least(1), default=512, metavar="N", help="of a new answer (%(default)s)")
    add("--cut-answers", choices=("keep", "drop"), default="keep", help="answers that were cut off by "
        "--max-new-tokens: train on them without an end, or leave them out (%(default)s)")  # fmt: skip
    add("--earlier-answers", choices=("keep", "drop"), default="drop", help="answers that the chat template "
        "renders differently once another answer follows, such as without their reasoning: make each an example of "
        "its own, or leave them out (%(default)s)")  # fmt: skip
    add("--template-arguments", type=json_object, metavar="JSON", help="arguments of the chat template, such as "
        '\'{"enable_thinking": false}\'')  # fmt: skip
    add("--end-of-text", action="store_true", help="put an end-of-sequence token after documents of plain text")
    add("--temperature", type=temperature_of, metavar="T", help=f"of a new answer; {TEMPERATURE_HELP}")
    add(
        "--batch-size",
        type=at_least(1),
        default=8,
        metavar="N",
        help="conversations or examples read together (%(default)s)",
    )
    add("--speculator", type=draft_of, metavar="X", help="to answer faster: ngram, mtp, or a draft")
    add("--features", metavar="DIR", help="let the target read the examples, and keep its hidden states in "
        "DIR, after those that are there; for `features:` in the recipe")  # fmt: skip
    add("--layers", type=int, nargs="*", metavar="N", help="hidden states to keep in addition to the last ones; none "
        "for EAGLE-1, Medusa, and MTP drafts with features_after_norm (those of an EAGLE-3 draft)")  # fmt: skip
    add_device_options(add)


def _prepare(args: argparse.Namespace) -> None:
    from ..checkpoints.conversion import written_at_once
    from ..configuration import max_positions
    from ..processes import Processes, launched
    from ..training.sources import cache_splits, default_layers, load_raw, prepared, sizes
    from .loading import config_of, tokenizer_of

    _check_outputs(args)
    _check_alone(args)
    out = Path(args.out)
    config = config_of(args.target)
    data = load_raw(args.data, args.split, config=args.config)
    state, device = launched(args.device)
    if args.regenerate:
        data = load_raw(_regenerated(data, args, state, device))
    if not Processes(state).is_first:  # only answering is shared
        return
    names = "held_out max_length packing too_long cut_answers earlier_answers last_turn_only text_column num_proc"
    tokenizer = tokenizer_of(args.target)
    options = {name: getattr(args, name) for name in (*names.split(), "template_arguments", "end_of_text")}
    splits = prepared(data, tokenizer, positions=max_positions(config), **options)
    if args.features:
        from .loading import load_target

        target, _ = load_target(args.target, args.dtype, args.device)
        layers = default_layers(target) if args.layers is None else args.layers
        cache_splits(splits, target, layers, args.features, tokenizer=tokenizer, batch_size=args.batch_size)
    with written_at_once(out) as partial:
        splits.save_to_disk(str(partial))  # last, so that an interrupted call can be repeated
    for name, split in splits.items():
        tokens, answers = sizes(split)
        print(f"{name}: {len(split):,} examples, {tokens:,} tokens, {answers:,} of them answers")
    print(_coverage(splits, config.get_text_config().vocab_size))


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise an error for a place that cannot be written at the end, or that would be written over."""
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists; choose another directory or remove it")
    for name in ("regenerate", "features"):
        place = getattr(args, name)
        if place and out.resolve() in (Path(place).resolve(), *Path(place).resolve().parents):
            raise ValueError(f"--{name} {place} lies in {out}, which is written last, as a whole: name another")
    if args.regenerate and args.regenerate.suffix != ".jsonl":
        raise ValueError(f"--regenerate writes JSON lines: let {args.regenerate} end in .jsonl")
    if args.regenerate and args.regenerate.resolve() == Path(args.data).resolve():
        raise ValueError(
            f"--regenerate {args.regenerate} holds the data, and would be read as answers: name another file"
        )


def _check_alone(args: argparse.Namespace) -> None:
    """Raise a ValueError for options without the one that they belong to."""
    if args.endpoint and (args.speculator or not args.regenerate):
        raise ValueError("--endpoint needs --regenerate FILE, and takes no --speculator: the server may have its own")
    needed = {
        "speculator": ("regenerate", "FILE.jsonl"),
        "temperature": ("regenerate", "FILE.jsonl"),
        "endpoint_model": ("endpoint", "URL"),
        "layers": ("features", "DIR"),
    }
    for name, (other, value) in needed.items():
        if getattr(args, name) is not None and not getattr(args, other):
            raise ValueError(f"{args.options[name]} has no effect without {args.options[other]} {value}: add it")


def _coverage(splits: Any, vocabulary: int) -> str:
    """Return a line with the share of the answers' tokens in draft vocabularies of the training examples."""
    from ..training.sources import coverage

    shares = ", ".join(
        f"{size:,} {share:.1%}" for size, share in coverage(splits["train"], vocabulary, splits.get("test")).items()
    )
    which = "the held-out answers" if "test" in splits else "the answers that it is counted on (fewer of others)"
    return f"Share of {which} that a draft vocabulary of so many tokens has: {shares}"


def _regenerated(data: Any, args: argparse.Namespace, state: Any, device: str | None) -> str:
    """Let the target answer the conversations of ``data`` again; return the name of the file with the answers.

    The work is shared with the other processes of ``state``.
    """
    from ..training import Endpoint, regenerate
    from ..training.sources import conversations
    from .loading import load_models

    asked = conversations(data)
    drafts = [args.speculator] if args.speculator else []
    target: Any
    speculators: dict[str, Any] = {}
    if args.endpoint:
        target, tokenizer = Endpoint(args.endpoint, args.endpoint_model or args.target), None
    else:
        target, tokenizer, speculators = load_models(
            args.target, drafts, args.dtype, device, lambda draft: [draft.defaults()]
        )
    options = {"batch_size": args.batch_size, "max_new_tokens": args.max_new_tokens, **sampling(args.temperature)}
    options |= {"template_arguments": args.template_arguments, "accelerator": state}
    if args.speculator:
        options["speculator"] = speculators[args.speculator]
    return str(regenerate(asked, target, tokenizer, args.regenerate, **options))


# -- train ------------------------------------------------------------------------------------------------------------


def add_train(commands: Any) -> None:
    """Declare ``hf-spec train``."""
    add = command(commands, _train, "train", "train a draft by a YAML recipe", RECIPE_HELP, resumes=_resumes)
    add("recipe", metavar="RECIPE.yaml", help="target, draft, data and trainer; see below")
    add("changes", nargs=argparse.REMAINDER, metavar="...", help="--target, --draft and --data override those of the "
        "recipe, and so do trainer arguments such as --learning_rate 3e-4; --help lists all")  # fmt: skip


def _train(args: argparse.Namespace) -> None:
    from ..checkpoints.files import merging
    from ..training.recipe import read_recipe, train

    overrides, changes = _overrides().parse_known_args(args.changes)
    recipe = read_recipe(args.recipe, **vars(overrides))
    directory, metrics = train(recipe, changes)
    for name, value in metrics.items():
        print(f"{name:32} {value:.4g}")
    if recipe.get("peft"):
        print(f"The adapter is in {directory}: {merging(directory, recipe['draft'])}")
    else:
        print(f"The draft is in {directory}.")


def _overrides() -> argparse.ArgumentParser:
    """Return a parser of the options that override the recipe's own values."""
    parser = argparse.ArgumentParser(prog="hf-spec train", add_help=False, allow_abbrev=False)
    for name in ("--target", "--draft", "--data"):
        parser.add_argument(name)
    return parser


def _without(words: list[str], option: str) -> list[str]:
    """Return the ``words`` of a command line without ``--option`` and its value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{option}", f"--{option.replace('_', '-')}", nargs="?")
    return parser.parse_known_args(words)[1]


def _resumes(args: argparse.Namespace) -> str:
    """Return how to resume an interrupted training: from the last checkpoint in its directory, if there is one."""
    from transformers.trainer_utils import get_last_checkpoint

    from ..training.recipe import read_recipe, training_arguments

    if int(os.environ.get("RANK", "0")):  # only the first process prints it
        return ""
    overrides, changes = _overrides().parse_known_args(args.changes)
    directory = training_arguments(read_recipe(args.recipe, **vars(overrides))["trainer"], changes).output_dir
    last = get_last_checkpoint(directory) if directory and os.path.isdir(directory) else None
    if last is None:
        return f"No checkpoint is in {directory} yet: the same command starts from the beginning"
    words = ["hf-spec", "train", args.recipe, *_without(args.changes, "resume_from_checkpoint")]
    return f"To resume from {last}:\n  {shlex.join(words)} --resume_from_checkpoint true"
