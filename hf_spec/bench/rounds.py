"""Measurements of every batch of prompts, the file in which they are kept, and the figures computed from them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from ..checkpoints.fingerprint import in_words
from ..metrics import Counts
from ..whole_files import append_answers
from .report import Figures

PLAIN = "plain"
DRAWS = 1000  # bootstrap samples of the rounds


@dataclass(frozen=True)
class Method:
    """A decoding method, of this package or of transformers: its name and its ``options`` for ``generate``.

    ``draft`` is the model whose forwards count together with the target's. ``chain_length`` is that of
    transformers' own methods. ``assisted_name`` is the name of assisted generation with the same draft. ``compiled``
    is plain ``generate`` over a static cache.
    """

    name: str
    options: dict[str, Any]
    draft: nn.Module | None = None
    chain_length: int | None = None
    assisted_name: str | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Run:
    """One ``generate`` call: the emitted tokens of every row, its times, forwards and statistics.

    ``forward_seconds`` are those of target and draft together, ``draft_seconds`` the draft's part of them.
    """

    rows: list[list[int]]
    seconds: float
    forward_seconds: float
    target_forwards: int
    counts: Counts | None
    draft_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Count the tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def speed(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds


Round = dict[str, Run]  # one batch of prompts, by method


class RoundLog:
    """A file of JSON lines with every round, from which a benchmark that was stopped resumes after the last one.

    The first line is ``made_from``, what was measured. Without a file nothing is kept.

    Errors: a ValueError if the file holds rounds of something else, which names what differs, or no rounds.
    """

    def __init__(self, path: str | os.PathLike[str] | None, made_from: dict[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._kept: list[Round] = []
        if self._path is None:
            return
        header = json.dumps(made_from).encode()
        content = self._path.read_bytes() if self._path.exists() else b""
        end = content.rfind(b"\n") + 1
        if not end and header.startswith(content):  # an empty file, or an incomplete first line
            self._path.write_bytes(header + b"\n")
            return
        first, *lines = content[:end].splitlines() or [b""]
        _refuse_others(self._path, first, json.loads(header))
        self._kept = [_read_round(self._path, line, number) for number, line in enumerate(lines, start=2)]
        self._kept.reverse()
        os.truncate(self._path, end)  # drops a line that a kill cut off

    def next(self) -> Round | None:
        """Return the next round that was kept; ``None`` after the last one."""
        return self._kept.pop() if self._kept else None

    def add(self, found: Round) -> None:
        """Write a new round. Errors: an OSError if the disk is full; the file stays usable."""
        if self._path is not None:
            append_answers(self._path, [{name: asdict(run) for name, run in found.items()}], "rounds")


def _refuse_others(path: Path, header: bytes, made_from: dict[str, Any]) -> None:
    try:
        before = json.loads(header)
        differing = [one for name in made_from for one in _differences(name, before.get(name), made_from[name])]
    except (ValueError, AttributeError, TypeError):
        differing = ["its first line says nothing of them"]
    if differing:
        raise ValueError(
            f"the rounds in {path} were measured with other settings ({'; '.join(differing)}): repeat the call that "
            "began it, or name another file"
        )


def _differences(section: str, before: Any, now: Any) -> list[str]:
    """List what differs in a ``section`` of what was measured; methods that came or went have no weights to compare.

    Errors: an AttributeError or a TypeError for a section of another kind.
    """
    if before == now:
        return []
    if section == "prompts":
        return ["the prompts differ"]
    if section == "weights":
        both = [name for name in now if name in before and before[name] != now[name]]
        return [f"the weights of {'the target' if name == 'target' else name} differ" for name in both]
    told = []
    for name in {**before, **now}:
        if name == "contenders":
            told += _other_contenders(before.get(name, {}), now[name])
        elif before.get(name) != now.get(name):
            told.append(f"{name} was {in_words(before.get(name))}, not {in_words(now.get(name))}")
    return told


def _other_contenders(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    told = [f"{name} was measured, and is left out now" for name in before if name not in now]
    told += [f"{name} was not measured" for name in now if name not in before]
    for name in [name for name in now if name in before]:
        told += [f"{name}: {one}" for one in _differences("settings", before[name] or {}, now[name] or {})]
    return told


def _read_round(path: Path, line: bytes, number: int) -> Round:
    try:
        found = {name: _read_run(run) for name, run in json.loads(line).items()}
        found[PLAIN]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"{path}, line {number} is no round: remove it and what follows, or name another file"
        ) from error
    return found


def _read_run(kept: dict[str, Any]) -> Run:
    return Run(**kept | {"counts": kept["counts"] and Counts(**kept["counts"])})


# -- figures ----------------------------------------------------------------------------------------------------------


def figures_of(method: Method, rounds: Sequence[Round], greedy: bool) -> Figures:
    """Compute the figures of ``method`` over ``rounds``; ``greedy``: compare texts with plain ``generate``."""
    runs = [found[method.name] for found in rounds]
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    counts = _merged(runs)
    texts = [(run.rows, found[PLAIN].rows) for run, found in zip(runs, rounds, strict=True)]
    differs = [one != plain for ours, plains in texts for one, plain in zip(ours, plains, strict=True)]
    to_plain, to_plain_median = _ratios(method.name, PLAIN, rounds)
    to_assisted, to_assisted_median = (
        _ratios(method.name, method.assisted_name, rounds) if method.assisted_name else (None, None)
    )
    tau = _length(method, runs)
    forwards, drafting = sum(run.forward_seconds for run in runs), sum(run.draft_seconds for run in runs)
    return Figures(
        rows=len(differs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ratio_to_plain=to_plain,
        median_ratio_to_plain=to_plain_median,
        ratio_to_assisted=to_assisted,
        median_ratio_to_assisted=to_assisted_median,
        mean_accepted_length=tau,
        acceptance_rate=counts.acceptance_rate if counts else None,
        acceptance_by_position=counts.acceptance_by_position if counts else None,
        outside_forwards=1 - forwards / seconds,
        target_seconds=forwards - drafting,
        draft_seconds=drafting,
        rest_seconds=seconds - forwards,
        differing_rows=sum(differs) if greedy else None,
        ratio_to_plain_spread=_spread(rounds, lambda sample: _total(method.name, sample) / _total(PLAIN, sample)),
        mean_accepted_length_spread=None
        if tau is None
        else _spread(runs, lambda sample: _length(method, sample) or 0.0),
    )


def _merged(runs: Sequence[Run]) -> Counts | None:
    found = [run.counts for run in runs if run.counts is not None]
    merged = Counts()
    for counts in found:
        merged.add(counts)
    return merged if found else None


def _length(method: Method, runs: Sequence[Run]) -> float | None:
    """Return τ; for transformers' own methods every target forward, the first included, is a step."""
    if method.chain_length is not None:
        return sum(run.tokens for run in runs) / sum(run.target_forwards for run in runs)
    counts = _merged(runs)
    return counts.mean_accepted_length if counts else None


def _total(name: str, rounds: Sequence[Round]) -> float:
    """Return the tokens per second of a method over all rounds."""
    runs = [found[name] for found in rounds]
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _ratios(name: str, other: str, rounds: Sequence[Round]) -> tuple[float, float]:
    """Divide the tokens per second of two methods: over all rounds, and as the median of the rounds' ratios."""
    return _total(name, rounds) / _total(other, rounds), median(one[name].speed / one[other].speed for one in rounds)


def _spread(found: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
    """Return the 90 % interval of ``figure`` over bootstrap samples of ``found``."""
    rng = random.Random(0)
    samples = sorted(figure(rng.choices(found, k=len(found))) for _ in range(DRAWS if len(found) > 1 else 1))
    return samples[len(samples) // 20], samples[-1 - len(samples) // 20]
