"""Preparation of conversations or plain text: token ids with the target's own answers marked.

A draft is trained only on tokens that the target itself would emit: ``loss_mask`` is 1 on the assistant's tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import datasets  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..scoring.plain import tokenizer_in
from .chat import (
    CHAT_COLUMNS,
    CUT,
    PAIRS,
    Unusable,
    chat_columns,
    conversation_of,
    messages_of,
    refuse_unsound,
    template_arguments_of,
    tokenize_chat,
)
from .data_files import read_file
from .origin import record_tokenizer

logger = logging.get_logger(__name__)

MAX_LENGTH = 2048
TEXT = "text"  # the column of text, unless another is named
FIRST = 256  # examples of a stream that are read in advance, to find its columns and count what is skipped
COLUMNS = ("input_ids", "loss_mask", "document_ids")
ASK = "let the target answer first, by regenerate (hf-spec prepare --regenerate FILE.jsonl)"
REASONS = {
    "short": "have no two adjacent answer tokens, so there is no draft token to train on",
    "unanswered": f"have no answer of the assistant: {ASK}",
    "unmarked": "have answers whose beginning the chat template renders differently than for generation, or none but "
    "before the first question, so they are not found: mark them with {% generation %} in the template",
    "broken": "are no text, or no conversation that the chat template takes",
    "long": "are longer than max_length",
    "cut": "have an answer that was cut off",
}


def prepare_dataset(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = MAX_LENGTH,
    packing: bool = False,
    too_long: Literal["truncate", "drop"] = "truncate",
    last_turn_only: bool = False,
    text_column: str = TEXT,
    num_proc: int | None = None,
    cut_answers: Literal["keep", "drop"] = "keep",
    earlier_answers: Literal["keep", "drop"] = "drop",
    template_arguments: dict[str, Any] | None = None,
    end_of_text: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Turn conversations or plain text into examples for ``DraftTrainer``, with ``input_ids`` and ``loss_mask``.

    ``dataset`` is one of the ``datasets`` library or the path of a file (see ``read_file``). It has one of three
    forms. Conversations: ``messages``, lists of ``{"role", "content"}``, or ``conversations`` of ``{"from",
    "value"}``. A column of text, which counts as one answer. Questions and answers: ``prompt`` and ``completion``, or
    ``instruction``, ``input`` and ``output``. Text precedes questions and answers; a named ``text_column`` precedes
    conversations too. Textual questions and answers go through the chat template, or are concatenated without one.
    ``tokenizer`` is the target's. With ``packing``, documents share examples of up to ``max_length`` tokens, separated
    by ``document_ids``. ``last_turn_only`` marks only the last answer of a conversation.

    Some templates render an answer without its reasoning once another one follows. Such earlier answers are dropped
    and counted, or each becomes an example of its own, as it was said (``earlier_answers="keep"``). Examples with
    nothing to predict are dropped and counted by reason. Answers that ``regenerate`` marks as cut off are trained on
    without the template's end, or dropped with their conversations (``cut_answers="drop"``). The template is given
    ``template_arguments``, such as ``{"enable_thinking": False}``, and an example's columns ``tools`` and
    ``chat_template_kwargs``. ``end_of_text`` puts an end-of-sequence token after documents without a template.

    A ``datasets.IterableDataset`` stays a stream. Its examples are prepared while they are read, and packed a thousand
    documents at a time. Dropped examples are counted among its first ones only.

    Errors: a TypeError for another kind of dataset. A ValueError for a broken file or an unknown column, and if
    no example is left. Also for a tokenizer without a chat template, offsets or an end-of-sequence token where they
    are needed, and for ``num_proc`` with a stream.
    """
    _check_choices(max_length, too_long, cut_answers, earlier_answers, last_turn_only)
    if isinstance(dataset, str | os.PathLike):
        dataset = read_file(dataset)
    if (is_stream := _is_stream(dataset)) and num_proc is not None:
        raise ValueError("a stream is prepared while it is read: leave out num_proc, and set dataloader_num_workers")
    # In a tensor format, texts would not be strings.
    dataset, tokenizer = dataset.with_format(None), tokenizer_in(tokenizer)
    first = list(dataset.take(FIRST))
    names = dataset.column_names or list(first[0] if first else ())
    chat, templated = _columns(names, bool(first), tokenizer, text_column)
    if end_of_text and tokenizer.eos_token_id is None:
        raise ValueError("end_of_text=True needs an end-of-sequence token, and the tokenizer has none: set eos_token")
    choices = (text_column, max_length, too_long, last_turn_only, cut_answers, earlier_answers == "keep")
    tokenize = _Tokenize(tokenizer, chat, templated, *choices, template_arguments or {}, end_of_text)
    say = {} if is_stream else {"num_proc": num_proc, "desc": "Tokenizing", "features": _features()}
    examples = dataset.map(tokenize, batched=True, remove_columns=names, **say)
    seen: Any = tokenize({name: [one.get(name) for one in first] for name in names}) if is_stream else examples
    _report(list(seen["skipped"]), sum(seen["cut"]), list(seen["left_out"]))
    kept = packed(_kept(examples), max_length) if packing else _kept(examples)
    record_tokenizer(kept, tokenizer)
    return kept


def _kept(examples: Any) -> Any:
    """Drop skipped examples, and the columns that were only for the report."""
    kept = examples.filter(lambda skipped: skipped == "", input_columns="skipped")
    return kept.remove_columns(["skipped", "cut", "left_out"])


def packed(examples: Any, max_length: int) -> Any:
    """Pack documents into examples of up to ``max_length`` tokens."""
    return examples.map(_Pack(max_length), batched=True)


def _check_choices(
    max_length: int, too_long: str, cut_answers: str, earlier_answers: str, last_turn_only: bool
) -> None:
    if max_length < 3:
        raise ValueError(f"max_length is {max_length}, but an example needs three tokens; set more")
    if too_long not in ("truncate", "drop"):
        raise ValueError(f"too_long is {too_long!r}; choose 'truncate' or 'drop'")
    if cut_answers not in ("keep", "drop"):
        raise ValueError(f"cut_answers is {cut_answers!r}; choose 'keep' or 'drop'")
    if earlier_answers not in ("keep", "drop"):
        raise ValueError(f"earlier_answers is {earlier_answers!r}; choose 'keep' or 'drop'")
    if earlier_answers == "keep" and last_turn_only:
        raise ValueError("earlier_answers='keep' trains on more than the last turn: leave out last_turn_only")


def _is_stream(dataset: Any) -> bool:
    """Tell whether ``dataset`` is a stream. Errors: a TypeError if it is no dataset at all."""
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}: pass the path of a jsonl file, or a datasets.Dataset such as one "
            'split of a DatasetDict, dataset["train"], or datasets.Dataset.from_list(examples)'
        )
    return isinstance(dataset, datasets.IterableDataset)


def _columns(
    names: list[str], is_filled: bool, tokenizer: PreTrainedTokenizerBase, text_column: str
) -> tuple[tuple[str, ...], bool]:
    """Return the columns of conversations, () for text, and whether they go through the chat template."""
    if not is_filled:
        raise ValueError("the dataset is empty")
    chat = chat_columns(names)
    if text_column in names and (chat in PAIRS or text_column != TEXT):
        chat = ()
    if not chat and text_column not in names and (asked := chat_columns(names, questions=True)):
        raise ValueError(
            f"the column {asked[0]!r} has questions, but none of {names} is {dict(PAIRS)[asked[0]]!r}, their answers: "
            f"rename one, or {ASK}"
        )
    if not chat and text_column not in names:
        raise ValueError(
            f"no column of {[*CHAT_COLUMNS, *map(' and '.join, PAIRS)]} and no {text_column!r}, but "
            f"{names}; rename one, or name the text with text_column="
        )
    templated = len(chat) == 1 or bool(chat and tokenizer.chat_template)
    if templated:
        _check_tokenizer(tokenizer)
    return chat, templated


def _report(reasons: list[str], cut: int, left_out: list[int]) -> None:
    kept = reasons.count("")
    found = [f"{reasons.count(reason)} examples {text}" for reason, text in REASONS.items() if reason in reasons]
    if not kept:
        raise ValueError(f"no example is left to train on: {'; '.join(found)}")
    if found:
        logger.warning(f"{kept} of {len(reasons)} examples are kept: {'; '.join(found)}")
    if turns := sum(left_out):
        logger.warning(
            f"{turns} earlier answers of {sum(map(bool, left_out))} conversations are not trained on: the chat "
            "template renders them differently once another one follows, such as without their reasoning. "
            "earlier_answers='keep' makes an example of each, as it was said"
        )
    if cut:
        logger.warning(
            f"{cut} examples {REASONS['cut']}: its end, which the target did not generate, is not trained on"
        )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            "these are conversations, but the tokenizer has no chat template: take the target's instruct tokenizer, "
            "set tokenizer.chat_template, or give plain text"
        )
    if not tokenizer.is_fast and "{% generation" not in tokenizer.chat_template:
        raise ValueError(
            "answers are found by the places of tokens in the text, which slow tokenizers do not return: load the "
            "fast one, or mark answers with {% generation %} in the chat template"
        )


# An example of which nothing is kept. ``left_out`` counts its answers that are not marked.
NOTHING: dict[str, Any] = {"input_ids": [], "loss_mask": [], "cut": False, "skipped": "", "left_out": 0}


def _features() -> Any:
    """Name the types of NOTHING, which a first batch without any token does not tell."""
    kinds = {list: datasets.Sequence(datasets.Value("int64")), bool: datasets.Value("bool")}
    kinds |= {str: datasets.Value("string"), int: datasets.Value("int64")}
    return datasets.Features({name: kinds[type(value)] for name, value in NOTHING.items()})


@dataclass(frozen=True)
class _Tokenize:
    """The tokenization of a batch: ids and masks. A class, because worker processes and fingerprints pickle it."""

    tokenizer: Any
    chat: tuple[str, ...]  # columns of conversations; () for text
    templated: bool  # conversations go through the chat template
    text_column: str
    max_length: int
    too_long: str
    last_turn_only: bool
    cut_answers: str
    keeps_earlier: bool
    arguments: dict[str, Any]
    end_of_text: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        given = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        made = [one for example in given for one in self._examples(example)]
        return {name: [one[name] for one in made] for name in NOTHING}

    def _examples(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Tokenize an example; several result if earlier answers are kept that the template renders differently."""
        try:
            messages = messages_of(conversation_of(example, self.chat)) if self.templated else []
            cut = any(message.get(CUT) for message in messages)
            if cut and self.cut_answers == "drop":
                raise Unusable("cut")
            if not self.templated:
                return [self._example(*self._untemplated(example), cut)]
            arguments = self.arguments | template_arguments_of(example)
            ids, answers, left_out = tokenize_chat(self.tokenizer, messages, self.last_turn_only, arguments)
        except Unusable as error:
            return [NOTHING | {"skipped": error.reason}]
        earlier = []
        for number in left_out if self.keeps_earlier else ():
            with contextlib.suppress(Unusable):
                said = messages[: number + 1]
                one = tokenize_chat(self.tokenizer, said, last_turn_only=True, arguments=arguments)
                earlier.append(self._example(one.ids, one.answers, bool(said[-1].get(CUT))))
        complete = self._example(ids, answers, cut)
        return [*earlier, complete | {"left_out": len(left_out) - len(earlier)}]

    def _example(self, ids: list[int], answers: list[int], cut: bool) -> dict[str, Any]:
        if len(ids) > self.max_length and self.too_long == "drop":
            return NOTHING | {"skipped": "long"}
        ids, answers = ids[: self.max_length], answers[: self.max_length]
        # A position needs two answer tokens in a row, after the first token: see counted_positions.
        if not any(one and two for one, two in itertools.pairwise(answers[1:])):
            return NOTHING | {"skipped": "short"}
        return NOTHING | {"input_ids": ids, "loss_mask": answers, "cut": cut}

    def _untemplated(self, example: dict[str, Any]) -> tuple[list[int], list[int]]:
        asked, said = [], self._plain(example[self.text_column]) if not self.chat else []
        if self.chat:
            if any(isinstance(example[name], list) for name in self.chat):
                raise ValueError(
                    f"{' and '.join(self.chat)} hold messages, but the tokenizer has no chat template: take the "
                    "target's instruct tokenizer, set tokenizer.chat_template, or give plain text"
                )
            question, answer = (one.get("content") for one in conversation_of(example, self.chat))
            asked, said = self._plain(question), self._plain(answer, special=False)
        end = self.tokenizer.eos_token_id
        if self.end_of_text and said[-1:] != [end]:  # some tokenizers append it themselves
            said.append(end)
        return asked + said, [0] * len(asked) + [1] * len(said)

    def _plain(self, text: Any, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise Unusable
        refuse_unsound(text)
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])


@dataclass(frozen=True)
class _Pack:
    """First-fit-decreasing packing of documents into examples of up to ``max_length`` tokens."""

    max_length: int

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        bins: list[list[int]] = []
        free: list[int] = []
        for i in sorted(range(len(batch["input_ids"])), key=lambda i: -len(batch["input_ids"][i])):
            length = len(batch["input_ids"][i])
            place = next((place for place, left in enumerate(free) if left >= length), None)
            if place is None:
                bins.append([])
                free.append(self.max_length)
                place = len(bins) - 1
            bins[place].append(i)
            free[place] -= length
        packed: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "document_ids": []}
        for members in bins:
            for name in ("input_ids", "loss_mask"):
                packed[name].append([token for i in members for token in batch[name][i]])
            numbers = [[number] * len(batch["input_ids"][i]) for number, i in enumerate(members)]
            packed["document_ids"].append([number for document in numbers for number in document])
        return packed


def check_examples(examples: Any, vocabulary: int) -> None:
    """Raise a ValueError unless there are ``examples`` with answers, and all ids are below ``vocabulary``.

    Streams are not checked.
    """
    if not hasattr(examples, "__len__"):
        return
    if not len(examples):
        raise ValueError("the dataset is empty")
    check_columns(examples.column_names if isinstance(examples, datasets.Dataset) else examples[0])
    check_ids(*_range(examples, "input_ids"), vocabulary)
    lowest, highest = _range(examples, "loss_mask")
    if lowest < 0 or highest > 1:
        raise ValueError(
            f"loss_mask has values from {lowest} to {highest}, as labels have: write 1 for the target's own answers "
            "and 0 elsewhere"
        )
    if not highest:
        raise ValueError(
            "no token of the dataset is marked as an answer in its loss_mask, so there is nothing to train on"
        )


def check_columns(
    columns: Collection[str], what: str = "the dataset", cure: str = "make it with prepare_dataset"
) -> None:
    """Raise a ValueError unless ``columns``, those of a dataset or of a batch, are what drafts are trained on."""
    if missing := [name for name in COLUMNS[:2] if name not in columns]:
        raise ValueError(f"{what} has no {missing}, but {list(columns)}: {cure}")


def numbers(column: Any) -> list[int]:
    """Return a column of an example as a list, also if the dataset's format is torch or numpy."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def check_ids(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise a ValueError if ids from ``lowest`` to ``highest`` are not all in a ``vocabulary`` of that many tokens."""
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"the text has token ids from {lowest} to {highest}, but the target has {vocabulary} tokens: take the "
            "target's own tokenizer"
        )


def _range(examples: Any, column: str) -> tuple[int, int]:
    """Return the smallest and the largest value of a column of lists; (0, 0) if it has no values."""
    if isinstance(examples, datasets.Dataset):
        batches = examples.select_columns(column).with_format("arrow").iter(1000)
        found = [compute.min_max(compute.list_flatten(batch[column])).as_py() for batch in batches]
        bounds = [(one["min"], one["max"]) for one in found if one["min"] is not None]
    else:
        bounds = [(min(one), max(one)) for one in (examples[i][column] for i in range(len(examples))) if len(one)]
    return min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=0)


@dataclass(frozen=True)
class DraftCollator:
    """A collator that pads on the right, where no token of a causal model attends to the padding.

    Packed and other examples may be mixed in a batch: padding is then document -1. The ``states`` of cached examples
    are padded with zeros.
    """

    pad_token_id: int = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        check_columns(rows[0])  # of a stream they were not known before
        fill = dict(zip(COLUMNS, (self.pad_token_id, 0, -1), strict=True))
        rows = [row | {name: numbers(row[name]) for name in COLUMNS if name in row} for row in rows]
        lengths = [len(row["input_ids"]) for row in rows]
        missing = [max(2, *lengths) - length for length in lengths]  # a draft reads at least two tokens
        if any("document_ids" in row for row in rows):
            rows = [{"document_ids": [0] * length} | row for row, length in zip(rows, lengths, strict=True)]
        batch: dict[str, Any] = {}
        for name in (name for name in fill if name in rows[0]):
            if [len(row[name]) for row in rows] != lengths:
                raise ValueError(
                    f"{name} is not as long as input_ids in every example: make them with prepare_dataset"
                )
            padded = [[*row[name], *[fill[name]] * count] for row, count in zip(rows, missing, strict=True)]
            batch[name] = torch.tensor(padded)
        for layer in rows[0].get("states", ()):
            states = [pad(row["states"][layer], (0, 0, 0, count)) for row, count in zip(rows, missing, strict=True)]
            batch.setdefault("states", {})[layer] = torch.stack(states)
        return batch
