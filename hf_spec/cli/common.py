"""Declaration of commands, options that several commands share, and the values of options."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import is_temperature

if TYPE_CHECKING:
    from ..drafts.base import Speculator
    from ..settings import SpeculationConfig

TEMPERATURE_HELP = "0 decodes greedily; left out: the model's own"
SPECULATOR_HELP = (
    "ngram, history, mtp, early-exit, auto, plain (no draft tokens), a draft (directory or Hub id), or history+DRAFT"
)
TREE_HELP = "chain, dynamic, sampled, a list of paths of ranks such as [[0],[1],[0,0]], or a .json file with one"
PICTURES = (".png", ".pdf", ".svg")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def command(
    commands: Any,
    run: Any,
    name: str,
    description: str,
    epilog: str | None = None,
    usage: str | None = None,
    resumes: Callable[[argparse.Namespace], str] | None = None,
) -> Any:
    """Add a subcommand and return its ``add_argument``; ``epilog`` is shown as it is below the options.

    With ``usage``, the command also takes arguments that argparse does not know; they are in ``args.rest``.
    ``resumes`` returns how to resume an interrupted command, or "".
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name,
        help=description,
        description=description,
        epilog=epilog,
        usage=usage,
        formatter_class=layout,
        allow_abbrev=usage is None,  # else it would take an unknown option for an abbreviation
    )
    options: dict[str, str] = {}
    parser.set_defaults(
        command=name, run=run, takes_rest=usage is not None, refuse=parser.error, options=options, resumes=resumes
    )

    def add(*names: str, **how: Any) -> None:
        if (action := parser.add_argument(*names, **how)).option_strings:
            options[action.dest] = names[0]

    return add


def resume_hint(*files: str) -> Callable[[argparse.Namespace], str]:
    """Return a function that says where an interrupted command resumes: after what the options ``files`` hold."""

    def say(args: argparse.Namespace) -> str:
        kept = [str(place) for name in files if (place := getattr(args, name)) and Path(place).exists()]
        return f"The same command resumes after what {' and '.join(kept)} holds" if kept else ""

    return say


def add_device_options(add: Any) -> None:
    """Declare where and how models run."""
    add("--dtype", choices=DTYPES, default="auto", help="of target and draft; auto: the target as it is stored, "
        "and the draft as the target (%(default)s)")  # fmt: skip
    add("--device", help="cpu, cuda, cuda:1, ..., or auto for all; left out: an accelerator if there is one")
    add("--threads", type=at_least(1), metavar="N", help="of the CPU")


def add_no_pack(add: Any) -> None:
    """Declare whether weights are packed; ``pack_models`` reads it."""
    add("--no-pack", action="store_true", help="on a CPU, leave the weights as torch keeps them; by default they are "
        "reordered once, for faster products")  # fmt: skip


def add_invariant(add: Any) -> None:
    """Declare the mode that is exact to the bit; ``pack_models`` begins it."""
    add("--invariant", action="store_true", help="give each text the same bits whatever is computed with it")


def add_proposal_options(add: Any) -> None:
    """Declare the size of proposals; ``configured`` reads it."""
    add("--num-speculative-tokens", type=length_of, metavar="N", help="length of a chain, depth of a tree, or auto")
    add("--tree-topk", type=at_least(1), metavar="N", help="children per node of a dynamic or sampled tree")
    add("--num-tree-tokens", type=at_least(1), metavar="N", help="draft tokens in a dynamic or sampled tree")


def add_speculator(add: Any) -> None:
    """Declare the speculator; by default the best one that needs no download."""
    add("--speculator", type=draft_of, default="auto", metavar="X", help=f"{SPECULATOR_HELP} (%(default)s)")


def add_answer_options(add: Any, length: int) -> None:
    """Declare how answers are decoded: length (``length`` by default), sampling, proposals and device."""
    add("--max-new-tokens", type=at_least(1), default=length, metavar="N", help="length of an answer (%(default)s)")
    add("--temperature", type=temperature_of, metavar="T", help=TEMPERATURE_HELP)
    add("--seed", type=seed_of, metavar="N", help="of the sampled tokens")
    add("--tree", type=tree_of, metavar="SHAPE", help=TREE_HELP)
    add_proposal_options(add)
    add_device_options(add)


def configured(speculator: Speculator, args: argparse.Namespace, tree: Any) -> SpeculationConfig:
    """Return the draft's own settings, changed by the options that are given."""
    options = {name: getattr(args, name) for name in ("num_speculative_tokens", "tree_topk", "num_tree_tokens")}
    changes = {name: value for name, value in {**options, "tree": tree}.items() if value is not None}
    found = speculator.settings(**changes | ({"tree": None} if tree == "chain" else {}))
    shapes = args.tree if isinstance(args.tree, list) else [tree]  # bench takes several, and some may be chains
    if not any(isinstance(one, str) and one != "chain" for one in (found.tree, *shapes)):
        for name in ("tree_topk", "num_tree_tokens"):
            if options[name] is not None:
                raise ValueError(
                    f"{args.options[name]} is for a tree that grows with each text, and this is "
                    f"{'a chain' if found.tree is None else 'a static tree'}: add --tree dynamic, or leave it out"
                )
    return found


def asked_for(speculator: Speculator, args: argparse.Namespace, tree: Any) -> SpeculationConfig:
    """Return the settings of a call: left out, the draft length is adaptive."""
    return configured(speculator, args, tree).merge(num_speculative_tokens=args.num_speculative_tokens)


def sampling(temperature: float | None) -> dict[str, Any]:
    """Return the options of ``generate`` for a temperature; none for ``None``."""
    if temperature is None:
        return {}
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


# -- values -----------------------------------------------------------------------------------------------------------


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads an integer that is not below ``least``."""

    def count(text: str) -> int:
        if text.strip().isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")

    return count


def temperature_of(text: str) -> float:
    """Read a temperature: 0, or a number by which scores may be divided without an overflow."""
    try:
        if is_temperature(value := float(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a temperature: 0, or a number from 1e-30 on")


def seed_of(text: str) -> int:
    """Read a seed that torch takes, even after the numbers of processes and answers are added."""
    try:
        if -(1 << 63) <= (value := int(text)) < 1 << 63:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a seed: a whole number of at most 63 bits")


def json_object(text: str) -> dict[str, Any]:
    """Read keys and values from the command line."""
    try:
        if isinstance(found := json.loads(text), dict):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')


def text_of(text: str) -> str:
    """Read a text. Python decodes bytes that are not UTF-8 as halves of surrogate pairs, which are refused."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not UTF-8; write it, or set your terminal, so") from error
    return text


def read_utf8() -> None:
    """Read standard input as UTF-8, unless it is a terminal: Windows would take a code page for pipes and files."""
    if hasattr(sys.stdin, "reconfigure") and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")


def draft_of(text: str) -> str:
    """Read the name of a draft; only an empty name is refused."""
    if text.removeprefix("history+").strip():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} names no draft: write {SPECULATOR_HELP}")


def length_of(text: str) -> int | str:
    """Read a draft length, or ``auto``."""
    if text == "auto" or (text.isdecimal() and int(text) > 0):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of at least 1 nor auto")


def tree_of(text: str) -> Any:
    """Read a tree from the command line."""
    from ..settings import SpeculationConfig

    try:
        given = Path(text).read_text(encoding="utf-8") if text.endswith(".json") else text
        tree: Any = json.loads(given) if given.lstrip().startswith("[") else given.strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"the tree {text!r} cannot be read ({error.strerror}); name a JSON file with a list of paths of ranks"
        ) from error
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {TREE_HELP}") from None
    if tree == "chain":
        return tree
    try:
        SpeculationConfig(tree=tree)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error) if _is_tree(tree) else f"{text!r} is not {TREE_HELP}") from error
    return tree


def _is_tree(tree: Any) -> bool:
    """Tell whether ``tree`` is a list of paths, though perhaps one with gaps."""
    return isinstance(tree, list) and bool(tree) and all(isinstance(path, list) and path for path in tree)


def writable(text: str) -> Path:
    """Return the path of a file that may be written, so that no result is lost after a long run."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a directory; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory; name a file in it")
    if not os.access(place := path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"you may not write to {place}; change its permissions or name another file")
    return path


def resumable(text: str) -> Path:
    """Return the path of a file, ``writable``, in which an interrupted command finds what it has done."""
    path = writable(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is a pipe or a device, which keeps nothing; name a file")
    return path


def write_result(path: Path, text: str) -> None:
    """Write ``text`` to the file at ``path``. Errors: an OSError that names it; half of it is not left there."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise OSError(f"{path} could not be written ({error.strerror}), and is lost") from error


def check_outputs(args: argparse.Namespace, outputs: Sequence[str], inputs: Sequence[str]) -> None:
    """Raise a ValueError if two options name one file, and one of ``outputs`` would write over what is in it."""
    taken: dict[Path, str] = {}
    for name in (*inputs, *outputs):
        if (given := getattr(args, name)) is None:
            continue
        place = Path(given).resolve()
        if place in taken:
            does = "reads" if taken[place] in inputs else "writes"
            raise ValueError(
                f"{args.options.get(name, name)} {given} would write over the file that "
                f"{args.options.get(taken[place], taken[place])} {does}: name another file"
            )
        taken[place] = name


def picture(text: str) -> Path:
    """Return the path of a picture, ``writable`` and of a format that matplotlib writes."""
    path = writable(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} has to end with {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    return path


def existing(text: str) -> Path:
    """Return the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path
