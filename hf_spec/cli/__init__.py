"""The command ``hf-spec``: try, use and measure speculation without writing a program.

It is built on argparse, which needs no further package and is the base of transformers' ``HfArgumentParser`` for
training arguments. A subcommand has a function that declares its options and one that runs it; ``COMMANDS`` lists the
former. Declaring options does not import torch or transformers, so help and usage errors appear at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..untrusted import printable
from .bench import add_bench
from .chat import add_chat
from .demo import add_demo
from .doctor import add_doctor
from .drafts import add_convert, add_inspect
from .generate import add_generate
from .messages import as_typed, showing_messages
from .serve import add_serve
from .training import add_prepare, add_train

COMMANDS = (
    add_demo,
    add_generate,
    add_chat,
    add_serve,
    add_bench,
    add_doctor,
    add_prepare,
    add_train,
    add_inspect,
    add_convert,
)
INTERRUPTED, PIPE_CLOSED = 130, 141  # exit statuses as shells give them: 128 and the number of the signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hf-spec`` with ``argv``, the process's own arguments by default, and return its exit status.

    Errors: a SystemExit for wrong arguments, after help, and if the output cannot be written.
    """
    _open_closed()
    _escape_unwritable()
    try:
        try:
            return _run(_parse(argv))
        finally:
            _flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as head, has gone
        _drop_output()
        return PIPE_CLOSED


def _open_closed() -> None:
    """Open the streams that the caller has closed, as by ``>&-``: Python has None in their place."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # as long as the process


def _flush() -> None:
    """Write what is left of the output. Errors: a SystemExit if that fails, for example on a full disk."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise SystemExit(f"hf-spec: the output could not be written, or not all of it: {error.strerror}") from error


def _drop_output() -> None:
    """Send what is left of the output nowhere, or Python's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unwritable() -> None:
    """Let output escape what its encoding lacks, so that no table or text ends a command whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-spec", description="Speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args, rest = _parser().parse_known_args(argv)
    if rest and not args.takes_rest:
        args.refuse(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    return args


def _run(args: argparse.Namespace) -> int:
    if not sys.stderr.isatty():
        _disable_progress_bars()
    import_module("..public", __name__)  # installs the keyword of generate
    try:
        if getattr(args, "threads", None):
            import torch

            torch.set_num_threads(args.threads)
        with showing_messages(args):
            status = int(args.run(args) or 0)
        if "WORLD_SIZE" in os.environ:  # a launcher has started several processes
            from ..processes import part

            part()
        return status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        if args.resumes and (how := args.resumes(args)):
            print(f"\nhf-spec: stopped. {how}", file=sys.stderr)
        raise
    except (ValueError, OSError, ImportError, argparse.ArgumentTypeError) as error:
        if args.traceback:
            raise
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"hf-spec: {printable(as_typed(told, args.options))}", file=sys.stderr)
        return 1


def _disable_progress_bars() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    from transformers.utils import logging

    logging.disable_progress_bar()  # transformers has a switch of its own
