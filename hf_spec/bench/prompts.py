"""Prompts of a benchmark, in any common format of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..untrusted import check_ends, check_sound


@dataclass(frozen=True)
class Prompt:
    """One prompt: ``turns`` of a user after the messages ``history``, or one raw text (``chat=False``)."""

    turns: tuple[str, ...]
    category: str = "prompts"
    history: tuple[dict[str, str], ...] = ()
    chat: bool = True

    def render(self, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the token ids up to the turn that follows ``answers``.

        A tokenizer without a chat template gets the messages joined by blank lines.
        """
        if not self.chat:
            return list(tokenizer(self.turns[0]).input_ids)
        messages = [*self.history]
        for turn, answer in zip(self.turns, [*answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        if tokenizer.chat_template is None:
            return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def read_prompts(path: str | os.PathLike[str], limit: int | None = None) -> list[Prompt]:
    """Read a JSON-lines file, at most ``limit`` prompts per category.

    A line holds ``{"prompt": text}``, ``{"text": text}``, ``{"messages": [{"role", "content"}, ...]}`` (an answer at
    the end is dropped) or ``{"turns": [text, ...]}`` as in Spec-Bench, and optionally a ``"category"``.

    Errors: OSError if the file cannot be read; ValueError that names a line which is none of these, or for a ``limit``
    below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 prompt per category, got {limit!r}; leave it out for all")
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    for _, prompt in numbered_prompts(path):
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if limit is None or counts[prompt.category] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path} holds no prompts; write one JSON object per line, such as {{"prompt": "Once upon"}}')
    return prompts


def numbered_prompts(path: str | os.PathLike[str]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a JSON-lines file with the numbers of their lines, one by one; see ``read_prompts``."""
    check_ends(path)
    try:
        opened = Path(path).open("rb")  # noqa: SIM115  # json checks UTF-8, so the error names the line
    except OSError as error:
        raise type(error)(
            f"the prompts {str(path)!r} cannot be read ({error.strerror}); name a file of JSON lines"
        ) from error
    with opened as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.rstrip())  # with the newline, an error at the end would be on line 2
                check_sound(entry)
                prompt = _parse_prompt(entry)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}, column {error.colno} is no JSON ({error.msg}); write one object per "
                    'line, such as {"prompt": "Once upon"}'
                ) from error
            except (ValueError, RecursionError) as error:  # ValueError includes UnicodeDecodeError
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, prompt


def _parse_prompt(entry: Any) -> Prompt:
    entry = entry if isinstance(entry, dict) else {}
    category = str(entry.get("category", "prompts"))
    text = entry.get("prompt", entry.get("text"))
    if isinstance(text, str) and text:
        return Prompt((text,), category, chat=False)
    turns = entry.get("turns")
    if _all_of(str, turns):
        return Prompt(tuple(turns), category)
    messages = entry.get("messages")
    if _all_of(dict, messages) and all(
        isinstance(message.get(name), str) for message in messages for name in ("role", "content")
    ):
        asked = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        if asked:
            return Prompt((messages[asked[-1]]["content"],), category, tuple(messages[: asked[-1]]))
    raise ValueError(
        'a prompt is {"prompt": text}, {"text": text}, {"messages": [{"role": "user", "content": text}]} or '
        '{"turns": [text]}, none of them empty'
    )


def _all_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)
