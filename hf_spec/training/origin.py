"""A record of the tokenizer that examples were prepared with, so that no target reads the ids of another one."""

from __future__ import annotations

import json
from typing import Any

from ..checkpoints.fingerprint import vocabulary_digest
from ..scoring.plain import tokenizer_in


def record_tokenizer(examples: Any, tokenizer: Any) -> None:
    """Write the tokenizer's digest into the dataset's description, which is saved with the dataset."""
    made_from = {"vocabulary": vocabulary_digest(tokenizer), "tokens": len(tokenizer)}
    examples.info.description = json.dumps({"hf_spec": made_from})


def check_tokenizer(examples: Any, tokenizer: Any, tokens: int | None = None) -> None:
    """Raise a ValueError if ``examples`` were prepared with another vocabulary, or one of more than ``tokens`` tokens.

    Examples without a record are not checked, nor is a tokenizer of ``None``.
    """
    try:
        made_from = json.loads(examples.info.description)["hf_spec"]
    except (AttributeError, ValueError, LookupError, TypeError):
        return
    if tokenizer is not None and made_from["vocabulary"] != vocabulary_digest(tokenizer_in(tokenizer)):
        problem = "with another tokenizer"
    elif tokens is not None and made_from["tokens"] > tokens:
        problem = f"with a tokenizer of {made_from['tokens']} tokens, of which the target has {tokens}"
    else:
        return
    raise ValueError(f"the examples were prepared {problem}: prepare the data again, with that of the target")
