"""A hook of mkdocs: links of a page to files outside docs/ lead to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Replace ``](../FILE)`` by the file's address."""
    return re.sub(r"\]\(\.\./(?=[\w.])", f"]({config.repo_url}/blob/main/", markdown)
