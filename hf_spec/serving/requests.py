"""Requests that are refused before anything runs, and the messages of those that fail."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _get_template_variables

from .fields import FIELDS, SETTINGS, Fields, is_objects, refuse
from .media import HOLDERS, bring_media, media_parts
from .policy import CHARACTERS_PER_TOKEN, DEEPEST_NESTING, Policy

TEXTS = (
    "messages",
    "prompt",
    "input",
    "instructions",
    "tools",
    "chat_template_kwargs",
    "suffix",
    "state",
    "questions",
)
THINKING = "enable_thinking"  # clients send it to every model
# Template variables that clients may not set: apply_chat_template's own arguments, and what it always passes.
ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
READ_ANYWAY = {"messages", "raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}


def refuse_request(body: dict[str, Any], policy: Policy, needs: str | None = None, takes_seeds: bool = True) -> None:
    """Raise an ``HTTPException`` 400 that names a field which would fail late, or would be ignored silently.

    ``needs`` is a required field. Two kinds of fields are left to transformers' server: unknown ones, which it
    refuses, and those that it ignores and that change no answer. URLs of images and audio are replaced by their
    content.
    """
    if needs is not None and not body.get(needs):
        refuse(needs, "it is empty or left out")
    if (name := body.get("model")) is not None and not isinstance(name, str):
        refuse("model", "it is not a text")
    wanted = body.get("response_format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else wanted
    if kind != "text":
        refuse("response_format", f"{kind!r} needs a grammar, and transformers' server has none; leave it out")
    _fill_in(body, needs)
    _refuse_values(body, FIELDS)
    if (given := body.get("generation_config")) is not None:
        body["generation_config"] = json.dumps(_settings(given, policy))
    if body.get("seed") is not None and not takes_seeds:
        refuse("seed", "all requests draw from one generator here; leave it out, or start the server without "
            "--continuous-batching")  # fmt: skip
    bring_media(body, policy)
    _refuse_size(body, needs, policy.max_prompt_tokens * CHARACTERS_PER_TOKEN)
    if (bias := body.get("logit_bias")) and needs == "prompt":  # which transformers' server would ignore there
        refuse("logit_bias", "it is for chats; here, pass sequence_bias in generation_config")
    if bias:
        body["logit_bias"] = {token: float(value) for token, value in bias.items()}  # transformers takes no integers


def _fill_in(body: dict[str, Any], needs: str | None) -> None:
    """Read a request as OpenAI's API does where transformers' server does not."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]  # which transformers' server would take for a value of some fields
    for name, empty in (("stop", []), ("logit_bias", {})):
        if body.get(name) == empty:
            del body[name]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        body["prompt"] = prompt[0]
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if needs == "input":  # /v1/responses, which transformers' server streams unless told otherwise
        body.setdefault("stream", False)


def refuse_template_arguments(body: dict[str, Any], template: Any) -> None:
    """Raise an ``HTTPException`` 400 for arguments that a chat ``template``, a text or several by name, does not read.

    Other names would reach ``apply_chat_template`` as its own arguments: templates, kinds of tensors, files.
    """
    given = body.get("chat_template_kwargs") or {}
    templates = template.values() if isinstance(template, dict) else [template]
    read = {THINKING}.union(*map(_read_by, templates))
    if unknown := given.keys() - read:
        refuse("chat_template_kwargs", f"the model's chat template does not read {sorted(unknown)[0]!r}, but "
               f"{', '.join(sorted(read))}")  # fmt: skip
    if not is_objects(given.get("documents") or []):
        refuse("chat_template_kwargs", "documents is not a list of objects")


def quotable(error: BaseException) -> str:
    """Return the message of ``error``, escaped for a JSON string.

    transformers' server inserts it as it is. A quote or a line break would make the client's JSON invalid.
    """
    return json.dumps(str(error) or type(error).__name__)[1:-1]


@functools.lru_cache
def _read_by(template: str | None) -> frozenset[str]:
    return frozenset(_get_template_variables(template) - ARGUMENTS - READ_ANYWAY)


def _settings(given: str, policy: Policy) -> dict[str, Any]:
    """Return the settings of ``generation_config``, with the numbers that transformers takes."""
    try:
        settings = json.loads(given)
        if not isinstance(settings, dict):
            raise TypeError("it is another value")
    except (ValueError, TypeError, RecursionError) as error:
        refuse("generation_config", f"{given[:80]!r} is not a JSON object, written as a string ({error})")
    where = "generation_config: "
    for name, value in settings.items():
        if name not in SETTINGS and value is not None:
            refuse(where + name[:80], f"of GenerationConfig these are served: {', '.join(SETTINGS)}")
    _refuse_values(settings, SETTINGS, where)
    if (settings.get("num_beams") or 1) > policy.max_beams:
        refuse(where + "num_beams", f"this server takes at most {policy.max_beams} (--max-beams)")
    for name in settings.keys() & {"temperature", "repetition_penalty"}:
        settings[name] = settings[name] and float(settings[name])  # no integers, which is what JavaScript writes
    if settings.get("sequence_bias"):
        settings["sequence_bias"] = [[tokens, float(bias)] for tokens, bias in settings["sequence_bias"]]
    if settings.get("temperature") == 0:
        settings |= {"temperature": None, "do_sample": False}
    try:
        GenerationConfig(**settings)  # checks some combinations of values
    except (TypeError, ValueError, AttributeError) as error:
        refuse("generation_config", str(error))
    return settings


def _refuse_values(given: dict[str, Any], fields: Fields, where: str = "") -> None:
    for name, (test, meaning) in fields.items():
        if given.get(name) is not None and not test(given[name]):
            refuse(where + name, f"{_shown(given[name])!r} is not {meaning}")


def _shown(value: Any) -> str:
    try:
        return str(value)[:80]
    except ValueError:  # more digits than Python converts
        return "a number of thousands of digits"


def _refuse_size(body: dict[str, Any], needs: str | None, most: int) -> None:
    """Refuse long texts before they are tokenized, and deep nesting, which templates would write out.

    Images and sounds do not count, where transformers reads them as such.
    """
    media = {id(part[HOLDERS[part["type"]]]) for part in media_parts(body)}
    left, seen = [(body[name], 0) for name in TEXTS if name in body], 0
    while left:
        value, depth = left.pop()
        if depth > DEEPEST_NESTING:
            refuse(needs or "body", f"lists and objects are nested more than {DEEPEST_NESTING} deep")
        if id(value) in media:
            continue
        if isinstance(value, str):
            seen += len(value)
        elif isinstance(value, dict):
            seen += 2 + sum(map(len, value))
            left += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list):
            seen += 2
            left += [(one, depth + 1) for one in value]
        else:  # a template may write it out; three bits of a whole number are at most one digit
            seen += 2 + value.bit_length() // 3 if isinstance(value, int) else 8
        if seen > most:
            refuse(needs or "body", f"it has more than {most} characters; the server's --max-prompt-tokens allows "
                   f"{CHARACTERS_PER_TOKEN} for each token")  # fmt: skip
