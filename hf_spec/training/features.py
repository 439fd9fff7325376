"""A cache of the target's hidden states over a dataset, so that drafts are trained without running the target.

A cache is a directory with three things. Each shard is a safetensors file of complete examples. ``index.json`` says
what the cache was made from and which shards are finished. ``target/`` has the target's embeddings and output layer.

A file is written under a temporary name, flushed to the disk and renamed. A shard counts only once the index names
it. So a call that is killed leaves finished shards, and nothing that could be mistaken for one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.fingerprint import differences, fingerprint, has_body, tokenizer_digest
from ..configuration import hub_name
from ..progress import Progress
from ..scoring.adapters import base_model
from ..scoring.plain import input_device, tokenizer_in
from ..settings import is_int
from ..untrusted import check_ends, printable
from .card import ADAPTER, recorded_adapter
from .data import COLUMNS, DraftCollator, check_examples
from .embeddings_and_head import load_embeddings_and_head, save_embeddings_and_head
from .origin import check_tokenizer
from .teacher import Reader

logger = logging.get_logger(__name__)

FORMAT = 1
LAST = -1  # the number of the last hidden states, which the output layer reads; the least layer number
REMAKE = "repeat cache_features, or hf-spec train with the complete target, which computes only this shard again"
MAX_PENDING = 1  # shards that may wait to be written while the next one is computed


def cache_features(
    dataset: Any,
    target: PreTrainedModel,
    layers: Sequence[int],
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    shard_size: int = 2**28,
    progress: bool = True,
) -> FeatureCache:
    """Write the hidden states of ``target`` over a prepared ``dataset`` to ``directory``; return them as a dataset.

    ``layers`` are ``draft.feature_layers(target)``, or those of several drafts; the last hidden state is always kept.
    ``dtype`` is that of the states, the target's by default. Up to four shards of ``shard_size`` bytes are in memory
    at once. Only one process at a time may write to a directory.

    An interrupted call can be repeated: finished shards are kept. An existing cache in ``directory`` may have more
    layers than requested and shards of another size; without a ``dtype`` argument also another dtype. ``tokenizer``,
    if given, is compared with the cache's. Once all is finished, ``load_target()`` is enough as the target.

    Errors: a TypeError for a stream. A ValueError for an empty dataset, and for tokens or layers that the target does
    not have. Also if ``directory`` holds a cache of something else, which the message names. An OSError if a shard
    cannot be written.
    """
    if batch_size < 1 or shard_size < 1:
        raise ValueError(f"batch_size is {batch_size} and shard_size {shard_size}; set at least 1")
    _check_numbered(dataset)
    target, path = base_model(target).eval(), Path(directory)
    index = _Index.read(path) or _Index(path, {"shard_size": shard_size}, 0)
    kept = _layers(layers, target, index.made_from.get("layers", ()))
    check_tokenizer(dataset, tokenizer)
    survey = _survey(dataset, target)
    kind: Any = dtype or getattr(torch, index.made_from.get("dtype", ""), target.dtype)
    if not kind.is_floating_point:
        raise ValueError(f"dtype is {kind}, which holds no states; take torch.bfloat16 or another kind of float")
    made_from = {
        **fingerprint(target),
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer_in(tokenizer)),
        "dataset": survey.digest,
        "layers": kept,
        "dtype": str(kind).removeprefix("torch."),
    }
    if index.count:
        _refuse(path, differences(index.made_from, made_from))
    names = {"name": hub_name(target.config.name_or_path)} | recorded_adapter(target)
    index.made_from = made_from | names | index.made_from
    bytes_per_token = len(kept) * target.config.get_text_config().hidden_size * kind.itemsize
    shards = survey.shards(max(1, index.made_from["shard_size"] // bytes_per_token))
    index.count = len(shards)
    todo = {number: examples for number, examples in enumerate(shards) if not index.has(number)}
    if todo:
        rest, reader = [example for examples in todo.values() for example in examples], Reader(target, kept[1:])
        if has_body(target):
            reader.check()
        _begin(path, target, sum(survey.lengths[example] for example in rest) * bytes_per_token)
        with Progress("Caching", total := len(survey.lengths), "examples", progress, done=total - len(rest)) as bar:
            _fill(index, todo, _ShardReader(dataset, reader, batch_size, kind, bar))
    return FeatureCache(path)


def _check_numbered(dataset: Any) -> None:
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            "features need numbered examples, and a stream has none: take a part of it, "
            "datasets.Dataset.from_list(list(examples.take(10_000)))"
        )


def _layers(asked: Sequence[int], target: PreTrainedModel, there: Sequence[int]) -> list[int]:
    """Return the layers to keep, ascending: those ``there`` already, if they include all that are asked for."""
    kept, count = sorted({LAST, *asked}), target.config.get_text_config().num_hidden_layers
    if kept[0] < LAST or kept[-1] > count:
        raise ValueError(f"layers are {[*asked]}, but the target has none below -1 or above {count}")
    return [*there] if {*kept} <= {*there} else kept


def _begin(directory: Path, target: PreTrainedModel, size: int) -> None:
    """Create the directory and write the target's embeddings and output layer; warn if ``size`` bytes don't fit."""
    if not has_body(target):
        raise ValueError(f"the target has no layers to finish the cache in {directory} with: load the complete one")
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free) < size:
        logger.warning(f"the features need {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free in {directory}")
    try:
        save_embeddings_and_head(target, directory / "target")
    except ValueError as error:
        shutil.rmtree(directory / "target", ignore_errors=True)
        logger.warning(f"{error}, so training from this cache needs the complete target")


def _fill(index: _Index, todo: dict[int, list[int]], reader: _ShardReader) -> None:
    """Make the shards ``todo``: compute one while another is written."""
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as writer:
        for number, examples in todo.items():
            pending.append(writer.submit(_write_shard, index, number, examples, reader.read(examples)))
            while len(pending) > MAX_PENDING:
                pending.popleft().result()
        for written in pending:
            written.result()


class FeatureCache(Dataset[dict[str, Any]]):
    """The dataset that ``cache_features`` wrote: its examples with ``states``, a dict of layer -> (length, width).

    ``layers`` are the cached ones; -1 is the last hidden state.

    Errors: a ValueError if ``directory`` holds no finished cache; an OSError that names a damaged shard.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        index = _Index.read(self.directory)
        if index is None:
            raise ValueError(f"{self.directory} holds no feature cache: make one with cache_features")
        if len(index.shards) < index.count:
            raise ValueError(
                f"only {len(index.shards)} of {index.count} shards of {self.directory} are finished: repeat the call "
                "of cache_features that was interrupted"
            )
        self.made_from = index.made_from
        self.layers: tuple[int, ...] = tuple(index.made_from["layers"])
        paths = [self.directory / _name(number) for number in range(index.count)]
        self._shards = [_open_shard(path, index.shards.get(path.name, 0)) for path in paths]
        places = dict(
            found for number, path in enumerate(paths) for found in _places(number, self._shards[number], path)
        )
        if {*places} != {*range(len(places))}:
            raise OSError(f"examples are missing in the shards of {self.directory}: remove it, and make it again")
        self._places = [places[example] for example in range(len(places))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self._places[index]
        shard, path = self._shards[place.shard], self.directory / _name(place.shard)
        try:
            found = {name: shard.get_slice(name)[place.tokens] for name in {*shard.keys()} - {*PER_EXAMPLE}}
            states = {layer: found[f"states.{layer}"] for layer in self.layers}
        except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _damaged(path, f"cannot be read ({printable(error)})") from error
        if _checksum(found) != place.checksum:
            raise _damaged(path, "does not hold what was written")
        columns: dict[str, Any] = {name: found[name].tolist() for name in COLUMNS if name in found}
        return columns | {"states": states}

    def __reduce__(self) -> Any:  # open files cannot go to another process
        return FeatureCache, (self.directory,)

    def check(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        """Raise a ValueError that says what differs unless the cache has the ``layers`` of ``target``."""
        found = differences(self.made_from, fingerprint(target))
        if missing := sorted({*layers} - {*self.layers}):
            found.append(f"layers: it has {list(self.layers)}, and {missing} are missing")
        _refuse(self.directory, found)

    def load_target(self) -> Any:
        """Load the target without its layers, which is enough for ``new_draft`` and ``DraftTrainer``.

        Errors: a ValueError if the cache does not have it.
        """
        if not (self.directory / "target").exists():
            raise ValueError(
                f"{self.directory} has no embeddings and no output layer: load the complete target instead"
            )
        try:
            target = load_embeddings_and_head(self.directory / "target")
        except (SafetensorError, OSError, LookupError, AttributeError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"{self.directory / 'target'} is damaged ({printable(error)}): remove it, and load the complete "
                "target instead"
            ) from error
        setattr(target, ADAPTER, self.made_from.get("adapter", ""))  # for the draft's model card
        return target


def _refuse(directory: Path, found: list[str]) -> None:
    if found:
        raise ValueError(
            f"the feature cache in {directory} was made from something else: {'; '.join(found)}. Use what it "
            "was made from, or make another cache in another directory"
        )


# -- the dataset, before the target reads it --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Survey:
    """The digest of a dataset's columns, and the length of each example."""

    digest: str
    lengths: list[int]

    def shards(self, tokens: int) -> list[list[int]]:
        """Split examples into shards of up to ``tokens`` tokens.

        The longest come first: if the first batch fits in memory, all do.
        """
        shards: list[list[int]] = []
        free = 0
        for example in sorted(range(len(self.lengths)), key=lambda example: -self.lengths[example]):
            if not shards or self.lengths[example] > free:
                shards.append([])
                free = tokens
            shards[-1].append(example)
            free -= self.lengths[example]
        return shards


def _survey(dataset: Any, target: PreTrainedModel) -> _Survey:
    digest, lengths = hashlib.sha256(), []
    embeddings: Any = target.get_input_embeddings()
    check_examples(dataset, len(embeddings.weight))
    for example in dataset:
        for name in (name for name in COLUMNS if name in example):
            values = np.asarray(example[name], dtype=np.int64)
            digest.update(f"{name} {len(values)}".encode() + values.tobytes())
        lengths.append(len(example["input_ids"]))
    return _Survey(digest.hexdigest(), lengths)


# -- reading and writing ----------------------------------------------------------------------------------------------

PER_EXAMPLE = ("rows", "lengths", "checksums")  # tensors on disk with one value per example; "rows" are its numbers


@dataclass(frozen=True)
class _Place:
    """Where an example is: its shard, and the slice of the shard's tokens."""

    shard: int
    tokens: slice
    checksum: int


@dataclass(frozen=True)
class _ShardReader:
    """The target's run over the examples of a shard."""

    dataset: Any
    reader: Reader
    batch_size: int
    dtype: torch.dtype
    bar: Any

    @torch.no_grad()
    def read(self, indices: list[int]) -> dict[str, list[Tensor]]:
        """Return the columns (length,) and states (length, width) of each example."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for start in range(0, len(indices), self.batch_size):
            examples = [self.dataset[index] for index in indices[start : start + self.batch_size]]
            states = self._states(examples)
            for i, example in enumerate(examples):
                for name in (name for name in COLUMNS if name in example):
                    parts[name].append(torch.as_tensor(example[name]))
                for layer, state in states.items():
                    parts[f"states.{layer}"].append(state[i, : len(example["input_ids"])])
            self.bar.update(len(examples))
        return parts

    def _states(self, examples: list[dict[str, Any]]) -> dict[int, Tensor]:
        device = input_device(self.reader.model)
        batch = {name: tensor.to(device) for name, tensor in DraftCollator()(examples).items()}
        layers, last = self.reader.read(batch["input_ids"], batch.get("document_ids"))
        given = {LAST: last} | dict(zip(self.reader.feature_layers, layers, strict=True))
        states = {layer: state.to("cpu", self.dtype) for layer, state in given.items()}
        if broken := [layer for layer, state in states.items() if not bool(state.isfinite().all())]:
            raise ValueError(
                f"the target's states of layer {broken[0]} are not finite in {self.dtype}, and no draft learns from "
                "them: load the target in bfloat16 or float32, keep them in torch.bfloat16, or repair its weights"
            )
        return states


def _write_shard(index: _Index, number: int, numbers: list[int], parts: dict[str, list[Tensor]]) -> None:
    examples = [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    tensors = {name: torch.cat(several) for name, several in parts.items()}
    tensors["rows"] = torch.tensor(numbers)
    tensors["lengths"] = torch.tensor([len(example["input_ids"]) for example in examples])
    tensors["checksums"] = torch.tensor([_checksum(example) for example in examples])
    content = save(tensors)
    try:
        _write_file(index.directory / _name(number), content)
        index.add(number, len(content))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: {_name(number)} could not be written to {index.directory}. The {len(index.shards)} "
            f"finished shards of {index.count} are kept: free some space and repeat the call",
        ) from error


def _checksum(example: dict[str, Tensor]) -> int:
    """Return the CRC-32 of all tensors of one example."""
    found = 0
    for name in sorted(example):
        found = zlib.crc32(example[name].contiguous().view(torch.uint8).numpy().data, found)
    return found


def _write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: all of it or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _name(number: int) -> str:
    return f"features-{number:05}.safetensors"


def _open_shard(path: Path, size: int) -> Any:
    if not path.exists():
        raise OSError(f"{path.name} of the feature cache in {path.parent} is missing: {REMAKE}")
    if (found := path.stat().st_size) != size:
        raise _damaged(path, f"has {found} bytes instead of {size}")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def _places(number: int, shard: Any, path: Path) -> Iterator[tuple[int, _Place]]:
    try:
        columns = [shard.get_tensor(name).tolist() for name in PER_EXAMPLE]
        rows = list(zip(*columns, strict=True))
    except (SafetensorError, TypeError, ValueError) as error:
        raise _damaged(path, f"does not hold the places of its examples ({printable(error)})") from error
    first = 0
    for example, length, checksum in rows:
        yield example, _Place(number, slice(first, first + length), checksum)
        first += length


def _damaged(path: Path, how: str) -> OSError:
    return OSError(f"{path.name} of the feature cache in {path.parent} {how}: remove it, and then {REMAKE}")


def _is_index(made_from: dict[str, Any], count: int, shards: dict[str, int]) -> bool:
    """Tell whether the values of an index have the right types; a missing key or a wrong container raises instead."""
    layers, dtype = made_from["layers"], getattr(torch, made_from["dtype"])
    numbers = [count, made_from["shard_size"], *layers, *shards.values()]
    return isinstance(dtype, torch.dtype) and all(map(is_int, numbers)) and made_from["shard_size"] >= 1


@dataclass
class _Index:
    """The index of a cache: what it was made from, its number of shards, and the bytes of each finished shard."""

    directory: Path
    made_from: dict[str, Any]
    count: int
    shards: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> _Index | None:
        path = directory / "index.json"
        if not path.exists():
            return None
        check_ends(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") == FORMAT and _is_index(**content):
                return cls(directory, **content)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # cut off, or not an index
        raise ValueError(
            f"{path} is no index of a feature cache, or of another version, or cut off: remove {directory}"
        )

    def has(self, number: int) -> bool:
        path = self.directory / _name(number)
        return path.exists() and path.stat().st_size == self.shards.get(path.name)

    def add(self, number: int, size: int) -> None:
        shards = self.shards | {_name(number): size}
        content = {"format": FORMAT, "made_from": self.made_from, "count": self.count, "shards": shards}
        _write_file(self.directory / "index.json", json.dumps(content, indent=1).encode())
        self.shards = shards
