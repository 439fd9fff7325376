"""What transformers tells of weights that it loads, and drafts tell themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

REPORTER = logging.getLogger("transformers.modeling_utils")


@contextlib.contextmanager
def without_report() -> Iterator[None]:
    """Keep transformers' table of missing and left over tensors from the log: it prints their names as files say them.

    Whoever loads a draft gets an error that names them.
    """

    def is_another(record: logging.LogRecord) -> bool:
        return record.module != "loading_report"

    REPORTER.addFilter(is_another)
    try:
        yield
    finally:
        REPORTER.removeFilter(is_another)
