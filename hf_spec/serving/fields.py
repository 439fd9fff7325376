"""Allowed values of request fields: a test of each, and a description for the error message."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import HTTPException

from ..settings import is_int, is_temperature
from .policy import LONGEST_STOP_STRING, MOST_STOP_STRINGS

Test = Callable[[Any], bool]
Fields = dict[str, tuple[Test, str]]

MOST_TOKENS = 1024  # most token ids in one setting
MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio_url", "video_url")
INPUT_PARTS = ("text", "input_text", "output_text", *MEDIA_PARTS)  # that transformers' server reads


def refuse(name: str, reason: str) -> NoReturn:
    """Raise an ``HTTPException`` 400 about a field."""
    raise HTTPException(status_code=400, detail=f"{name}: {reason}.")


def is_count(value: Any) -> bool:
    """Tell whether ``value`` is a whole number of at least 1."""
    return is_int(value) and value >= 1


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is a number that a float holds, and neither infinite nor nan."""
    try:
        return (is_int(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def is_text(value: Any) -> bool:
    """Tell whether ``value`` is a text that is not empty and holds no half of a surrogate pair."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def is_objects(value: Any) -> bool:
    """Tell whether ``value`` is a list of objects."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def within(least: float, most: float, above: bool = False) -> Test:
    """Return a test for numbers from ``least``, or ``above`` it, to ``most``."""
    return lambda value: is_number(value) and least <= value <= most and not (above and value == least)


def _is_bias(value: Any) -> bool:
    return within(-1e4, 1e4)(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_from_zero(value: Any) -> bool:
    return is_int(value) and value >= 0


def _is_temperature(value: Any) -> bool:
    return is_number(value) and is_temperature(value)  # in a batch, an overflow would end all requests


def _is_stop(value: Any) -> bool:
    strings = value if isinstance(value, list) else [value]
    short = all(is_text(one) and len(one) <= LONGEST_STOP_STRING for one in strings)
    return short and 1 <= len(strings) <= MOST_STOP_STRINGS


def _is_token(value: Any) -> bool:
    return is_int(value) and 0 <= value < 1 << 31


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MOST_TOKENS and all(map(_is_token, value))


def _is_end(value: Any) -> bool:
    return _is_token(value) or _is_tokens(value)


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MOST_TOKENS and all(map(_is_tokens, value))


def _is_word_biases(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    return pairs and _is_words([words for words, _ in value]) and all(_is_bias(bias) for _, bias in value)


def _is_token_biases(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > MOST_TOKENS:
        return False
    return all(token.isascii() and token.isdecimal() and len(token) < 10 for token in value) and all(
        map(_is_bias, value.values())
    )


# -- chats ------------------------------------------------------------------------------------------------------------


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not is_text(value.get("role")):
        return False
    calls, name = value.get("tool_calls") or [], value.get("tool_call_id")
    called = isinstance(calls, list) and all(map(_is_call, calls)) and (name is None or is_text(name))
    return called and _is_content(value.get("content"))


def _is_call(value: Any) -> bool:
    function = value.get("function") or value if isinstance(value, dict) else None
    return isinstance(function, dict) and is_text(function.get("name")) and _is_arguments(function.get("arguments"))


def _is_arguments(value: Any) -> bool:
    try:
        return isinstance(json.loads(value) if isinstance(value, str) else value, dict)
    except (ValueError, RecursionError):
        return False


def _is_content(value: Any) -> bool:
    return all(map(_is_part, value)) if isinstance(value, list) else value in ("", None) or is_text(value)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    return not value["type"].endswith("text") or value.get("text") == "" or is_text(value.get("text"))


def _is_input(value: Any) -> bool:
    if not is_objects(value):
        return is_text(value)
    if value and "role" in value[0]:
        return all(map(_is_item, value))
    return all(_is_part(one) and one["type"] in INPUT_PARTS for one in value)  # transformers drops others


def _is_item(value: dict[str, Any]) -> bool:
    if (kind := value.get("type")) == "reasoning":
        parts = value.get("content") or []
        return is_objects(parts) and all(isinstance(part.get("text"), str) for part in parts)
    if "role" in value:
        return _is_message(value)
    if kind == "function_call":
        return is_text(value.get("call_id")) and _is_call({**value, "function": None})
    if kind == "function_call_output":
        return is_text(value.get("call_id")) and "output" in value and _is_content(value["output"])
    return True  # transformers refuses other types by name


def _is_tools(value: Any) -> bool:
    return is_objects(value) and all(map(_is_tool, value))


def _is_tool(value: dict[str, Any]) -> bool:
    function = value.get("function", value)
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        return False
    described = function.get("description") in (None, "") or is_text(function.get("description"))
    parameters = function.get("parameters")
    return is_text(function.get("name")) and described and (parameters is None or isinstance(parameters, dict))


def _is_questions(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in value.values()
    )


def _is_seed(value: Any) -> bool:
    return is_int(value) and -(1 << 63) <= value < 1 << 64  # as torch takes it


def _is_plain_format(value: Any) -> bool:
    wanted = value.get("format") if isinstance(value, dict) else value
    return wanted is None or (isinstance(wanted, dict) and wanted.get("type", "text") == "text")


_COUNT = (is_count, "a whole number of at least 1")
_FROM_ZERO = (_is_from_zero, "a whole number of at least 0")
_ONE = (lambda value: value == 1, "1, and a request has one answer; send it again, with another seed")
_FLAG = (_is_flag, "true or false")
_OFF = (lambda value: value is False, "false")
_TEMPERATURE = (_is_temperature, "a number of at least 0, which is 0 or from 1e-30 on")
_SHARE = (within(0, 1), "a number from 0 to 1")
_SOME = (within(0, 1, above=True), "a number above 0 and at most 1")
_PENALTY = (within(0.01, 100), "a number from 0.01 to 100")
_TOKEN = (_is_token, "the id of a token")
_TOKENS = (_is_tokens, f"a list of at most {MOST_TOKENS} ids of tokens")
_STOP = (
    _is_stop,
    f"a string of at most {LONGEST_STOP_STRING} characters that is not empty, or a list of at most "
    f"{MOST_STOP_STRINGS} such",
)
FIELDS: Fields = {
    "messages": (
        _is_chat,
        "a list of messages that have a role, a text or a list of typed parts as content, and calls of tools with a "
        "name and an object as arguments",
    ),
    "prompt": (is_text, "a text, or a list of one text; send a request for each prompt"),
    "input": (
        _is_input,
        f"a text, a list of items that begins with a message, or a list of parts ({', '.join(INPUT_PARTS)})",
    ),
    "questions": (_is_questions, "an object of questions that have a type"),
    "instructions": (lambda value: value == "" or is_text(value), "a text"),
    "suffix": (lambda value: value == "" or is_text(value), "a text"),
    "stream": _FLAG,
    "tools": (_is_tools, "a list of functions that have a name, and an object as parameters"),
    "parallel_tool_calls": _FLAG,
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": _TEMPERATURE,
    "top_p": _SOME,
    "frequency_penalty": (within(-0.99, 99), "a number from -0.99 to 99, for it is repetition_penalty - 1 here"),
    "seed": (_is_seed, "a whole number of at most 64 bits"),
    "stop": _STOP,
    "generation_config": (lambda value: isinstance(value, str), "a JSON object, written as a string"),
    "logit_bias": (_is_token_biases, f"numbers from -1e4 to 1e4 by the ids of at most {MOST_TOKENS} tokens"),
    # Fields that transformers' server ignores; values that change nothing are accepted.
    "n": _ONE,
    "best_of": _ONE,
    "logprobs": (
        lambda value: value is False,
        "false: probabilities are not returned; generate with output_logits=True",
    ),
    "top_logprobs": (lambda value: value == 0, "0: probabilities are not returned; generate with output_logits=True"),
    "presence_penalty": (lambda value: value == 0, "0, which is all that is served; take frequency_penalty"),
    "echo": (lambda value: value is False, "false: the prompt is not repeated; put it before the answer"),
    "tool_choice": (
        lambda value: value in ("auto", "none"),
        "'auto' or 'none': the model chooses; leave the other tools out",
    ),
    "text": (_is_plain_format, "of the format text; others need a grammar, and transformers' server has none"),
    "background": (lambda value: value is False, "false: answers are not kept"),
    "previous_response_id": (lambda value: False, "null: answers are not kept; send the messages before it"),
}
SETTINGS: Fields = {  # of generation_config, whose class checks few values
    "max_new_tokens": _COUNT,
    "max_length": _COUNT,
    "min_new_tokens": _FROM_ZERO,
    "min_length": _FROM_ZERO,
    "max_time": (within(0, 1e9, above=True), "a number of seconds"),
    "stop_strings": _STOP,
    "do_sample": _FLAG,
    "temperature": _TEMPERATURE,
    "top_k": (_is_from_zero, "a whole number of at least 1, or 0 for all"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": _SOME,
    "typical_p": _SOME,
    "epsilon_cutoff": (within(0, 0.999), "a number from 0 to 0.999"),
    "eta_cutoff": (within(0, 0.999), "a number from 0 to 0.999"),
    "repetition_penalty": _PENALTY,
    "no_repeat_ngram_size": _FROM_ZERO,
    "bad_words_ids": (_is_words, f"a list of at most {MOST_TOKENS} lists of ids of tokens"),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "sequence_bias": (_is_word_biases, f"a list of at most {MOST_TOKENS} pairs of ids of tokens and a number"),
    "forced_bos_token_id": _TOKEN,
    "forced_eos_token_id": (_is_end, "the id of a token, or a list of such"),
    "renormalize_logits": _FLAG,
    "remove_invalid_values": _FLAG,
    "guidance_scale": (within(0, 100), "a number from 0 to 100"),
    "num_beams": _COUNT,
    "early_stopping": (lambda value: _is_flag(value) or value == "never", "true, false or 'never'"),
    "length_penalty": (within(-100, 100), "a number from -100 to 100"),
    "num_return_sequences": _ONE,
    "use_cache": _FLAG,
    "eos_token_id": (_is_end, "the id of a token, or a list of such"),
    "pad_token_id": _TOKEN,
    "bos_token_id": _TOKEN,
    # Fields that occur in files and change nothing.
    "num_beam_groups": (lambda value: value == 1, "1"),
    "diversity_penalty": (lambda value: value == 0, "0"),
    "encoder_repetition_penalty": (lambda value: value == 1, "1"),
    "encoder_no_repeat_ngram_size": (lambda value: value == 0, "0"),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), _OFF),
    **dict.fromkeys(("return_dict_in_generate", "token_healing", "low_memory", "is_assistant"), _OFF),
    "transformers_version": (lambda value: isinstance(value, str), "a text"),
    "_from_model_config": _FLAG,
}
