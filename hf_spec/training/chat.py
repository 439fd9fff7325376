"""Tokenization of conversations, with a mask of the assistant's answers.

If the chat template has ``{% generation %}``, it marks the answer tokens itself. Otherwise the conversation is
rendered up to each answer and compared with the complete rendering.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..untrusted import check_sound

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
CUT = "cut"  # the key that marks answers cut off before the end token, see regenerate


CHAT_COLUMNS = ("messages", "conversations", "conversation")
PAIRS = (("prompt", "completion"), ("instruction", "output"))  # a question and its answer
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
NONE: Mapping[str, Any] = MappingProxyType({})


class Unusable(Exception):
    """An example that cannot be used for training; ``reason`` is a key of ``REASONS``."""

    def __init__(self, reason: str = "broken") -> None:
        super().__init__(reason)
        self.reason = reason


def messages_of(conversation: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation in the form that chat templates expect."""
    messages = []
    if not isinstance(conversation, list | tuple | None):
        raise Unusable
    refuse_unsound(conversation)
    for message in conversation or []:
        if not isinstance(message, dict):
            raise Unusable
        message = _said(message)
        role = message.get("role") or message.get("from")
        if not isinstance(role, str):
            raise Unusable
        rest = {name: value for name, value in message.items() if name not in ("role", "from", "content", "value")}
        content = message.get("content", message.get("value"))
        messages.append({"role": ROLES.get(role, role), "content": content, **rest})
    return messages


def refuse_unsound(value: Any) -> None:
    """Raise ``Unusable`` for text that is not valid UTF-8, or a value nested too deeply for a template."""
    try:
        check_sound(value)
    except ValueError as error:
        raise Unusable from error


def chat_columns(names: Collection[str], questions: bool = False) -> tuple[str, ...]:
    """Return the column of conversations among ``names``, or the two of questions and answers; () if there is none.

    With ``questions``, a column of questions is enough, for answers that are still to be generated.
    """
    single, alone = [(name,) for name in CHAT_COLUMNS], [(question,) for question, _ in PAIRS if questions]
    return next((found for found in (*single, *PAIRS, *alone) if {*found} <= {*names}), ())


def conversation_of(example: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    """Return the conversation in the ``columns`` of an example, or build one from a question and an optional answer.

    Question and answer are texts or messages. An ``input`` is appended to its ``instruction``, as in Alpaca.
    """
    if not columns:
        raise Unusable
    if columns[0] in CHAT_COLUMNS:
        return example[columns[0]]
    question, *answer = (example[name] for name in columns)
    if columns[0] == "instruction" and isinstance(question, str) and example.get("input"):
        question = f"{question}\n\n{example['input']}"
    said: list[Any] = []
    for role, content in zip(("user", "assistant"), (question, *answer), strict=False):
        if not isinstance(content, str | list) or not content:
            raise Unusable
        said += [{"role": role, "content": content}] if isinstance(content, str) else content
    return said


def template_arguments_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example's arguments for the chat template: ``tools`` and ``chat_template_kwargs``, JSON or not."""
    found = {}
    for name in TEMPLATE_COLUMNS:
        value = example.get(name)
        try:
            found[name] = json.loads(value) if isinstance(value, str) and value else value
        except (ValueError, RecursionError) as error:
            raise Unusable from error
        refuse_unsound(found[name])
        found[name] = _said(found[name])
    if not isinstance(arguments := found["chat_template_kwargs"] or {}, Mapping):
        raise Unusable
    return {**({"tools": found["tools"]} if found["tools"] else {}), **arguments}


def _said(value: Any) -> Any:
    """Drop each None: Arrow adds it for a key that only other examples have."""
    if isinstance(value, dict):
        return {name: _said(one) for name, one in value.items() if one is not None}
    return [_said(one) for one in value] if isinstance(value, list) else value


class Tokenized(NamedTuple):
    """A conversation as token ids, a mask of the assistant's tokens, and the indices of unmarked answers.

    ``left_out`` are answers that the template renders differently once other messages follow them.
    """

    ids: list[int]
    answers: list[int]
    left_out: tuple[int, ...] = ()


def tokenize_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    last_turn_only: bool = False,
    arguments: Mapping[str, Any] = NONE,
) -> Tokenized:
    """Return token ids and a mask of the assistant's tokens, including the end token.

    ``arguments`` are for the chat template, such as ``tools`` or ``enable_thinking``.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise Unusable("unanswered" if messages else "broken")
    messages = messages[: last + 1]
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        found = _by_markers(tokenizer, messages, arguments)
    else:
        found = _by_rendering(tokenizer, messages, last_turn_only, arguments)
    if last_turn_only:
        start = next(reversed(_runs(found.answers)), (0, 0))[0]
        found = found._replace(answers=[0] * start + found.answers[start:])
    return found


def _runs(answers: list[int]) -> list[tuple[int, int]]:
    """Return where each run of ones begins and ends."""
    starts = [i for i, one in enumerate(answers) if one and not (i and answers[i - 1])]
    return [(start, next((i for i in range(start, len(answers)) if not answers[i]), len(answers))) for start in starts]


def _by_markers(tokenizer: Any, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> Tokenized:
    shown = _shown(messages)
    try:
        encoded = tokenizer.apply_chat_template(
            shown, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
        )
    except Exception as error:  # templates may raise anything
        raise Unusable from error
    ids, answers = list(encoded["input_ids"]), [int(one) for one in encoded["assistant_masks"]]
    if not any(message.get(CUT) for message in messages):
        return Tokenized(ids, answers)
    text, runs = render(tokenizer, messages, arguments=arguments), _runs(answers)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    said = [message for message in messages if message["role"] == "assistant"]
    if len(said) != len(runs) or len(places) != len(ids):
        raise Unusable("cut")
    for message, (start, stop) in zip(said, runs, strict=True):
        end = _end_of_answer(message, text, places[start][0], places[stop - 1][1])
        answers[start:stop] = [int(first < end) for first, _ in places[start:stop]]
    return Tokenized(ids, answers)


def _end_of_answer(message: dict[str, Any], text: str, start: int, stop: int) -> int:
    """Return where the answer in ``text[start:stop]`` ends; if it was cut off, exclude the template's end of turn."""
    if not message.get(CUT):
        return stop
    said = content.strip() if isinstance(content := message.get("content"), str) else ""
    if said and (place := text.find(said, start, stop)) >= 0:
        return place + len(said)
    # The template may render only a part of the answer, or put its beginning into the prompt: search its last line.
    last = said.rpartition("\n")[2].strip()
    place = text.rfind(last, start, stop) if last else -1
    return place + len(last) if place >= 0 else start


def _by_rendering(
    tokenizer: Any, messages: list[dict[str, Any]], last_turn_only: bool, arguments: Mapping[str, Any]
) -> Tokenized:
    """Locate each answer: it begins where the rendered prompt ends, and ends where the rendering with it ends.

    An answer that no message precedes has no prompt, and is not marked.
    """

    def shown(said: list[dict[str, Any]], prompt: bool = False) -> str:
        return render(tokenizer, said, prompt, arguments)

    text, earlier = shown(messages), messages[:-1]
    prompt = shown(earlier, prompt=True)
    if not text.startswith(prompt):
        text = _as_said(prompt, text, messages[-1].get("content"))
    spans, left_out = [], []
    if earlier and text.startswith(prompt):
        spans = [(len(prompt), _end_of_answer(messages[-1], text, len(prompt), len(text.rstrip())))]
    for i, message in enumerate(earlier):
        if i == 0 or message["role"] != "assistant" or last_turn_only:
            continue
        before, after = shown(messages[:i], prompt=True), shown(messages[: i + 1])
        # A template may render an earlier answer differently, for example without its reasoning. The text then does
        # not contain what the target said, so this answer is not marked.
        if text.startswith(before) and text.startswith(after.rstrip()):
            spans.append((len(before), _end_of_answer(message, text, len(before), len(after.rstrip()))))
        else:
            left_out.append(i)
    if not text.startswith(prompt):
        left_out.append(len(earlier))
    if not spans:
        raise Unusable("unmarked")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = [
        int(any(first <= start < end or start < first < stop for first, end in spans))
        for start, stop in encoded["offset_mapping"]
    ]
    return Tokenized(list(encoded["input_ids"]), answers, tuple(left_out))


def _as_said(prompt: str, rendered: str, answer: Any) -> str:
    """Append the complete answer to ``prompt`` if the template has ``rendered`` only its end (DeepSeek-R1).

    If the template shows all of the answer, or none of it, return ``rendered``.
    """
    said = answer if isinstance(answer, str) else ""  # an answer may consist of tool calls only
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines or said.strip() in rendered or lines[-1] not in rendered:
        return rendered
    # The prompt may end with the beginning of the reasoning, such as "<think>": don't repeat it.
    begun = next((n for n in range(min(len(said), 32), 0, -1) if prompt.endswith(said[:n])), 0)
    return prompt + said[begun:].rstrip() + rendered.rpartition(lines[-1])[2]


def render(
    tokenizer: Any, messages: list[dict[str, Any]], prompt: bool = False, arguments: Mapping[str, Any] = NONE
) -> str:
    """Return the text that the chat template renders; ``prompt`` adds the header of the next answer."""
    if not messages:
        return ""
    try:
        text = tokenizer.apply_chat_template(
            _shown(messages), tokenize=False, add_generation_prompt=prompt, **arguments
        )
    except Exception as error:  # templates may raise anything
        raise Unusable from error
    refuse_unsound(str(text))
    return str(text)


def _shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without the ``CUT`` mark, which is for training and not for the template."""
    return [{name: value for name, value in message.items() if name != CUT} for message in messages]
