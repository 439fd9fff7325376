"""Which requests are refused before anything runs, and what is said of those that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig

from ..settings import is_int


def refuse_request(body: dict[str, Any], needs: str | None = None) -> None:
    """Raise an ``HTTPException`` 400 that names the field for what would fail late, or be passed over in silence.

    ``needs`` is a field that must be there. Fields that transformers' server does not know stay its affair: it refuses
    them; so do those that it ignores and that change no answer.
    """
    if needs is not None and not body.get(needs):
        _refuse(needs, "it is empty or left out")
    wanted = body.get("response_format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else wanted
    if kind != "text":
        _refuse("response_format", f"{kind!r} needs a grammar, and transformers' server has none; leave it out")
    for name, (test, meaning) in FIELDS.items():
        if body.get(name) is not None and not test(body[name]):
            _refuse(name, f"{str(body[name])[:80]!r} is not {meaning}")
    if bias := body.get("logit_bias"):
        body["logit_bias"] = {token: float(value) for token, value in bias.items()}  # transformers takes no integers


def quotable(error: BaseException) -> str:
    """Return the message of ``error`` such that it may stand between the quotes of a JSON string.

    transformers' server writes it there as it is, and a quote or a line break would make the client's JSON invalid.
    """
    return json.dumps(str(error) or type(error).__name__)[1:-1]


def _refuse(name: str, reason: str) -> None:
    raise HTTPException(status_code=400, detail=f"{name}: {reason}.")


def _is_count(value: Any) -> bool:
    return is_int(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, list) and bool(strings) and all(isinstance(one, str) and one for one in strings)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | None)


def _is_generation_config(value: Any) -> bool:
    try:
        given = json.loads(value)
        GenerationConfig(**given)  # looks at the values, too
        return bool(given.keys() <= GenerationConfig().to_dict().keys()) and not any(map(given.get, MORE_THAN_TEXT))
    except (TypeError, ValueError, AttributeError):
        return False


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 64  # as torch takes it


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(token.isdecimal() and _is_number(one) for token, one in value.items())


MORE_THAN_TEXT = ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states")
_COUNT = (_is_count, "a whole number of at least 1")
_ONE = (lambda value: value == 1, "1, and a request has one answer; send it again, with another seed")
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "messages": (_is_chat, "a list of messages that have a role, and a text or a list as content"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": (lambda value: _is_number(value) and 0 <= value < float("inf"), "a number of at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "frequency_penalty": (lambda value: _is_number(value) and value > -1, "a number above -1"),
    "seed": (_is_seed, "a whole number of at most 64 bits"),
    "stop": (_is_stop, "a string that is not empty, or a list of such"),
    "generation_config": (
        _is_generation_config,
        "a JSON object, written as a string, of GenerationConfig's fields and values that go with text alone",
    ),
    "logit_bias": (_is_bias, "numbers by the ids of tokens"),
    # What transformers' server would pass over; values that change nothing are taken.
    "n": _ONE,
    "best_of": _ONE,
    "logprobs": (lambda value: value is False, "false: no probabilities are told; generate with output_logits=True"),
    "top_logprobs": (lambda value: value == 0, "0: no probabilities are told; generate with output_logits=True"),
    "presence_penalty": (lambda value: value == 0, "0, which is all that is served; take frequency_penalty"),
    "echo": (lambda value: value is False, "false: the prompt is not repeated; put it before the answer"),
    "tool_choice": (lambda value: value in ("auto", "none"), "'auto': the model chooses; leave the other tools out"),
}
