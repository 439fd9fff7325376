"""Files of conversations or text, read by the ``datasets`` library; errors name the broken line."""

from __future__ import annotations

import bz2
import contextlib
import errno
import glob
import gzip
import json
import lzma
import os
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import datasets  # type: ignore[import-untyped]
from transformers.utils import logging

from ..untrusted import check_sound
from .resuming import FULL

logger = logging.get_logger(__name__)

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)  # errors of reading with these
PACKED = (".zst", ".lz4", ".zip")  # ends of names of files that datasets alone opens
FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def read_file(file: str | os.PathLike[str], streaming: bool = False) -> datasets.Dataset | datasets.IterableDataset:
    """Load JSON lines, or a json, csv, parquet or txt file, or open it as a stream.

    Errors: a ValueError for another kind or a broken file. In a stream, a broken line raises only when it is read.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if (kind := next((FILES[suffix] for suffix in path.suffixes if suffix in FILES), None)) is None:
        raise ValueError(f"{path} is none of {sorted(FILES)}; rename it, or write JSON lines")
    if _is_blank(path):
        raise ValueError(f"{path} is empty")
    if "::" in str(path):  # datasets reads it as a file within an archive
        raise ValueError(f"{path} has :: in its name: rename it")
    name = glob.escape(str(path))  # datasets expands patterns: [a] in a name would mean a
    try:
        data = load(kind, data_files=name, split="train", streaming=streaming)
    except (datasets.exceptions.DatasetGenerationError, ValueError, gzip.BadGzipFile, *DAMAGED[1:]) as error:
        raise_full_disk(error)
        if kind == "json" and not streaming and (found := _without_unsound_lines(path)) is not None:
            return found
        problem = None
        with contextlib.suppress(*DAMAGED):  # a damaged compressed file; the first error says enough
            problem = _broken_line(path) or _undecodable_line(path)
            if kind == "json" and not streaming and problem is None and (found := _as_one_chunk(path)) is not None:
                return found
        raise ValueError(
            f"{path} is broken: {problem or error.__cause__ or error}. Repair it, or remove that line"
        ) from error
    if kind == "json" and not streaming and (line := _undecodable_line(path)):  # Arrow accepts invalid UTF-8
        raise ValueError(f"{path} is broken: {line}. Write it as UTF-8")
    return data


def load(*given: Any, **options: Any) -> Any:
    """Load as ``datasets.load_dataset`` does, with the texts of JSON messages as they stand in the file.

    Where a message's content is a text here and a list of parts there, datasets parses the text 42 as a number. It
    keeps the text if it takes the whole message as JSON.
    """
    data = datasets.load_dataset(*given, **options)
    if data.info.builder_name != "json" or not data.features:
        return data
    whole = datasets.List(datasets.Json()) if "Json(" in str(data.features) else None  # older versions have no Json
    mixed = {
        name: whole
        for name, kind in data.features.items()
        if isinstance(kind, datasets.List) and kind != whole and "Json(" in str(kind)
    }
    if not mixed:
        return data
    return datasets.load_dataset(*given, **options, features=datasets.Features(data.features | mixed))


def raise_full_disk(error: Exception) -> None:
    """Raise the OSError of a full disk that ``error`` comes from, if it is one: the data are not to blame."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError) and one.errno in FULL:
            raise OSError(
                errno.ENOSPC,
                f"No space left on device: datasets keeps what it reads in {datasets.config.HF_DATASETS_CACHE}. Free "
                "some space there, or set HF_DATASETS_CACHE to a directory on another disk",
            ) from error


def _as_one_chunk(path: Path) -> datasets.Dataset | None:
    """Load JSON that is valid, with keys that come after the first 10 MB only: datasets takes the types from these.

    ``None`` if something else is wrong with it.
    """
    with _opened(path) as file:
        size = file.seek(0, os.SEEK_END)
    with contextlib.suppress(datasets.exceptions.DatasetGenerationError, ValueError):
        return load("json", data_files=glob.escape(str(path)), split="train", chunksize=size + 1)
    return None


def _without_unsound_lines(path: Path) -> datasets.Dataset | None:
    """Load JSON lines with invalid text or too deep nesting, which Arrow refuses: make those lines empty, and warn.

    ``None`` if there are no such lines, or if something else is wrong with the file.
    """
    lines, problems = [], []
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line.decode("utf-8-sig")) if line.strip() else {}
                    check_sound(row)
                except (json.JSONDecodeError, UnicodeDecodeError):
                    return None
                except (ValueError, RecursionError) as error:
                    problems.append(f"line {number}: {error}")
                    row = {}
                lines.append(json.dumps(row))
    except DAMAGED:
        return None
    if not problems:
        return None
    logger.warning(f"{len(problems)} lines of {path} hold nothing that can be used: {problems[0]}")
    with tempfile.TemporaryDirectory() as folder:
        usable = Path(folder, "usable.jsonl")
        usable.write_text("\n".join(lines), encoding="utf-8")
        try:
            return load("json", data_files=glob.escape(str(usable)), split="train")
        except (datasets.exceptions.DatasetGenerationError, ValueError):
            return None


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], OPENERS.get(path.suffix, open)(path, "rb"))


def _is_blank(path: Path) -> bool:
    with contextlib.suppress(*DAMAGED), _opened(path) as lines:  # loading will say what is wrong
        return not any(line.strip() for line in lines)
    return False


def _undecodable_line(path: Path) -> str | None:
    """Name the first line that is not UTF-8; ``None`` if there is none, or the file is not read as text here."""
    if ".parquet" in path.suffixes or path.suffix in PACKED:
        return None
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number}: {error}"
    return None


def _broken_line(path: Path) -> str | None:
    """Name the first line that is not valid JSON, and say why; ``None`` if there is none, or it is not read here."""
    if not {".jsonl", ".json"} & {*path.suffixes} or path.suffix in PACKED:
        return None
    with _opened(path) as file:
        content = file.read()
    is_array = path.suffixes[0] == ".json" and content.lstrip()[:1] == b"["
    for number, line in enumerate([content] if is_array else content.splitlines(), start=1):
        try:
            json.loads(line.decode("utf-8-sig")) if line.strip() else None
        except json.JSONDecodeError as error:
            return f"line {error.lineno if is_array else number}: {error.msg}, character {error.colno}"
        except UnicodeDecodeError as error:
            return f"line {number}: {error}"
    return None
