"""Suppression of transformers' report on loaded weights: drafts raise errors instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

REPORTER = logging.getLogger("transformers.modeling_utils")


@contextlib.contextmanager
def without_report() -> Iterator[None]:
    """Keep transformers' table of missing and unexpected tensors out of the log: it prints names unescaped from files.

    Loading a draft raises an error that names them.
    """

    def is_another(record: logging.LogRecord) -> bool:
        return record.module != "loading_report"

    REPORTER.addFilter(is_another)
    try:
        yield
    finally:
        REPORTER.removeFilter(is_another)
