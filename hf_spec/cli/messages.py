"""Messages of a command in addition to its results: warnings, and progress where no bar can be shown."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator

SILENCE = 30.0  # seconds between two progress lines
INTERACTIVE = ("chat", "serve")  # commands that wait for users


def as_typed(message: str, options: dict[str, str]) -> str:
    """Replace names of Python arguments in a ``message`` by the ``options`` that users typed.

    ``options`` maps names to options. A name without an underscore may be an English word: it is replaced only where a
    value is set, outside of a call.
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
    """A log handler that writes above progress bars, with options as users type them."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__()
        self.options = options

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        tqdm.write(as_typed(self.format(record), self.options), file=sys.stderr)


@contextlib.contextmanager
def showing_messages(args: argparse.Namespace, silence: float = SILENCE) -> Iterator[None]:
    """Show warnings of the package as the command's own; without a terminal also its progress."""
    handler, log = _Above(args.options), logging.getLogger(__name__.partition(".")[0])
    log.addHandler(handler)
    ended = threading.Event()
    if not sys.stderr.isatty() and args.command not in INTERACTIVE:
        threading.Thread(target=_report_progress, args=(args.command, ended, silence), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        log.removeHandler(handler)


def _report_progress(command: str, ended: threading.Event, silence: float) -> None:
    from ..progress import duration, working

    began = time.monotonic()
    while not ended.wait(silence):
        at = f": {working[-1]}" if working else ""
        print(
            f"hf-spec {command} is at work for {duration(time.monotonic() - began)}{at}", file=sys.stderr, flush=True
        )
