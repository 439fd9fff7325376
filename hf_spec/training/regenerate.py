"""Let the target answer the questions of a dataset itself, for a draft learns best from what its target says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .data import messages_of

logger = logging.get_logger(__name__)


def regenerate(
    conversations: Iterable[Any],
    target: PreTrainedModel,
    tokenizer: Any,
    output: str | os.PathLike[str],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 512,
    progress: bool = True,
    **generate_kwargs: Any,
) -> Path:
    """Write ``conversations`` to the jsonl file ``output`` with every answer replaced by ``target``'s own.

    A conversation is a list of messages; those of the assistant are replaced in turn, each after the new ones before
    it. What stands after the last answer is left out. Rows that are in ``output`` already are not done again, so that
    an interrupted call can be repeated; a half-written last line is. ``generate_kwargs`` go to ``generate``: sampling,
    a speculator.

    Errors: a ValueError for a tokenizer without a chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, so the target cannot be asked: set tokenizer.chat_template"
        )
    path = Path(output)
    done = _drop_half_line(path)
    rest = islice(iter(conversations), done, None)
    bar: Any = logging.tqdm(initial=done, desc="Regenerating", disable=not progress)
    options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
    with path.open("a", encoding="utf-8") as file, bar:
        while batch := list(islice(rest, batch_size)):
            for messages in _answered([messages_of(one) for one in batch], target, tokenizer, options):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    return path


def _drop_half_line(path: Path) -> int:
    """Cut off a line that was being written when a call was interrupted, and count the whole ones."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return whole.count(b"\n")


def _answered(
    batch: list[list[dict[str, Any]]], target: PreTrainedModel, tokenizer: Any, options: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    """Answer all conversations of a batch, turn by turn."""
    written: list[list[dict[str, Any]]] = [[] for _ in batch]
    turns = [_turns(messages) for messages in batch]  # what is said before each answer
    for turn in range(max(len(one) for one in turns)):
        asked = [row for row, one in enumerate(turns) if len(one) > turn]
        for row in asked:
            written[row] += turns[row][turn]
        answers = _generate([written[row] for row in asked], target, tokenizer, options)
        for row, answer in zip(asked, answers, strict=True):
            written[row].append({"role": "assistant", "content": answer})
    return written


def _turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    turns: list[list[dict[str, Any]]] = []
    turn: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(turn)
            turn = []
        else:
            turn.append(message)
    return turns


@torch.no_grad()
def _generate(prompts: list[list[dict[str, Any]]], target: Any, tokenizer: Any, options: dict[str, Any]) -> list[str]:
    ids = [
        tokenizer(
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True), add_special_tokens=False
        )["input_ids"]
        for prompt in prompts
    ]
    longest = max(len(row) for row in ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    padded = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=target.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=target.device)
    out = target.generate(padded, attention_mask=mask, pad_token_id=pad, **options)
    return [text.strip() for text in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
