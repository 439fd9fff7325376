"""How long prompts and texts may be: as the server allows, and as there is room."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from ..scoring.plain import position_limit, room_behind
from .policy import Policy


def fit(model: Any, prompt: int, config: GenerationConfig, policy: Policy, cache: int | None = None) -> None:
    """Let a text after ``prompt`` tokens end where the limit, the positions, or the paged ``cache`` do.

    Errors: a ValueError if there is no room for one token.
    """
    if prompt > policy.max_prompt_tokens:
        raise ValueError(
            f"the prompt has {prompt} tokens, and this server takes {policy.max_prompt_tokens} (--max-prompt-tokens)"
        )
    rooms = [policy.max_new_tokens]
    if cache is not None:
        more = ", or start the server with more --cb-num-blocks"
        rooms.append(room_behind(prompt, cache, "the paged cache has room", more))
    if (size := position_limit(model)) is not None:
        rooms.append(room_behind(prompt, size, "the model has room"))
    if config.max_new_tokens is None and config.max_length is not None:
        rooms.append(room_behind(prompt, config.max_length, "max_length has room"))
    if cache is None and config.max_new_tokens is None and config.max_length is None:
        return  # as short as transformers' default is
    config.max_new_tokens = min(config.max_new_tokens or rooms[0], *rooms)
