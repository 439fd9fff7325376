"""What data were made from, so that nothing is added to data of another origin, or trained on them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIFFERENCES = {
    "config": "the target's config differs",
    "ends": "the target's embeddings or output layer differ",
    "body": "the target's layers differ",
    "tokenizer": "the tokenizer differs",
    "dataset": "the dataset differs",
}


def differences(made_from: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say in what ``made_from`` differs from ``wanted``; a tokenizer that is not known does not."""
    found = []
    for name, value in wanted.items():
        have = made_from.get(name)
        if have == value or (name == "tokenizer" and None in (have, value)):
            continue
        found.append(DIFFERENCES.get(name, f"{name} was {have}, not {value}"))
    return found


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest the vocabulary of ``tokenizer`` and its chat template."""
    return _digest([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])


def vocabulary_digest(tokenizer: Any) -> str:
    """Digest the vocabulary of ``tokenizer``: with the same one, ids mean the same tokens."""
    return _digest(sorted(tokenizer.get_vocab().items()))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# -- prepared examples ------------------------------------------------------------------------------------------------


def record_tokenizer(examples: Any, tokenizer: Any) -> None:
    """Write into the description of a dataset whose token ids it holds; it stays there when the dataset is saved."""
    made_from = {"vocabulary": vocabulary_digest(tokenizer), "tokens": len(tokenizer)}
    examples.info.description = json.dumps({"hf_spec": made_from})


def check_tokenizer(examples: Any, tokenizer: Any, tokens: int | None = None) -> None:
    """Raise a ValueError if ``examples`` hold ids of another vocabulary than ``tokenizer``'s, or more than ``tokens``.

    Examples that do not say whose ids they hold are not looked at, nor is a tokenizer of ``None``.
    """
    try:
        made_from = json.loads(examples.info.description)["hf_spec"]
    except (AttributeError, ValueError, LookupError, TypeError):
        return
    if tokenizer is not None and made_from["vocabulary"] != vocabulary_digest(tokenizer):
        problem = "with another tokenizer"
    elif tokens is not None and made_from["tokens"] > tokens:
        problem = f"with a tokenizer of {made_from['tokens']} tokens, of which the target has {tokens}"
    else:
        return
    raise ValueError(f"the examples were prepared {problem}: prepare the data again, with that of the target")
