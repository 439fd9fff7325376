"""Prompts of a benchmark, in any common format of JSON lines, and in Parquet files of SPEED-Bench."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..scoring.plain import position_limit, renders_by_code
from ..untrusted import check_ends, check_sound

# What stands in published rows of SPEED-Bench whose text may not be passed on; nvidia's script puts the text there.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
FETCHED = 64  # rows of a Parquet file at a time: prompts of SPEED-Bench have up to 32,000 tokens


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
        if renders_by_code(tokenizer):
            rendered: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(rendered["input_ids"])
        if tokenizer.chat_template is None:
            return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def read_prompts(path: str | os.PathLike[str], limit: int | None = None) -> list[Prompt]:
    """Read a file of JSON lines or a Parquet file, at most ``limit`` prompts per category.

    A line or row holds ``{"prompt": text}``, ``{"text": text}``, ``{"messages": [{"role", "content"}, ...]}`` (an
    answer at the end is dropped) or ``{"turns": [text, ...]}``, and optionally a ``"category"``. Spec-Bench and
    SPEED-Bench have turns; SPEED-Bench's JSON lines have them as messages of the user alone.

    Errors: OSError if the file cannot be read; ValueError that names a line which is none of these or lacks its text,
    or for a ``limit`` below 1; ImportError for a Parquet file without pyarrow.
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
        raise no_prompts(path)
    return prompts


def check_positions(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    name: str = "the target",
    instead: str = "leave the prompt out",
) -> None:
    """Raise a ValueError if ``model``, called ``name``, has no positions for a prompt, token ids, and its answer."""
    size = position_limit(model)
    longest = max(map(len, prompts), default=0)
    if size is not None and longest + max_new_tokens > size:
        raise ValueError(
            f"a prompt has {longest} tokens, and {name} has {size} positions, too few for max_new_tokens="
            f"{max_new_tokens} after it: ask for fewer, or {instead}"
        )


def no_prompts(path: str | os.PathLike[str]) -> ValueError:
    """Return the error for a file without prompts."""
    return ValueError(f'{path} holds no prompts; write one JSON object per line, such as {{"prompt": "Once upon"}}')


def numbered_prompts(path: str | os.PathLike[str]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a file with the numbers of their lines, one by one; see ``read_prompts``."""
    check_ends(path)
    if Path(path).suffix == ".parquet":
        yield from _prompts_in_rows(path)
        return
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


def _prompts_in_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a Parquet file with the numbers of their rows."""
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))  # untyped
    except ImportError as error:
        raise ImportError(
            f"{path} is a Parquet file, which pyarrow reads: pip install pyarrow, or write JSON lines"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file ({str(error).splitlines()[0]}); write JSON lines") from error
    with file:
        rows = (row for batch in file.iter_batches(FETCHED) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            try:
                yield number, _parse_prompt({name: one for name, one in row.items() if one is not None})
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: {error}") from error


def _parse_prompt(entry: Any) -> Prompt:
    prompt = _prompt_of(entry)
    if any(PLACEHOLDER in turn for turn in prompt.turns):
        raise ValueError(
            "its text is a placeholder of SPEED-Bench; run SPEED-Bench's prepare.py, which fetches the texts, and "
            "name the file that it writes"
        )
    return prompt


def _prompt_of(entry: Any) -> Prompt:
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
        rest = [message for message in messages if message.get("role") != "system"]
        if len(asked) == len(rest) > 1:  # turns without their answers, as in SPEED-Bench
            system = tuple(message for message in messages if message.get("role") == "system")
            return Prompt(tuple(message["content"] for message in rest), category, system)
        if asked:
            return Prompt((messages[asked[-1]]["content"],), category, tuple(messages[: asked[-1]]))
    raise ValueError(
        'a prompt is {"prompt": text}, {"text": text}, {"messages": [{"role": "user", "content": text}]} or '
        '{"turns": [text]}, none of them empty'
    )


def _all_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)
