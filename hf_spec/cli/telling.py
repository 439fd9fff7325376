"""What a command tells besides its results: warnings, and how far it is where no bar can be drawn."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator

SILENCE = 30.0  # seconds after which a line says that the command is at work
TALKING = ("chat", "serve")  # commands that wait for others


def as_typed(message: str, options: dict[str, str]) -> str:
    """Write in a ``message`` of Python's functions their arguments as ``options`` are called, by their names here.

    A name of one word is a word of the language, too: it is an option where a value is set, outside of a call.
    """
    for name, option in sorted(options.items(), key=lambda one: -len(one[0])):
        value = r"=(?P<quote>['\"])(?P<text>[^'\"]*)(?P=quote)|=(?P<flag>True)\b|=(?P<number>\d[\w.]*)"
        found = rf"(?<![\w('\".-]){name}\b(?:{value}{'|=(?!=)|' if '_' in name else ''})(?![\w(])"
        message = re.sub(found, lambda one, option=option: _spelled(option, one), message)  # type: ignore[misc]
    return message


def _spelled(option: str, found: re.Match[str]) -> str:
    value = found["number"] if found["text"] is None else found["text"]
    return option if value is None else f"{option} {value}"


class _Above(logging.Handler):
    """Write what the package logs above progress bars, options as they are typed."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__()
        self.options = options

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        tqdm.write(as_typed(self.format(record), self.options), file=sys.stderr)


@contextlib.contextmanager
def telling(args: argparse.Namespace, silence: float = SILENCE) -> Iterator[None]:
    """Show warnings of the package as the command's own; without a terminal say now and then how far it is."""
    handler, log = _Above(args.options), logging.getLogger(__name__.partition(".")[0])
    log.addHandler(handler)
    ended = threading.Event()
    if not sys.stderr.isatty() and args.command not in TALKING:
        threading.Thread(target=_say_that_it_works, args=(args.command, ended, silence), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        log.removeHandler(handler)


def _say_that_it_works(command: str, ended: threading.Event, silence: float) -> None:
    from ..progress import duration, working

    began = time.monotonic()
    while not ended.wait(silence):
        at = f": {working[-1]}" if working else ""
        print(
            f"hf-spec {command} is at work for {duration(time.monotonic() - began)}{at}", file=sys.stderr, flush=True
        )
