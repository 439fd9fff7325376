"""Limits that depend on the model: lengths of prompts and texts, and the token ids that a request may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

from ..scoring.plain import position_limit, space_after
from .policy import Policy

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
    if config.max_new_tokens is None and config.max_length is not None:
        limits.append(space_after(prompt, config.max_length, "max_length has room"))
    if cache is None and config.max_new_tokens is None and config.max_length is None:
        return  # transformers' default length is shorter
    config.max_new_tokens = min(config.max_new_tokens or limits[0], *limits)


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
