"""Statistics of one ``generate`` call: draft tokens, acceptance, and the time of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .display import to_figure, to_html, to_text

Part = Literal["propose", "target", "verify"]

SUMMED = (  # over the calls that are put together
    *("steps", "propose_seconds", "target_seconds", "verify_seconds", "compile_seconds", "graphs", "total_seconds"),
    *("first_tokens_in_steps", "decode_seconds"),
)


@dataclass
class Counts:
    """Counts of draft tokens and emitted tokens over the steps of one row, or of several rows together.

    ``proposed_at[i]`` counts the steps whose longest path had more than ``i`` draft tokens, ``accepted_at[i]`` those
    that accepted more than ``i``. ``lengths[n]`` counts the steps that emitted ``n`` tokens. A figure with nothing to
    divide by is 0.0.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Divide accepted by proposed draft tokens."""
        return _ratio(self.accepted, self.proposed)

    @property
    def mean_accepted_length(self) -> float:
        """Divide the tokens that steps emitted, the target's own included, by the steps: τ."""
        return _ratio(self.emitted, self.steps)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return for each position the share of steps that accepted it, of those that drafted so far."""
        return [_ratio(reached, offered) for reached, offered in zip(self.accepted_at, self.proposed_at, strict=True)]

    def add(self, other: Counts) -> None:
        """Count ``other`` in."""
        self.steps += other.steps
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.emitted += other.emitted
        of_both = (self.proposed_at, other.proposed_at), (self.accepted_at, other.accepted_at)
        for mine, theirs in (*of_both, (self.lengths, other.lengths)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for place, count in enumerate(theirs):
                mine[place] += count

    def add_step(self, proposed: int, accepted: int, emitted: int, depth: int) -> None:
        """Count one step in, whose longest path had ``depth`` draft tokens."""
        self.steps += 1
        self.emitted += emitted
        self.lengths += [0] * (emitted + 1 - len(self.lengths))
        self.lengths[emitted] += 1
        if depth == 0:
            return
        self.proposed += proposed
        self.accepted += accepted
        if (missing := depth - len(self.proposed_at)) > 0:
            self.proposed_at += [0] * missing
            self.accepted_at += [0] * missing
        for place in range(depth):
            self.proposed_at[place] += 1
        for place in range(accepted):
            self.accepted_at[place] += 1

    def add_plain_steps(self, steps: int) -> None:
        """Count ``steps`` in that emitted a token each and had no draft tokens."""
        self.steps += steps
        self.emitted += steps
        self.lengths += [0] * (2 - len(self.lengths))
        self.lengths[1] += steps

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and what follows from them, ready for JSON."""
        return {
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
            "lengths": self.lengths,
        }


@dataclass
class RowStats(Counts):
    """The counts of one row, and its tokens: ``drafted[i]`` tells whether ``tokens[i]`` was an accepted draft token.

    ``seconds`` run from the row's first token to its last.
    """

    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)

    def add_row(self, other: RowStats) -> None:
        """Count in what the row did in ``other``, after what it did so far."""
        self.add(other)
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.drafted += other.drafted

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON; tokens are left out."""
        return {**super().to_dict(), "seconds": self.seconds}


@dataclass(repr=False)
class SpeculationStats:
    """The statistics of one call: proposed, accepted and emitted tokens, per row and in total, and times of the parts.

    Draft tokens after a stop count as proposed, not as accepted. The token that prefill gives each row belongs to no
    step, unless the first step read the prompt. Most chains of n-grams begin so, even with no draft token.
    ``first_tokens_in_steps`` counts those rows. Compilation (``graphs`` in ``compile_seconds``) is no part of a step,
    but delays the rows' tokens. A figure with nothing to divide by is 0.0. In Jupyter the statistics also show the
    text, with accepted draft tokens coloured, once they have a tokenizer: ``out.speculation.show(tokenizer)``.

    Statistics of one request among others hold its share of the seconds of the parts: those of all sum up to the
    whole. Its ``total_seconds`` are its own time, ``draft_lengths`` those of all.

    Args:
        batch_size: rows of the call. Time is measured from here on, that of a request in continuous batching from when
            it was made.
        synchronize: wait for the accelerator around every timed part. Off by default, because waiting costs time. Then
            work counts for the part that first waits for its result, not for the one that launched it.
        tokenizer: turns tokens into text for the HTML view.
    """

    batch_size: int
    synchronize: bool = False
    tokenizer: Any = None
    steps: int = 0
    propose_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    compile_seconds: float = 0.0
    graphs: int = 0
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0
    decode_seconds: float = 0.0  # after the first tokens, without compilation
    plain_seconds: float = 0.0  # what plain steps would have taken instead; 0 if no plain step was measured
    first_tokens_in_steps: int = 0
    draft_lengths: str = ""  # how many tokens the steps drafted, and why, in words
    invariant: bool = False  # whether the target was in the mode of ``hf_spec.invariant``
    per_row: list[RowStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_row = self.per_row or [RowStats() for _ in range(self.batch_size)]
        self.start = time.perf_counter()
        self._compiled: dict[Part, tuple[int, float]] = {}  # graphs and seconds so far
        self._first: list[int] = [0] * self.batch_size  # tokens that rows got in steps with their first one

    @classmethod
    def merge(cls, calls: Sequence[SpeculationStats], rows: Sequence[Sequence[int]] | None = None) -> SpeculationStats:
        """Put the rows, steps and seconds of several calls together; ``time_to_first_token`` becomes their mean.

        ``rows[i][b]`` is the row of the result that row b of ``calls[i]`` is added to. Left out, every row stays one.
        """
        per_row = [row for call in calls for row in call.per_row]
        if rows is not None:
            numbers = [number for call in rows for number in call]
            sums = [RowStats() for _ in range(max(numbers, default=-1) + 1)]
            for number, row in zip(numbers, per_row, strict=True):
                sums[number].add_row(row)
            per_row = sums
        tokenizer = next((call.tokenizer for call in calls if call.tokenizer), None)
        merged = cls(len(per_row), per_row=per_row, tokenizer=tokenizer)
        if len(lengths := {call.draft_lengths for call in calls}) == 1:
            merged.draft_lengths = lengths.pop()
        for name in SUMMED:
            setattr(merged, name, sum(getattr(call, name) for call in calls))
        merged.invariant = bool(calls) and all(call.invariant for call in calls)
        if all(call.plain_seconds for call in calls):
            merged.plain_seconds = sum(call.plain_seconds for call in calls)
        merged.time_to_first_token = sum(call.time_to_first_token for call in calls) / max(1, len(calls))
        return merged

    def of_row(self, number: int) -> SpeculationStats:
        """Return the statistics of one row by itself: its counts, and its share of the steps' seconds.

        A step's seconds are shared by the rows that took part, so that those of all rows sum up to the call's.
        Compilation belongs to no row.
        """
        row = self.per_row[number]
        share = _ratio(row.steps, self.row_steps)
        return SpeculationStats(
            1,
            self.synchronize,
            self.tokenizer,
            row.steps,
            share * self.propose_seconds,
            share * self.target_seconds,
            share * self.verify_seconds,
            time_to_first_token=self.time_to_first_token,
            total_seconds=self.time_to_first_token + row.seconds,
            decode_seconds=max(0.0, row.seconds - self.compile_seconds),
            first_tokens_in_steps=int(self.first_tokens_in_steps > 0),
            draft_lengths=self.draft_lengths,
            invariant=self.invariant,
            per_row=[row],
        )

    def prefilled(self, tokens: Sequence[int] | None = None) -> None:
        """Record that prefill has given the first token of every row; ``tokens`` are those, for the HTML view."""
        self.time_to_first_token = time.perf_counter() - self.start
        for row, token in zip(self.per_row, tokens, strict=True) if tokens is not None else ():
            row.tokens.append(token)
            row.drafted.append(False)

    def timed(self, part: Part) -> AbstractContextManager[None]:
        """Add the time spent inside to ``propose_seconds``, ``target_seconds`` or ``verify_seconds``."""
        return _Timer(self, part)

    def lap(self, part: Part, since: float) -> float:
        """Add the time ``since`` then to that of ``part``, and return the time now: cheaper than ``timed``."""
        now = self._now()
        self.book(part, now - since)
        return now

    @property
    def clock(self) -> Callable[[], float]:
        """Return the function that tells the time of a step's parts, in seconds."""
        return self._now if self.synchronize else time.perf_counter

    def book(self, part: Part, seconds: float) -> None:
        """Add ``seconds`` to ``propose_seconds``, ``target_seconds`` or ``verify_seconds``."""
        name = f"{part}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def compiled(self, graphs: int, seconds: float, part: Part = "target") -> None:
        """Record the graphs compiled so far for a ``part``, and their seconds, which are taken from the part's."""
        graphs_before, seconds_before = before = self._compiled.get(part, (0, 0.0))
        if (graphs, seconds) == before:
            return
        self._compiled[part] = graphs, seconds
        new = seconds - seconds_before
        self.book(part, -new)
        self.graphs += graphs - graphs_before
        self.compile_seconds += new

    def step(
        self,
        rows: Sequence[int],
        proposed: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int],
        depth_proposed: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Count one verification step.

        Each list holds one entry per active row: its number in the call, and counts of draft tokens, accepted ones,
        and tokens kept after stops. ``depth_proposed`` is the length of its longest drafted path. ``tokens`` are the
        kept tokens themselves, accepted draft tokens first, for the HTML view.
        """
        if not self.time_to_first_token:
            self.prefilled()
            self.first_tokens_in_steps = self.batch_size
            self._first = list(emitted)
        self.steps += 1
        seconds = time.perf_counter() - self.start - self.time_to_first_token
        texts = [()] * len(rows) if tokens is None else tokens
        parts = zip(rows, proposed, accepted, emitted, depth_proposed, texts, strict=True)
        for row, drafted, held, kept, depth, text in parts:
            stats = self.per_row[row]
            stats.add_step(drafted, held, kept, depth)
            stats.seconds = seconds
            stats.tokens += text
            stats.drafted += [True] * held + [False] * (len(text) - held) if text else ()

    def plain_steps(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Count plain steps in a row: ``tokens[b]`` are those of ``rows[b]``, one of each step."""
        if not tokens:
            return
        steps = len(tokens[0])
        self.steps += steps
        seconds = time.perf_counter() - self.start - self.time_to_first_token
        for row, text in zip(rows, tokens, strict=True):
            stats = self.per_row[row]
            stats.add_plain_steps(steps)
            stats.seconds = seconds
            stats.tokens += text
            stats.drafted += [False] * steps

    def finish(self, plain_step: float = 0.0) -> None:
        """Record the total time; ``plain_step`` are the seconds of a plain step of all rows, if one was measured."""
        self.total_seconds = time.perf_counter() - self.start
        self.decode_seconds = self.total_seconds - self.time_to_first_token - self.compile_seconds
        longest = max((row.emitted - first for row, first in zip(self.per_row, self._first, strict=True)), default=0)
        self.plain_seconds = plain_step * longest  # plain steps go on until the longest row ends

    @property
    def counts(self) -> Counts:
        """Return the sums over rows; ``counts.steps`` are row-steps."""
        total = Counts()
        for row in self.per_row:
            total.add(row)
        return total

    @property
    def row_steps(self) -> int:
        """Count the steps of every row: a step of the batch counts once per active row."""
        return self.counts.steps

    @property
    def proposed(self) -> int:
        """Return the number of draft tokens."""
        return self.counts.proposed

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return self.counts.accepted

    @property
    def emitted(self) -> int:
        """Return the number of tokens that steps emitted, the target's own included."""
        return self.counts.emitted

    @property
    def acceptance_rate(self) -> float:
        """Divide accepted by proposed draft tokens."""
        return self.counts.acceptance_rate

    @property
    def mean_accepted_length(self) -> float:
        """Divide the tokens that steps emitted by the row-steps: τ."""
        return self.counts.mean_accepted_length

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return for each position the share of row-steps that accepted it, of those that drafted so far."""
        return self.counts.acceptance_by_position

    @property
    def time_per_output_token(self) -> float:
        """Return the mean seconds a row waits for a token after its first one."""
        return _ratio(sum(row.seconds for row in self.per_row), self.emitted - self.first_tokens_in_steps)

    @property
    def speedup(self) -> float:
        """Divide what plain steps would have taken by what decoding took; 0 if no plain step was measured."""
        return _ratio(self.plain_seconds, self.decode_seconds)

    @property
    def overhead(self) -> float:
        """Return the share of the steps' time spent neither proposing nor in the target's forward.

        On an accelerator, that is the host's time: it waits there for forwards that were launched before.
        """
        return _ratio(self.verify_seconds, self.propose_seconds + self.target_seconds + self.verify_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, ready for JSON; tokens are left out."""
        counts = self.counts
        return {
            "batch_size": self.batch_size,
            **counts.to_dict(),
            "steps": self.steps,
            "row_steps": counts.steps,
            "propose_seconds": self.propose_seconds,
            "target_seconds": self.target_seconds,
            "verify_seconds": self.verify_seconds,
            "compile_seconds": self.compile_seconds,
            "graphs": self.graphs,
            "overhead": self.overhead,
            "time_to_first_token": self.time_to_first_token,
            "time_per_output_token": self.time_per_output_token,
            "total_seconds": self.total_seconds,
            "decode_seconds": self.decode_seconds,
            "plain_seconds": self.plain_seconds,
            "first_tokens_in_steps": self.first_tokens_in_steps,
            "speedup": self.speedup,
            "draft_lengths": self.draft_lengths,
            "invariant": self.invariant,
            "per_row": [row.to_dict() for row in self.per_row],
        }

    def __repr__(self) -> str:
        return to_text(self)

    def show(self, tokenizer: Any) -> SpeculationStats:
        """Remember ``tokenizer`` for the HTML view and return self, so that Jupyter displays it."""
        self.tokenizer = tokenizer
        return self

    def plot(self) -> Any:
        """Draw the acceptance by position and the tokens of a step; return the figure of matplotlib.

        Errors: an ImportError if matplotlib is missing.
        """
        return to_figure(self)

    def _repr_html_(self) -> str:
        return to_html(self)

    def _now(self) -> float:
        if self.synchronize and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()


class _Timer(AbstractContextManager[None]):
    """Book the time between entry and exit; a generator would take a small target's step longer."""

    def __init__(self, stats: SpeculationStats, part: Part) -> None:
        self._stats, self._part = stats, part

    def __enter__(self) -> None:
        self._start = self._stats._now()

    def __exit__(self, *_: object) -> None:
        self._stats.book(self._part, self._stats._now() - self._start)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
