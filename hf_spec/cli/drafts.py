"""``hf-spec inspect`` and ``hf-spec convert``: describe a draft checkpoint, and write it for another engine."""

from __future__ import annotations

import argparse
from typing import Any

from .common import command

DEFAULT_LAYOUT = "speculators"


def add_inspect(commands: Any) -> None:
    """Declare ``hf-spec inspect``."""
    add = command(commands, _inspect, "inspect", "say what a draft checkpoint is and which engines read it")
    add("draft", help="directory or Hub id, of any format")


def _inspect(args: argparse.Namespace) -> None:
    from ..checkpoints.inspection import inspect

    print(inspect(args.draft))


def layout_of(text: str) -> str:
    """Read the name of a layout. All names are imported only to check one that is not the default."""
    if text != DEFAULT_LAYOUT:
        from ..checkpoints.kinds import layouts

        if text not in layouts():
            raise argparse.ArgumentTypeError(f"{text!r} is not a layout; choose from {', '.join(layouts())}")
    return text


def add_convert(commands: Any) -> None:
    """Declare ``hf-spec convert``."""
    add = command(commands, _convert, "convert", "write a draft checkpoint in the layout of another project")
    add("draft", help="directory or Hub id, of any format")
    add("out", help="directory to write, which must not exist")
    add("--to", type=layout_of, default=DEFAULT_LAYOUT, metavar="LAYOUT",
        help="such as speculators, or native for MTP layers; an unknown name lists all (%(default)s)")  # fmt: skip
    add("--verifier", metavar="ID", help="Hub id of the target, which vLLM wants to find in the config")
    add("--vocabulary", metavar="N", help="cut the draft to its N most frequent tokens in --prompts and the target's "
        "answers, or to those in a file, a JSON list of ids (FR-Spec)")  # fmt: skip
    add("--target", metavar="MODEL", help="the target, which --prompts needs, and a draft that takes its "
        "vocabulary from the target")  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON lines: every second prompt is counted, the others measure the draft "
        "before and after")  # fmt: skip
    add(
        "--self-contained", metavar="TARGET", help="write the embeddings and the output layer of TARGET into the draft"
    )
    add("--with-code", action="store_true", help="write the code, too, with which transformers alone reads the "
        "draft and decodes, with trust_remote_code=True")  # fmt: skip


def _convert(args: argparse.Namespace) -> None:
    from ..checkpoints.conversion import check_output, convert
    from ..checkpoints.files import looking_for
    from ..checkpoints.inspection import inspect

    given: dict[str, Any] = {}
    if args.vocabulary is None and (args.prompts or args.target):
        raise ValueError("--prompts and --target are for --vocabulary N, which cuts the draft to N tokens")
    check_output(args.out, args.to, args.verifier, args.with_code)  # models are loaded before convert does so
    if args.vocabulary is not None:
        from .trimming import chosen_vocabulary

        given["vocabulary"], given["target"] = chosen_vocabulary(
            args.draft, args.vocabulary, args.target, args.prompts, args.to
        )
    if place := args.self_contained or (None if args.prompts else args.target):  # prompts have loaded it
        from ..checkpoints.language_models import load_decoder

        given["target"] = None  # one target in memory is enough
        with looking_for(place, "the target"):
            given["target"] = load_decoder(place, dtype="auto")
        given["self_contained"] = bool(args.self_contained)
    convert(args.draft, args.out, args.to, verifier=args.verifier, with_code=args.with_code, **given)
    if args.to == "native":  # cannot be loaded without the target
        print(f"{args.out} holds mtp.safetensors: put it next to the target's files and name it in their index")
    else:
        print(inspect(args.out))
