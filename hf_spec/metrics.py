"""What speculation did for one ``generate`` call: how much was guessed and accepted, and where the time went."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

Part = Literal["propose", "verify", "choose"]

SUMMED = (  # over the calls that are put together
    *("steps", "propose_seconds", "verify_seconds", "choose_seconds", "compile_seconds", "graphs", "total_seconds"),
    "first_tokens_in_steps",
)
# Tokens decoded before a piece of text, so that characters and spaces that tokens share come out right.
CONTEXT = 8
GUESSED_STYLE = "background: rgba(46, 160, 67, 0.35); border-radius: 2px"


@dataclass
class Counts:
    """Count guesses and tokens over the verification steps of one row, or of several rows together.

    ``offered[i]`` counts the steps whose longest guessed path had more than ``i`` tokens, ``reached[i]`` those which
    accepted more than ``i`` guesses. A figure with nothing to divide by is 0.0.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Divide accepted by proposed guesses."""
        return _ratio(self.accepted, self.proposed)

    @property
    def mean_accepted_length(self) -> float:
        """Divide the tokens that steps emitted, the target's own included, by the steps: τ."""
        return _ratio(self.emitted, self.steps)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return for each depth the share of steps that accepted a guess there, of those that guessed so deep."""
        return [_ratio(reached, offered) for reached, offered in zip(self.reached, self.offered, strict=True)]

    def add(self, other: Counts) -> None:
        """Count ``other`` in."""
        self.steps += other.steps
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.emitted += other.emitted
        for mine, theirs in ((self.offered, other.offered), (self.reached, other.reached)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count

    def add_step(self, proposed: int, accepted: int, emitted: int, depth: int) -> None:
        """Count one step in, whose longest guessed path had ``depth`` tokens."""
        self.steps += 1
        self.emitted += emitted
        if depth == 0:
            return
        self.proposed += proposed
        self.accepted += accepted
        if (missing := depth - len(self.offered)) > 0:
            self.offered += [0] * missing
            self.reached += [0] * missing
        for place in range(depth):
            self.offered[place] += 1
        for place in range(accepted):
            self.reached[place] += 1

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
        }


@dataclass
class RowStats(Counts):
    """Count for one row, and keep its tokens: ``guessed[i]`` tells whether ``tokens[i]`` was an accepted guess.

    ``seconds`` run from the row's first token to its last.
    """

    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    guessed: list[bool] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON; tokens are left out."""
        return {**super().to_dict(), "seconds": self.seconds}


@dataclass(repr=False)
class SpeculationStats:
    """Say what one call guessed, accepted and emitted, per row and over all, and how long its parts took.

    Guesses behind a stop count as proposed, not as accepted. The token that prefill gives each row belongs to no step,
    unless guesses were read together with the prompt: then this was the first step (``first_tokens_in_steps`` rows).
    What was compiled, ``graphs`` in ``compile_seconds``, counts as no part of a step, but delays the rows' tokens.
    A figure with nothing to divide by is 0.0. In Jupyter the statistics show the text too, accepted guesses coloured,
    once they have a tokenizer: ``out.speculation.show(tokenizer)``.

    Args:
        batch_size: rows of the call. The clock starts here.
        synchronize: wait for the accelerator around every timed part. Off by default, because waiting costs time; then
            its work is booked on the part that first waits for a result, not on the one that launched it.
        tokenizer: turns tokens into text for the HTML view.
    """

    batch_size: int
    synchronize: bool = False
    tokenizer: Any = None
    steps: int = 0
    propose_seconds: float = 0.0
    verify_seconds: float = 0.0
    choose_seconds: float = 0.0
    compile_seconds: float = 0.0
    graphs: int = 0
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0
    first_tokens_in_steps: int = 0
    pace: str = ""  # how deep the steps guessed, and why, in words
    per_row: list[RowStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_row = self.per_row or [RowStats() for _ in range(self.batch_size)]
        self._start = time.perf_counter()
        self._compiled: dict[Part, tuple[int, float]] = {}  # graphs and seconds so far

    @classmethod
    def merge(cls, calls: Sequence[SpeculationStats]) -> SpeculationStats:
        """Put the rows, steps and seconds of several calls together; ``time_to_first_token`` becomes their mean."""
        rows = [row for call in calls for row in call.per_row]
        merged = cls(
            len(rows), per_row=rows, tokenizer=next((call.tokenizer for call in calls if call.tokenizer), None)
        )
        for name in SUMMED:
            setattr(merged, name, sum(getattr(call, name) for call in calls))
        merged.time_to_first_token = sum(call.time_to_first_token for call in calls) / max(1, len(calls))
        return merged

    def of_row(self, number: int) -> SpeculationStats:
        """Return the statistics of one row by itself: its counts, and its share of the steps' seconds.

        A step's seconds are shared by the rows that took part, so that those of all rows sum up to the call's. What
        was compiled belongs to no row.
        """
        row = self.per_row[number]
        share = _ratio(row.steps, self.row_steps)
        return SpeculationStats(
            1,
            self.synchronize,
            self.tokenizer,
            row.steps,
            share * self.propose_seconds,
            share * self.verify_seconds,
            share * self.choose_seconds,
            time_to_first_token=self.time_to_first_token,
            total_seconds=self.time_to_first_token + row.seconds,
            first_tokens_in_steps=int(self.first_tokens_in_steps > 0),
            pace=self.pace,
            per_row=[row],
        )

    def prefilled(self, tokens: Sequence[int] | None = None) -> None:
        """Note that the first token of every row is there before any step; ``tokens`` are those, for the HTML view."""
        self.time_to_first_token = time.perf_counter() - self._start
        for row, token in zip(self.per_row, tokens, strict=True) if tokens is not None else ():
            row.tokens.append(token)
            row.guessed.append(False)

    def timed(self, part: Part) -> AbstractContextManager[None]:
        """Add the time spent inside to ``propose_seconds``, ``verify_seconds`` or ``choose_seconds``."""
        return _Timer(self, part)

    def book(self, part: Part, seconds: float) -> None:
        """Add ``seconds`` to ``propose_seconds``, ``verify_seconds`` or ``choose_seconds``."""
        name = f"{part}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def compiled(self, graphs: int, seconds: float, part: Part = "verify") -> None:
        """Note how many graphs were compiled so far for a ``part`` and how long that took, which is no time of it."""
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

        Each list holds one entry per active row: its number in the call, its guessed tokens (the nodes of its tree),
        the accepted guesses and the tokens that were kept after stops, and the length of its longest guessed path.
        ``tokens`` are the kept tokens themselves, accepted guesses first, for the HTML view.
        """
        if not self.time_to_first_token:
            self.prefilled()
            self.first_tokens_in_steps = self.batch_size
        self.steps += 1
        seconds = time.perf_counter() - self._start - self.time_to_first_token
        texts = [()] * len(rows) if tokens is None else tokens
        parts = zip(rows, proposed, accepted, emitted, depth_proposed, texts, strict=True)
        for row, guesses, held, kept, depth, text in parts:
            stats = self.per_row[row]
            stats.add_step(guesses, held, kept, depth)
            stats.seconds = seconds
            stats.tokens += text
            stats.guessed += [True] * held + [False] * (len(text) - held) if text else ()

    def finish(self) -> None:
        """Stop the clock."""
        self.total_seconds = time.perf_counter() - self._start

    @property
    def counts(self) -> Counts:
        """Sum the rows: ``counts.steps`` are row-steps."""
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
        """Count the guessed tokens."""
        return self.counts.proposed

    @property
    def accepted(self) -> int:
        """Count the guesses that became text."""
        return self.counts.accepted

    @property
    def emitted(self) -> int:
        """Count the tokens that steps emitted, the target's own included."""
        return self.counts.emitted

    @property
    def acceptance_rate(self) -> float:
        """Divide accepted by proposed guesses."""
        return self.counts.acceptance_rate

    @property
    def mean_accepted_length(self) -> float:
        """Divide the tokens that steps emitted by the row-steps: τ."""
        return self.counts.mean_accepted_length

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return for each depth the share of row-steps that accepted a guess there, of those that guessed so deep."""
        return self.counts.acceptance_by_position

    @property
    def time_per_output_token(self) -> float:
        """Return the mean seconds a row waits for a token after its first one."""
        return _ratio(sum(row.seconds for row in self.per_row), self.emitted - self.first_tokens_in_steps)

    @property
    def overhead(self) -> float:
        """Return the share of the steps' time spent neither proposing nor in the target's forward."""
        return _ratio(self.choose_seconds, self.propose_seconds + self.verify_seconds + self.choose_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, ready for JSON; tokens are left out."""
        counts = self.counts
        return {
            "batch_size": self.batch_size,
            **counts.to_dict(),
            "steps": self.steps,
            "row_steps": counts.steps,
            "propose_seconds": self.propose_seconds,
            "verify_seconds": self.verify_seconds,
            "choose_seconds": self.choose_seconds,
            "compile_seconds": self.compile_seconds,
            "graphs": self.graphs,
            "overhead": self.overhead,
            "time_to_first_token": self.time_to_first_token,
            "time_per_output_token": self.time_per_output_token,
            "total_seconds": self.total_seconds,
            "pace": self.pace,
            "per_row": [row.to_dict() for row in self.per_row],
        }

    def __repr__(self) -> str:
        title, lines = self._told()
        return "\n".join([title, *(f"  {name:25}  {text}" for name, text in lines.items())])

    def _told(self) -> tuple[str, dict[str, str]]:
        """Return a title and the figures that people read, by name."""
        counts = self.counts
        by_position = " ".join(f"{share:.2f}" for share in counts.acceptance_by_position)
        seconds = (self.propose_seconds, self.verify_seconds, self.choose_seconds)
        shares = " / ".join(f"{_ratio(part, sum(seconds)):.1%}" for part in seconds)
        title = f"SpeculationStats: {counts.emitted} tokens in {self.steps} steps, batch of {self.batch_size}"
        compiled = {"compiled": f"{self.graphs} graphs in {self.compile_seconds:.1f} s"} if self.graphs else {}
        return title, {
            "mean accepted length": f"{counts.mean_accepted_length:.2f} tokens per step and row",
            "acceptance rate": f"{counts.acceptance_rate:.1%} ({counts.accepted} of {counts.proposed})",
            "acceptance by position": by_position or "-",
            "depth of guesses": self.pace or "-",
            "propose / verify / choose": f"{shares} of {sum(seconds):.3f} s",
            "time to first token": f"{self.time_to_first_token * 1e3:.1f} ms",
            "time per output token": f"{self.time_per_output_token * 1e3:.2f} ms",
            **compiled,
        }

    def show(self, tokenizer: Any) -> SpeculationStats:
        """Remember ``tokenizer`` for the HTML view and return self, so that Jupyter displays it."""
        self.tokenizer = tokenizer
        return self

    def plot(self) -> Any:
        """Draw how deep guesses were accepted, and how many tokens a step emitted; return the figure of matplotlib.

        Errors: an ImportError if matplotlib is missing.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError("a plot needs matplotlib: pip install 'hf-spec[notebook]'") from error
        figure, (accepted, emitted) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
        pyplot.close(figure)  # a notebook shows what a cell returns, and would show what is open as well
        shares = self.counts.acceptance_by_position
        accepted.bar(range(1, len(shares) + 1), shares)
        accepted.set(xlabel="guess", ylabel="share of steps that accept it", ylim=(0, 1))
        first = 0 if self.first_tokens_in_steps else 1  # the token of the prefill belongs to no step
        lengths = [length for row in self.per_row for length in _step_lengths(row.guessed[first:])]
        most = max(lengths, default=1)
        emitted.hist(lengths, bins=[length - 0.5 for length in range(1, most + 2)], rwidth=0.8)
        emitted.axvline(self.mean_accepted_length, color="grey", linewidth=0.8)
        emitted.set(xlabel=f"tokens of a step (mean {self.mean_accepted_length:.2f})", ylabel="steps")
        for axes in (accepted, emitted):
            axes.xaxis.get_major_locator().set_params(integer=True)
        return figure

    def _repr_html_(self) -> str:
        title, lines = self._told()
        # A table, not lines of text: notebooks may show those in a font whose letters differ in width.
        cells = (f"<tr>{_cell(name)}{_cell(text)}</tr>" for name, text in lines.items())
        figures = f"<table><caption>{html.escape(title)}</caption>{''.join(cells)}</table>"
        rows = [row for row in self.per_row if row.tokens]
        if self.tokenizer is None or not rows:
            return figures
        legend = f'<p><span style="{GUESSED_STYLE}">accepted guesses</span> and the target\'s own tokens</p>'
        style = "white-space: pre-wrap; margin: 0.5em 0; padding-left: 0.5em; border-left: 2px solid currentColor"
        texts = (f'<div style="{style}">{_row_html(row, self.tokenizer)}</div>' for row in rows)
        return f"<div>{figures}{legend}{''.join(texts)}</div>"

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


def _step_lengths(guessed: Sequence[bool]) -> Iterator[int]:
    """Count the tokens of each step: accepted guesses up to the target's own token, or to one that ends the text."""
    length = 0
    for is_guess in guessed:
        length += 1
        if not is_guess:
            yield length
            length = 0
    if length:
        yield length


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _cell(text: str) -> str:
    return f'<td style="text-align: left">{html.escape(text)}</td>'


def _row_html(row: RowStats, tokenizer: Any) -> str:
    escaped = ((guessed, html.escape(text)) for guessed, text in text_pieces(row, tokenizer))
    return "".join(f'<span style="{GUESSED_STYLE}">{text}</span>' if guessed else text for guessed, text in escaped)


def text_pieces(row: RowStats, tokenizer: Any) -> Iterator[tuple[bool, str]]:
    """Cut the row's text where guessed and own tokens meet; a character that both share goes to the later piece."""
    start = 0
    for guessed, run in groupby(row.guessed):
        end = start + len(list(run))
        first = max(0, start - CONTEXT)
        before = tokenizer.decode(row.tokens[first:start]).rstrip("\ufffd")
        text = tokenizer.decode(row.tokens[first:end])[len(before) :]
        yield guessed, text if end == len(row.tokens) else text.rstrip("\ufffd")
        start = end
