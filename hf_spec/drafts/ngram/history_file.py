"""The file of a history: token ids in a safetensors file, and a hash of their tokenizer. Nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...scoring.plain import tokenizer_in
from ...untrusted import check_ends
from .suffix_index import BREAK

FORMAT, VERSION = "hf_spec memory", "1"
SIZE = re.compile(r"[1-9][0-9]{0,17}")  # the size of a history, as written in a file


@dataclass(frozen=True)
class SavedHistory:
    """The content of a history of ``size`` tokens: ``tokens``, the oldest first, with BREAK after each text."""

    size: int
    tokens: list[int]

    def texts(self) -> Iterator[list[int]]:
        """Yield the texts, the oldest first."""
        return (list(run) for is_break, run in groupby(self.tokens, BREAK.__eq__) if not is_break)


def write_history(path: str | os.PathLike[str], saved: SavedHistory, tokenizer: Any) -> None:
    """Write ``saved`` to ``path`` atomically: the old file stays until the new one is complete.

    Targets have more tokens than their tokenizers, as padding, and may sample one. In the file such an id would look
    like damage, so BREAK replaces it, and the text is cut in two there.
    """
    marks = {"format": FORMAT, "version": VERSION, "size": str(saved.size), "tokenizer": _mark(tokenizer)}
    tokens, most = torch.tensor(saved.tokens, dtype=torch.int32), _largest(tokenizer)
    content = save({"tokens": tokens.masked_fill(tokens > most, BREAK)}, metadata=marks)
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{name}-", dir=folder)  # readable by its owner only, also afterwards
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def read_history(path: str | os.PathLike[str], tokenizer: Any) -> SavedHistory:
    """Read what ``write_history`` wrote with the same ``tokenizer``. Errors: those of ``NgramSpeculator.load``."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a directory; pass a file that NgramSpeculator.save wrote")
    check_ends(path)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no history {path}; pass a file that NgramSpeculator.save wrote, or begin a new one: "
            "NgramSpeculator(history_size=...)"
        )
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            marks = file.metadata() or {}
            _refuse(path, marks, tokenizer)
            tokens, size = file.get_tensor("tokens"), marks["size"]
    except (SafetensorError, KeyError) as error:
        raise OSError(f"{path} is cut off, damaged or no history ({error}); remove it and begin a new one") from error
    is_list = tokens.dtype == torch.int32 and tokens.ndim == 1
    if not (is_list and SIZE.fullmatch(size) and _all_known(tokens, _largest(tokenizer))):
        raise OSError(f"{path} holds no token ids of this tokenizer; remove it and begin a new one")
    return SavedHistory(int(size), tokens.tolist())


def _refuse(path: str | os.PathLike[str], marks: dict[str, str], tokenizer: Any) -> None:
    if marks.get("format") != FORMAT:
        raise OSError(f"{path} is no history; pass a file that NgramSpeculator.save wrote")
    if marks.get("version") != VERSION:
        raise ValueError(
            f"{path} is a history of version {marks.get('version')}, and this hf_spec reads version {VERSION}: update "
            "hf_spec, or begin a new history"
        )
    if marks.get("tokenizer") != _mark(tokenizer):
        raise ValueError(
            f"the history {path} was written with another tokenizer, whose ids stand for other words. Load it with "
            "that one, for a target that uses it, or begin a new history: NgramSpeculator(history_size=...)"
        )


def _all_known(tokens: torch.Tensor, most: int) -> bool:
    return not len(tokens) or bool(tokens.min() >= BREAK and tokens.max() <= most)


def _largest(tokenizer: Any) -> int:
    return max(_vocabulary(tokenizer).values(), default=BREAK)


def _mark(tokenizer: Any) -> str:
    """Return a hash of the vocabulary, which tells tokenizers apart."""
    words = sorted((id, token) for token, id in _vocabulary(tokenizer).items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    tokenizer = tokenizer_in(tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        raise TypeError(f"tokenizer must be a tokenizer of transformers, or a processor, got {tokenizer!r:.80}")
    found: dict[str, int] = tokenizer.get_vocab()
    return found
