"""``--history-file FILE``: start with the texts of earlier runs."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .common import writable

if TYPE_CHECKING:
    from ..drafts.base import Speculator


def add_history_file(add: Any) -> None:
    """Declare the option; ``check_history_file`` and ``keeping_history`` read it."""
    add("--history-file", type=writable, metavar="FILE", help="of --speculator history or history+DRAFT: begin with "
        "the texts there, and save all texts there at the end; readable by you alone")  # fmt: skip


def check_history_file(args: argparse.Namespace) -> None:
    """Raise a ValueError for ``--history-file`` with a speculator that keeps no history."""
    if args.history_file is not None and args.speculator.partition("+")[0] != "history":
        if args.speculator == "auto":
            why = "--speculator auto, which stands where none is given, may take a draft that uses none"
        else:
            why = f"--speculator {args.speculator} uses none"
        both = "" if args.speculator == "ngram" else f", or history+{args.speculator}"
        raise ValueError(f"--history-file keeps earlier texts, and {why}: take --speculator history{both}")


@contextlib.contextmanager
def keeping_history(
    args: argparse.Namespace, speculator: Speculator, tokenizer: Any, writes: bool = True
) -> Iterator[None]:
    """Load the history of ``speculator`` from the file, and save it at the end, whatever ends the command.

    Errors: a ValueError for a history of another tokenizer, an OSError for a damaged one.
    """
    if args.history_file is None:
        yield
        return
    from ..drafts.ngram.history_file import read_history
    from ..drafts.ngram.hybrid import HybridSpeculator
    from ..drafts.ngram.suffix_index import SuffixIndex

    history: Any = speculator.history if isinstance(speculator, HybridSpeculator) else speculator
    if args.history_file.exists():
        found = read_history(args.history_file, tokenizer)
        if found.size > history.history.size:  # or texts would be dropped
            history.history = SuffixIndex(found.size)
        history.learn([*found.texts()])
    try:
        with _exit_on_sigterm():
            yield
    finally:
        if writes:
            history.save(args.history_file, tokenizer)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM, which ends servers and batch jobs, raise SystemExit, so that ``finally`` blocks run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
