"""The data of the commands: from files, the Hub, or what ``hf-spec prepare`` wrote."""

from __future__ import annotations

import glob
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafts.eagle3.configuration import Eagle3SpeculatorConfig
from .chat import CHAT_COLUMNS, PAIRS, TEMPLATE_COLUMNS, chat_columns
from .data import MAX_LENGTH, numbers, packed, prepare_dataset
from .data_files import FILES, load, raise_full_disk, read_file
from .features import FeatureCache, cache_features
from .origin import record_tokenizer
from .vocabulary import count_tokens, most_frequent

logger = logging.get_logger(__name__)

HELD_OUT = 64  # examples for evaluation by default, at most
MIXED = 1000  # examples in a stream's shuffle buffer


def load_raw(
    name: str, split: str = "train", streaming: bool = False, config: str | None = None
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a file, a directory that ``save_to_disk`` wrote, or a dataset of the Hub or of a directory of files.

    A file has the ``split`` ``"train"`` alone, and slices of it such as ``"train[:100]"``. ``config`` chooses one of
    several configurations of a dataset of the Hub.

    Errors: those of ``read_file``, and a ValueError if there is no dataset, or a broken one.
    """
    path = Path(name)
    if is_file(name) or any(path.joinpath(file).is_file() for file in ("state.json", "dataset_dict.json")):
        if config is not None:
            raise ValueError(f"{name} has no configurations, as datasets of the Hub may: leave out config {config!r}")
        if is_file(name):
            return _part(read_file(path, streaming), split, name)
        data = _part(saved(name), split, name)
        return data.to_iterable_dataset() if streaming else data
    if path.is_dir() and glob.has_magic(str(path.resolve())):
        raise ValueError(
            f"the directory {path.resolve()} has one of *?[ in its path, which datasets takes for a pattern: "
            "rename it, or name a file in it"
        )
    try:
        return load(name, config, split=split, streaming=streaming)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise_full_disk(error)
        raise ValueError(
            f"no data can be read at {name!r}: {error.__cause__ or error}. Name a file of JSON lines (or json, "
            "csv, parquet, txt), a directory of such files and no others, or a dataset of the Hub, and one of its "
            "configurations by config if it has several"
        ) from error


def is_file(name: str) -> bool:
    """Tell whether ``name`` is a file of data, as far as its name says where there is none."""
    return Path(name).is_file() or Path(name).suffix in FILES


def _part(data: Any, split: str, name: str) -> Any:
    """Return a split of ``data``, or a slice, as ``datasets.load_dataset`` would; a single dataset is ``"train"``."""
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    if split in splits:
        return splits[split]
    try:
        lengths = {one: len(part) for one, part in splits.items()}
        wanted = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (TypeError, ValueError) as error:  # the length of a stream is unknown
        raise ValueError(
            f"{name} has no split {split!r}: name one of {[*splits]}, or a slice such as {next(iter(splits))}[:100], "
            "which a stream does not have"
        ) from error
    return datasets.concatenate_datasets([splits[one.splitname].select(range(one.from_, one.to)) for one in wanted])


def is_prepared(name: str) -> bool:
    """Tell whether ``name`` is a directory that the result of ``prepared`` was saved to."""
    if not Path(name, "dataset_dict.json").is_file():
        return False
    return all("input_ids" in columns for columns in saved(name).column_names.values())


def saved(name: str) -> Any:
    """Load what ``save_to_disk`` wrote. Errors: a ValueError if it is damaged."""
    try:
        return datasets.load_from_disk(name)
    except Exception as error:  # datasets and Arrow may raise anything
        raise ValueError(f"the dataset in {name} is damaged ({error}): prepare or copy it again") from error


def conversations(data: datasets.Dataset) -> Any:
    """Return the conversations of ``data`` for ``regenerate``. Errors: a ValueError if there are none."""
    columns = chat_columns(data.column_names, questions=True)
    if not columns:
        raise ValueError(
            f"only conversations and questions can be answered, a column of {[*CHAT_COLUMNS, *dict(PAIRS)]}, not "
            f"{data.column_names}"
        )
    return data if columns[0] not in CHAT_COLUMNS or {*TEMPLATE_COLUMNS} & {*data.column_names} else data[columns[0]]


def weights_of(data: Any) -> dict[str, float]:
    """Return the weight of each file or dataset in a recipe's ``data``: a name, a list, or names with weights.

    Errors: a ValueError for anything else, and for a weight that is not above 0.
    """
    named = {data: 1.0} if isinstance(data, str) else data
    if isinstance(named, list):
        named = dict.fromkeys(named, 1.0) if all(isinstance(name, str) for name in named) else None
    if not isinstance(named, dict) or not named:
        raise ValueError(
            f"data is {data!r}; write a name, a list of names, or names with weights, such as {{a.jsonl: 2}}"
        )
    for name, weight in named.items():
        if not isinstance(name, str) or type(weight) not in (int, float) or not 0 < weight < float("inf"):
            raise ValueError(f"data: {name} has the weight {weight!r}; set a number above 0")
    return named


def prepared(data: Any, tokenizer: Any, held_out: int | None = None, positions: int = 0, **options: Any) -> Any:
    """Prepare ``data`` as ``prepare_dataset`` does, and split them into ``"train"`` and ``"test"``.

    ``data`` may be several datasets, as pairs of a dataset and its weight. An example of weight 2 is trained on twice,
    and one of weight 0.5 with a probability of one half. Weights do not affect held-out examples. ``positions`` is
    the target's maximum length, 0 if unknown; a greater ``max_length`` is cut to it. ``held_out`` examples are for
    evaluation, by default a tenth, at most 64, and none if there is only one example.

    Streams stay streams. The first 64 documents are held out, or ``held_out``; the others are shuffled in a buffer of
    a thousand. The weights of several streams are the probabilities of taking the next example from each, until one
    of them ends.

    Errors: those of ``prepare_dataset``; a ValueError if no example would be left to train on.
    """
    if (length := options.get("max_length", MAX_LENGTH)) > positions > 0:
        logger.warning(
            f"examples may have {length} tokens, but the target has {positions} positions: they are cut to that"
        )
        options["max_length"] = positions
    parts = data if isinstance(data, list) else [(data, 1.0)]
    if isinstance(parts[0][0], datasets.IterableDataset):
        return _split_streams(parts, tokenizer, held_out, **options)
    made = [prepare_dataset(part, tokenizer, **options) for part, _ in parts]
    examples = datasets.concatenate_datasets(made)
    weights = [weight for part, (_, weight) in zip(made, parts, strict=True) for _ in range(len(part))]
    if held_out is None:
        held_out = min(HELD_OUT, len(examples) // 10 or 1, len(examples) - 1)
        if not held_out:
            logger.warning("there is one example only, so none is held out for evaluation")
    if not 0 <= held_out < len(examples):
        raise ValueError(
            f"held_out is {held_out}, but there are only {len(examples)} examples: keep fewer, or, if packing has put "
            "all documents into these, set a smaller max_length"
        )
    kept, rest = range(len(examples)), {}
    if held_out:
        split = datasets.Dataset.from_dict({"row": list(kept)}).train_test_split(test_size=held_out, seed=0)
        kept, rest = split["train"]["row"], {"test": examples.select(split["test"]["row"])}
    rng = random.Random(0)
    # A weight of 1.5 is one copy, and with a probability of 0.5 a second one.
    times = [(row, int(weights[row]) + (rng.random() < weights[row] % 1)) for row in kept]
    if not (repeated := [row for row, count in times for _ in range(count)]):
        raise ValueError("no example is left to train on: set greater weights")
    splits = datasets.DatasetDict(train=examples.select(repeated), **rest)
    for one in splits.values():
        record_tokenizer(one, tokenizer)
    return splits


def _split_streams(
    parts: list[Any], tokenizer: Any, held_out: int | None, packing: bool = False, **options: Any
) -> dict[str, Any]:
    streams = [prepare_dataset(part, tokenizer, **options) for part, _ in parts]
    shares = [weight / sum(weight for _, weight in parts) for _, weight in parts]
    count = HELD_OUT if held_out is None else held_out
    first = list(_mixed(streams, shares).take(count + 1))
    if not 0 <= count < len(first):
        raise ValueError(f"held_out is {count}, but there are only {len(first)}: keep fewer, or do not stream")
    # Held-out examples are filtered by content: other passes and workers meet them at other places of the stream.
    # Packing comes last, because packed with others they could not be recognised.
    is_new = partial(_is_new, {tuple(numbers(one["input_ids"])) for one in first[:count]})
    streams = [one.filter(is_new, input_columns="input_ids") for one in streams]
    if packing:
        streams = [packed(one, options.get("max_length", MAX_LENGTH)) for one in streams]
    splits = {"train": _mixed(streams, shares).shuffle(seed=0, buffer_size=MIXED)}
    if count:
        splits["test"] = datasets.Dataset.from_list(first[:count])
    for one in splits.values():
        record_tokenizer(one, tokenizer)
    return splits


def _mixed(streams: list[Any], shares: list[float]) -> Any:
    return datasets.interleave_datasets(streams, shares, seed=0) if len(streams) > 1 else streams[0]


def _is_new(known: set[tuple[int, ...]], ids: list[int]) -> bool:
    return tuple(numbers(ids)) not in known


def sizes(examples: Any) -> tuple[int, int]:
    """Count the tokens of prepared ``examples``, and those that are answers."""
    masks = examples["loss_mask"]
    return sum(len(mask) for mask in masks), sum(sum(mask) for mask in masks)


def coverage(examples: Any, vocabulary: int, held_out: Any = None) -> dict[int, float]:
    """Return the share of the answers' tokens that a draft vocabulary covers, for several sizes of it.

    The vocabulary is the most frequent tokens of ``examples``, so their own share is too optimistic. If ``held_out``
    examples are given, the share is theirs.
    """
    counts = count_tokens(examples, vocabulary)
    met = counts if held_out is None else count_tokens(held_out, vocabulary)
    found = {}
    for size in (vocabulary // 16, vocabulary // 8, vocabulary // 4, vocabulary // 2):
        kept = met[most_frequent(counts, max(1, size))].sum()
        found[size] = float(kept / met.sum().clamp(min=1))
    return found


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers that an EAGLE-3 draft of ``target`` reads by default."""
    config: Eagle3SpeculatorConfig = Eagle3SpeculatorConfig.for_target(target.config)
    return config.feature_layers(target.config.get_text_config().num_hidden_layers)


def cache_splits(
    splits: Mapping[str, Any],
    target: PreTrainedModel,
    layers: Sequence[int],
    directory: str,
    dtype: str | None = None,
    **options: Any,
) -> dict[str, FeatureCache]:
    """Cache the features of each split of the data in a directory of its own."""
    kind = None if dtype is None else getattr(torch, dtype)
    return {
        name: cache_features(split, target, layers, Path(directory, name), dtype=kind, **options)
        for name, split in splits.items()
    }
