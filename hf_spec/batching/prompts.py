"""Checks of prompts, which an engine would answer with no text and no exception if one of them is bad."""

from __future__ import annotations

from typing import Any

from ..scoring.adapters import base_model
from ..settings import is_int


def check_prompts(model: Any, prompts: Any) -> None:
    """Check the prompts of ``generate_batch``: a list of lists of token ids that ``model`` knows.

    Errors: a TypeError for anything else, a ValueError for a prompt that is empty or has other tokens.
    """
    if not isinstance(prompts, list | tuple):
        advice = (
            "without padding, prompts.tolist() is one"
            if hasattr(prompts, "tolist")
            else "pass [[1, 5], [1, 7]], or list(prompts)"
        )
        raise TypeError(f"prompts is a {type(prompts).__name__}: pass a list of lists of token ids; {advice}")
    for index, prompt in enumerate(prompts):
        check_prompt(model, prompt, f"prompt {index}")


def check_prompt(model: Any, prompt: Any, name: str = "the prompt") -> None:
    """Check one prompt, a list of token ids that ``model`` knows; messages call it ``name``.

    Errors: those of ``check_prompts``.
    """
    if not (isinstance(prompt, list | tuple) and all(map(is_int, prompt))):
        advice = "encode texts first, tokenizer(text)['input_ids'], and turn tensors into lists, tensor.tolist()"
        raise TypeError(f"{name} is {prompt!r:.80}: it must be a list of token ids; {advice}")
    check_ids(name, prompt, base_model(model).config.get_text_config(decoder=True).vocab_size)


def check_ids(name: str, ids: list[int] | tuple[int, ...], vocabulary: int | None) -> None:
    """Raise a ValueError with the prompt's ``name`` if it has no token, or one outside the ``vocabulary``.

    ``None`` checks no token against a vocabulary.
    """
    if not ids:
        raise ValueError(f"{name} is empty: it needs one token at least, such as the one that begins a text")
    if vocabulary is not None and (unknown := [one for one in ids if not 0 <= one < vocabulary]):
        raise ValueError(f"{name} has token {unknown[0]}, but the model knows {vocabulary}: use its tokenizer")
