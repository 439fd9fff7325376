"""Regeneration of a dataset's answers by the target: a draft learns best from what its own target says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.fingerprint import computing, differences, fingerprint, generation_settings, tokenizer_digest
from ..processes import Processes
from ..progress import Progress
from ..scoring.plain import input_device, padded, position_limit, tokenizer_in
from ..untrusted import check_ends
from ..whole_files import append_answers, write_files
from .chat import (
    CUT,
    TEMPLATE_COLUMNS,
    Unusable,
    chat_columns,
    conversation_of,
    messages_of,
    render,
    template_arguments_of,
)
from .data import check_ids
from .endpoint import Endpoint, Refused, map_in_threads, request_of

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]

logger = logging.get_logger(__name__)

AT_FIRST = 16  # if a server refuses all of the first 16 conversations, the conversations are not the problem

Turn = list[dict[str, Any]]  # messages
Turns = list[Turn]


@dataclass
class _Asked:
    """The messages before each answer of a conversation, and its arguments for the chat template."""

    turns: Turns
    arguments: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)  # template columns, copied to the output as JSON


def regenerate(
    conversations: Iterable[Any],
    target: PreTrainedModel | Endpoint,
    tokenizer: Any,
    output: str | os.PathLike[str],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 512,
    progress: bool = True,
    template_arguments: dict[str, Any] | None = None,
    accelerator: Accelerator | PartialState | None = None,
    **generate_kwargs: Any,
) -> Path:
    """Write ``conversations`` to the jsonl file ``output`` with every answer replaced by ``target``'s own.

    A conversation is a list of messages, or a dict with one of the columns that ``prepare_dataset`` reads. The chat
    template gets the dict's ``tools`` and ``chat_template_kwargs``, and ``template_arguments``. Answers are
    regenerated in turn, each after the new ones before it. Messages after the last answer are dropped, and answers
    before the first question. If there is no answer, as in a column ``prompt`` or ``instruction`` alone, one is added
    at the end. A conversation that the template refuses becomes an empty one, which ``prepare_dataset`` skips.

    An interrupted call can be repeated: conversations that are complete in ``output`` are not answered again. A file
    next to it, its name with ``.made_from.json``, says what the answers were made with. ``generate_kwargs`` go to
    ``generate``: sampling, a speculator. An answer that ``max_new_tokens`` cut off, without an end-of-sequence token,
    is marked by ``"cut": true``, so that no draft learns to end there. Answers are also cut where the target's
    positions end; a conversation that leaves no position for one becomes empty too.

    Errors: a ValueError for a tokenizer without a chat template, and for token ids that the target does not have. Also
    if ``output`` holds anything but answers to ``conversations``, or answers of another target, tokenizer or way to
    generate. An OSError if it cannot be written.

    ``target`` may also be an ``Endpoint``, a server that answers ``batch_size`` requests at once. ``tokenizer`` is
    then not used, and conversations that the server refuses are skipped.

    With ``accelerator`` its processes share the conversations, ``batch_size`` each at a time, and the first one writes
    all answers. All call this with the same conversations, and each has a copy of the target. With an ``Endpoint``
    there may be only one process.
    """
    processes, path, tokenizer = Processes(accelerator), Path(output), tokenizer_in(tokenizer)
    _check(target, tokenizer, batch_size, processes)
    options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
    rest: Iterator[_Asked] = (_asked(conversation, template_arguments or {}) for conversation in conversations)
    made_from = partial(_made_from, target, tokenizer, options, template_arguments)
    done = processes.by_the_first(lambda: _begin(path, rest, made_from)) or 0
    if not processes.is_first:
        rest = islice(rest, done, None)
    answered = (
        _answered_by_server(rest, target, options, batch_size)
        if isinstance(target, Endpoint)
        else _answered_by_model(rest, target, tokenizer, options, batch_size, processes)
    )
    total = len(conversations) if isinstance(conversations, Sized) else None
    with Progress("Regenerating", total, "conversations", progress and processes.is_first, done) as bar:
        for batch in answered:
            lines = [{"messages": said, **one.columns} for one, said in batch]
            processes.by_the_first(lambda lines=lines: append_answers(path, lines))  # type: ignore[misc]
            bar.update(len(batch))
    processes.by_the_first(lambda: _warn_of_cut_answers(path))
    return path


def _check(target: PreTrainedModel | Endpoint, tokenizer: Any, batch_size: int, processes: Processes) -> None:
    if not isinstance(target, Endpoint) and not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, so the target cannot be asked: set tokenizer.chat_template"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; set at least 1")
    if isinstance(target, Endpoint) and processes.count > 1:
        raise ValueError("one process is enough for an Endpoint: it asks for batch_size answers at once")


def _begin(path: Path, rest: Iterator[_Asked], made_from: Callable[[], dict[str, Any]]) -> int:
    """Count the conversations in the file and advance ``rest`` past them; write or check the ``.made_from.json``."""
    done = _skip_done(path, rest)
    path.touch()  # if the file cannot be written, fail before anything is generated
    _check_made_from(path, done, made_from())
    return done


def _answered_by_model(
    rest: Iterator[_Asked],
    target: PreTrainedModel,
    tokenizer: Any,
    options: dict[str, Any],
    batch_size: int,
    processes: Processes,
) -> Iterator[list[tuple[_Asked, Turn]]]:
    """Yield batches of conversations with their answers, in order; each process answers an equal share of a batch."""

    def read() -> list[_Asked]:
        return list(islice(rest, processes.count * batch_size))

    while window := processes.same(read, lambda one: one.turns):
        share = -(-len(window) // processes.count)  # rounded up, so that nothing is left over
        mine = window[processes.number * share :][:share]
        parts = processes.together(lambda mine=mine: _answered(mine, target, tokenizer, options))  # type: ignore[misc]
        yield list(zip(window, chain.from_iterable(parts), strict=True))


def _answered_by_server(
    rest: Iterator[_Asked], server: Endpoint, options: dict[str, Any], at_once: int
) -> Iterator[list[tuple[_Asked, Turn]]]:
    """Yield conversations as the server answers them; a ValueError if it refuses all of the first ones."""

    def answer(asked: _Asked) -> tuple[_Asked, Turn | Refused]:
        said: Turn = []
        try:
            for turn in asked.turns:
                said += turn
                text, cut = server.answer(said, asked.arguments, options)
                said.append({"role": "assistant", "content": text} | ({CUT: True} if cut else {}))
        except Refused as refused:
            return asked, refused
        return asked, said

    refused, pending = 0, list[tuple[_Asked, Turn]]()
    for number, (asked, said) in enumerate(map_in_threads(answer, rest, at_once), start=1):
        refused += isinstance(said, Refused)
        pending.append((asked, [] if isinstance(said, Refused) else said))
        if refused < number:
            yield pending
            pending = []
        elif number == AT_FIRST:
            raise ValueError(f"{server.url} refused the first {number} conversations: {said}")
    yield pending
    if refused:
        logger.warning(f"{server.url} refused {refused} conversations: they are skipped")


def _made_from(
    target: PreTrainedModel | Endpoint, tokenizer: Any, options: dict[str, Any], arguments: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what the answers depend on; for a server, the model's name and the request's options."""
    template = {"template_arguments": arguments} if arguments else {}
    if isinstance(target, Endpoint):
        return {"model": target.model} | request_of({}, options) | template
    made_from = fingerprint(target) | computing(target) | {"tokenizer": tokenizer_digest(tokenizer)}
    return made_from | generation_settings(target, options) | template


def _check_made_from(path: Path, done: int, wanted: dict[str, Any]) -> None:
    """Write next to a new file what its answers are made with; raise a ValueError if old ones differ in that."""
    record = path.with_name(f"{path.name}.made_from.json")
    if not done:
        write_files({record.name: json.dumps(wanted, indent=1)}, record.parent)
        return
    if not record.exists():
        raise ValueError(
            f"{path} has no {record.name} next to it, which says how its answers were made: write to another file"
        )
    try:
        made_from = dict(json.loads(record.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{record} is cut off or damaged ({error}): write to another file") from error
    if ("model" in made_from) != ("model" in wanted):  # digests of one side only would all differ
        before, now = ("a server" if "model" in one else "the target here" for one in (made_from, wanted))
        raise ValueError(
            f"the answers in {path} are those of {before}, and {now} would go on: repeat the call that began it, or "
            "write to another file"
        )
    # Settings that only the old answers have are compared with None, so they differ too.
    if found := differences(made_from, dict.fromkeys(made_from) | wanted):
        raise ValueError(
            f"the answers in {path} were made with something else: {'; '.join(found)}. Repeat the call that began it, "
            "or write to another file"
        )


def _warn_of_cut_answers(path: Path) -> None:
    with path.open(encoding="utf-8") as lines:  # splitlines() would also split at other line ends within texts
        messages = [message for line in lines for message in json.loads(line)["messages"]]
    answers = [message for message in messages if message["role"] == "assistant"]
    if cut := sum(message.get(CUT, False) for message in answers):
        logger.warning(
            f"{cut} of {len(answers)} answers were cut off by max_new_tokens: drafts are not trained to end them "
            "there. Raise it, or leave them out with cut_answers='drop'"
        )


def _skip_done(path: Path, rest: Iterator[_Asked]) -> int:
    """Advance ``rest`` past the conversations in the file and count them; remove a line that a kill cut off."""
    if not path.exists():
        return 0
    check_ends(path)
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    lines = complete.splitlines()
    for number, line in enumerate(lines, start=1):
        if not _answers(line, next(rest, None)):
            raise ValueError(
                f"line {number} of {path} does not answer the questions of conversation {number}: repeat an "
                "interrupted call with the same conversations, or write to another file"
            )
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return len(lines)


def _answers(line: bytes, asked: _Asked | None) -> bool:
    """Tell whether a written line is an answer to ``asked``; an empty conversation may be one to any."""
    try:
        written = json.loads(line)["messages"]
    except (ValueError, LookupError, TypeError):
        return False
    return asked is not None and (written == [] or _turns(written) == asked.turns)


def _answered(batch: list[_Asked], target: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> list[Turn]:
    """Answer all conversations of a batch, turn by turn."""
    written: list[Turn] = [[] for _ in batch]
    turns = [one.turns for one in batch]
    for turn in range(max((len(one) for one in turns), default=0)):
        prompts = {}
        for row in [row for row, one in enumerate(turns) if len(one) > turn]:
            try:
                prompt = render(tokenizer, written[row] + turns[row][turn], True, batch[row].arguments)
                prompts[row] = _encoded(prompt, target, tokenizer)
                written[row] += turns[row][turn]
            except Unusable:
                turns[row], written[row] = [], []
        answers = _generate(list(prompts.values()), target, tokenizer, options)
        for row, (answer, cut) in zip(prompts, answers, strict=True):
            written[row].append({"role": "assistant", "content": answer} | ({CUT: True} if cut else {}))
    return written


def _asked(given: Any, arguments: dict[str, Any]) -> _Asked:
    if not isinstance(given, Mapping):
        return _Asked(_turns(given), arguments)
    try:
        conversation = conversation_of(given, chat_columns(given.keys(), questions=True))
        own = template_arguments_of(given)
    except (Unusable, ValueError):
        return _Asked([])
    columns = {name: given[name] for name in TEMPLATE_COLUMNS if given.get(name)}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in columns.items()}
    return _Asked(_turns(conversation), arguments | own, texts)


def _turns(conversation: Any) -> Turns:
    """Return the messages before each answer, or all if there is no answer; [] if it is invalid or asks nothing.

    An answer before the first question is left out: the target has nothing to answer yet.
    """
    try:
        messages = messages_of(conversation)
    except Unusable:
        return []
    turns: Turns = []
    turn: Turn = []
    for message in messages:
        if message["role"] != "assistant":
            turn.append(message)
        elif turns or _asks(turn):
            turns.append(turn)
            turn = []
    return turns or ([turn] if _asks(turn) else [])


def _asks(turn: Turn) -> bool:
    return any(one["role"] not in ("system", "developer") for one in turn)


def _encoded(prompt: str, target: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt; raise ``Unusable`` if it has none, or leaves no position for an answer."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise Unusable
    check_ids(0, max(ids), len(target.get_input_embeddings().weight))
    if (limit := position_limit(target)) is not None and len(ids) >= limit:
        logger.warning_once(f"conversations that leave no position for an answer in the target's {limit} are skipped")
        raise Unusable("long")
    return ids


def _generate(
    prompts: list[list[int]], target: Any, tokenizer: Any, options: dict[str, Any]
) -> list[tuple[str, bool]]:
    """Return the answer to each prompt (token ids), and whether it was cut off before its end-of-sequence token."""
    limit, wanted = position_limit(target), options["max_new_tokens"]
    lengths = [wanted if limit is None else min(wanted, limit - len(prompt)) for prompt in prompts]
    answers: dict[int, tuple[str, bool]] = {}
    for length in {*lengths}:  # prompts with few positions left must not shorten the answers to others
        rows = [row for row, one in enumerate(lengths) if one == length]
        asked = [prompts[row] for row in rows]
        found = _generate_together(asked, target, tokenizer, options | {"max_new_tokens": length})
        answers |= zip(rows, found, strict=True)
    return [answers[row] for row in range(len(prompts))]


@torch.no_grad()
def _generate_together(
    prompts: list[list[int]], target: Any, tokenizer: Any, options: dict[str, Any]
) -> list[tuple[str, bool]]:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    inputs = padded(prompts, pad, input_device(target))
    asked = inputs.pop("input_ids")  # (prompts, longest)
    out = target.generate(asked, **inputs, pad_token_id=pad, **options)
    said = out[:, asked.shape[1] :]  # (prompts, new tokens)
    ends = generation_settings(target, options).get("eos_token_id")  # may be 0, so compare with None
    is_end = torch.isin(said, torch.tensor([] if ends is None else ends, device=said.device))
    cut = ~is_end.any(1)
    lengths = torch.where(cut, said.shape[1], is_end.int().argmax(1)).tolist()
    # Special tokens inside an answer, such as those around reasoning, are part of what the target says.
    texts = [tokenizer.decode(row[:length]) for row, length in zip(said, lengths, strict=True)]
    return [(text.strip(), one) for text, one in zip(texts, cut.tolist(), strict=True)]
