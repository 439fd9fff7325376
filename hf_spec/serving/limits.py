"""Limits that depend on the model: lengths of prompts and texts, and the token ids that a request may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

from ..decode.options import option
from ..scoring.plain import position_limit, space_after
from .policy import Policy

DEFAULT_LENGTH = 20  # new tokens of transformers' generate, where nothing says how many
TOKENS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")


def limit_length(model: Any, prompt: int, config: GenerationConfig, policy: Policy, cache: int | None = None) -> None:
    """Limit the text after ``prompt`` tokens to the policy, the model's positions and the paged ``cache``.

    Errors: a ValueError if there is no space for one token, or for token ids outside the vocabulary.
    """
    _refuse_tokens(config, model.config.get_text_config(decoder=True).vocab_size)
    if prompt > policy.max_prompt_tokens:
        raise ValueError(
            f"the prompt has {prompt} tokens, and this server takes {policy.max_prompt_tokens} (--max-prompt-tokens)"
        )
    limits = [policy.max_new_tokens]
    if cache is not None:
        more = ", or start the server with more --cb-num-blocks"
        limits.append(space_after(prompt, cache, "the paged cache has room", more))
    if (size := position_limit(model)) is not None:
        limits.append(space_after(prompt, size, "the model has room"))
    new, longest = config.max_new_tokens, config.max_length
    if cache is None:  # generate fills in what the model's own generation config says
        new, longest = (
            option(model, {"generation_config": config}, name) for name in ("max_new_tokens", "max_length")
        )
    if new is None and longest is not None:
        limits.append(space_after(prompt, longest, "max_length has room"))
    elif new is None and cache is None:
        new = DEFAULT_LENGTH
    config.max_new_tokens = min(new or limits[0], *limits)


def _refuse_tokens(config: GenerationConfig, size: int) -> None:
    """Raise a ValueError for token ids outside the vocabulary, which would raise other errors later."""
    biases: Any = config.sequence_bias or {}
    words = [*biases] if isinstance(biases, dict) else [word for word, _ in biases]
    for name, value in {"sequence_bias": words, **{name: getattr(config, name) for name in TOKENS}}.items():
        if (token := max(_numbers(value), default=0)) >= size:
            raise ValueError(f"{name}: there is no token {token}, the model has {size}")


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    for one in value if isinstance(value, list | tuple) else ():
        yield from _numbers(one)
