"""Prompts of ``generate_many``: the accepted forms, what is kept until they are answered, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..batching.prompts import check_ids
from ..metrics import SpeculationStats
from ..scoring.plain import renders_by_code, tokenizer_in
from ..settings import is_int

EXAMPLES = "a text, a list of token ids, a list of messages such as {'role': 'user', 'content': ...}, or the tensors"
OF_DATA_SETS = {"text", "prompt", "messages"}  # names of columns that hold what may be passed as a prompt
MEDIA = ("image", "video", "audio")  # one of them is in the type of a part of a message that is no text


@dataclass
class Completion:
    """What was generated for one prompt of ``generate_many``.

    ``index`` is the prompt's place among the prompts. ``tokens`` are the new ones, the end-of-sequence token included.
    ``text`` is their text without special tokens, if there was a tokenizer. ``speculation`` holds the statistics of
    this prompt alone; ``None`` if nothing was drafted.
    """

    index: int
    prompt_ids: list[int]
    tokens: list[int]
    text: str | None = None
    speculation: SpeculationStats | None = None


@dataclass
class Pending:
    """A prompt that waits for its answer: its token ids, other tensors per token, and tensors of the complete prompt.

    ``per_token`` are (1, length) each, such as token types. ``others`` are images and the like, whose first dimension
    counts images, patches or prompts, as transformers' processors return them.
    """

    index: int
    ids: list[int]
    per_token: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what prompts must have in common to be in one batch: the names and sizes of their tensors."""
        sizes = [(name, tuple(tensor.shape[1:])) for name, tensor in self.others.items()]
        return (*sorted(self.per_token), *sorted(sizes))


def pending(index: int, prompt: Any, tokenizer: Any, vocabulary: int) -> Pending:
    """Turn what a user passes as a prompt into token ids, and tensors if there are some.

    Errors: a TypeError for what is no prompt. A ValueError for a prompt that is empty, needs a tokenizer, or has
    tokens outside the ``vocabulary``. Both name its index.
    """
    found = _parse(index, prompt, tokenizer)
    check_ids(f"prompt {index}", found.ids, None if found.others else vocabulary)  # image tokens may be outside
    return found


def _parse(index: int, prompt: Any, tokenizer: Any) -> Pending:
    if isinstance(prompt, Mapping):
        return _of_tensors(index, prompt)
    if isinstance(prompt, str):
        return Pending(index, list(_needed(tokenizer, index)(prompt)["input_ids"]))
    if hasattr(prompt, "tolist"):  # of torch or numpy
        prompt = prompt.tolist()
    if isinstance(prompt, list | tuple):
        if all(isinstance(one, Mapping) for one in prompt) and prompt:
            return _chat(list(prompt), tokenizer, index)
        if len(prompt) == 1 and isinstance(prompt[0], list):  # (1, length)
            prompt = prompt[0]
        if all(map(is_int, prompt)):
            return Pending(index, list(prompt))
    raise TypeError(f"prompt {index} is {prompt!r:.80}; pass {EXAMPLES} that a processor returns for one prompt")


def _needed(tokenizer: Any, index: int) -> Any:
    if tokenizer is None:
        raise ValueError(f"prompt {index} is text, which needs the model's tokenizer: pass tokenizer=, or token ids")
    return tokenizer_in(tokenizer)


def _renders(reader: Any) -> bool:
    return bool(reader.chat_template) or renders_by_code(reader)


def _chat(messages: list[Any], reader: Any, index: int) -> Pending:
    """Render a chat. A ``reader`` that is a processor also opens the pictures and sounds of its messages."""
    tokenizer, media = _needed(reader, index), _media(messages)
    if media and tokenizer is reader and not renders_by_code(tokenizer):  # Mistral's opens pictures itself
        raise ValueError(
            f"prompt {index} is a chat with a part of type {media!r}, and the tokenizer reads text alone: pass the "
            "model's processor as tokenizer="
        )
    otherwise = tokenizer if renders_by_code(tokenizer) else reader
    renders = next((one for one in (reader if media else tokenizer, reader) if _renders(one)), otherwise)
    by_code = renders_by_code(renders)
    if not _renders(renders):
        what = "tokenizer" if renders is tokenizer else "processor"
        raise ValueError(f"prompt {index} is a chat, but the {what} has no chat template: set one, or pass a text")
    form = {"tokenize": True, "return_dict": True, "return_tensors": "pt"} if media or by_code else {"tokenize": False}
    try:
        rendered = renders.apply_chat_template(messages, add_generation_prompt=True, **form)
    except Exception as error:  # templates may raise anything
        raise ValueError(f"prompt {index}: the chat template does not take its messages ({error})") from error
    if not (media or by_code):
        return Pending(index, list(tokenizer(rendered, add_special_tokens=False)["input_ids"]))
    found = _of_tensors(index, rendered)
    if media and not found.others:  # its template wrote a placeholder, or nothing
        raise ValueError(
            f"prompt {index}: the processor opens nothing for its part of type {media!r}: pass {{'type': 'image', "
            "'url': ...}, or the tensors that the processor returns for one prompt"
        )
    return found


def _media(messages: list[Any]) -> str | None:
    """Return the type of the first part of ``messages`` that is a picture, a video or a sound."""
    contents = [content for one in messages if isinstance(content := one.get("content"), list | tuple)]
    parts = [part for content in contents for part in content if isinstance(part, Mapping)]
    kinds = (str(part.get("type") or " ".join(map(str, part))) for part in parts)
    return next((kind for kind in kinds if any(word in kind for word in MEDIA)), None)


def _of_tensors(index: int, prompt: Mapping[str, Any]) -> Pending:
    if prompt.get("input_ids") is None:
        own = "the text or the messages themselves"
        instead = "what a processor returns" if OF_DATA_SETS.isdisjoint(prompt) else own
        raise ValueError(f"prompt {index} has no input_ids, only {sorted(map(str, prompt))}: pass {instead}")
    tensors = {name: _tensor(index, name, value) for name, value in prompt.items() if value is not None}
    ids = torch.atleast_2d(tensors.pop("input_ids"))  # (1, length)
    if ids.shape[0] != 1 or ids.ndim != 2:
        raise ValueError(f"prompt {index} has input_ids of shape {tuple(ids.shape)}: pass one prompt at a time")
    seen = torch.atleast_2d(tensors.pop("attention_mask", torch.ones_like(ids)))[0].bool()  # (length,)
    per_token = {name: value for name, value in tensors.items() if torch.atleast_2d(value).shape == ids.shape}
    others = {name: value for name, value in tensors.items() if name not in per_token}
    if scalars := [name for name, value in others.items() if value.ndim == 0]:
        raise ValueError(
            f"prompt {index} has a {scalars[0]} of no dimension: pass it to generate_many for all prompts"
        )
    per_token = {name: torch.atleast_2d(value)[:, seen] for name, value in per_token.items()}
    return Pending(index, ids[0, seen].tolist(), per_token, others)


def _tensor(index: int, name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"prompt {index} has {name} {value!r:.80}, of which no tensor can be made ({error}): pass only what a "
            "processor returns for one prompt"
        ) from error
