"""Which requests are refused before anything runs, and what is said of those that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig

from ..settings import is_int, is_temperature


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
    _refuse_values(body, FIELDS)
    if (given := body.get("generation_config")) is not None:
        _refuse_values(json.loads(given), SETTINGS, "generation_config: ")
    if body.get("chat_template_kwargs", {}) is None:
        del body["chat_template_kwargs"]  # which transformers would go through
    if bias := body.get("logit_bias"):
        body["logit_bias"] = {token: float(value) for token, value in bias.items()}  # transformers takes no integers


def quotable(error: BaseException) -> str:
    """Return the message of ``error`` such that it may stand between the quotes of a JSON string.

    transformers' server writes it there as it is, and a quote or a line break would make the client's JSON invalid.
    """
    return json.dumps(str(error) or type(error).__name__)[1:-1]


def _refuse_values(given: dict[str, Any], fields: Fields, where: str = "") -> None:
    for name, (test, meaning) in fields.items():
        if given.get(name) is not None and not test(given[name]):
            _refuse(where + name, f"{str(given[name])[:80]!r} is not {meaning}")


def _refuse(name: str, reason: str) -> None:
    raise HTTPException(status_code=400, detail=f"{name}: {reason}.")


def _is_count(value: Any) -> bool:
    return is_int(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # nan does not


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_temperature(value: Any) -> bool:
    return _is_number(value) and is_temperature(value)  # where requests are batched, an overflow would end them all


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode())  # which fails for half of a surrogate pair
    except UnicodeEncodeError:
        return False


def _is_stop(value: Any) -> bool:
    return all(map(_is_text, value)) and bool(value) if isinstance(value, list) else _is_text(value)


def _is_end(value: Any) -> bool:
    return all(map(is_int, value)) and bool(value) if isinstance(value, list) else is_int(value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content, calls = value.get("content"), value.get("tool_calls") or []
    return (content in ("", None) or _is_content(content)) and isinstance(calls, list) and all(map(_is_call, calls))


def _is_call(value: Any) -> bool:
    function = value.get("function") or value if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("arguments"), str | dict)


def _is_content(value: Any) -> bool:
    return all(map(_is_part, value)) if isinstance(value, list) else _is_text(value)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    return not value["type"].endswith("text") or value.get("text") == "" or _is_text(value.get("text"))


def _is_input(value: Any) -> bool:
    if not _are_objects(value):
        return _is_text(value)
    return all((_is_message if "role" in one else _is_part)(one) for one in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


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
_FLAG = (_is_flag, "true or false")
_TEMPERATURE = (_is_temperature, "a number of at least 0, which is 0 or from 1e-30 on")
_STOP = (_is_stop, "a string that is not empty, or a list of such")
Fields = dict[str, tuple[Callable[[Any], bool], str]]
FIELDS: Fields = {
    "messages": (_is_chat, "a list of messages that have a role, and a text or a list of typed parts as content"),
    "prompt": (_is_text, "a text"),
    "input": (_is_input, "a text, or a list of messages"),
    "suffix": (lambda value: value == "" or _is_text(value), "a text"),
    "stream": _FLAG,
    "tools": (_are_objects, "a list of objects"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": _TEMPERATURE,
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "frequency_penalty": (lambda value: _is_number(value) and value > -1, "a number above -1"),
    "seed": (_is_seed, "a whole number of at most 64 bits"),
    "stop": _STOP,
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
SETTINGS: Fields = {  # of generation_config, whose class looks at few
    "max_new_tokens": _COUNT,
    "max_length": _COUNT,
    "do_sample": _FLAG,
    "temperature": _TEMPERATURE,
    "top_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "top_k": (lambda value: is_int(value) and value >= 0, "a whole number of at least 1, or 0 for all"),
    "num_beams": _COUNT,
    "num_return_sequences": _ONE,
    "eos_token_id": (_is_end, "the id of a token, or a list of such"),
    "stop_strings": _STOP,
}
