"""Show statistics of speculation to people: as text, as HTML in a notebook, as a plot."""

from __future__ import annotations

import html
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .progress import counted

if TYPE_CHECKING:
    from .metrics import RowStats, SpeculationStats

# Tokens decoded before a piece of text, so that characters and spaces that tokens share come out right.
CONTEXT = 8
ACCEPTED_STYLE = "background: rgba(46, 160, 67, 0.35); border-radius: 2px"
SEQUENCE_STYLE = "white-space: pre-wrap; margin: 0.5em 0; padding-left: 0.5em; border-left: 2px solid currentColor"


def to_text(stats: SpeculationStats) -> str:
    """Write a title and a line for each figure."""
    title, lines = _summary(stats)
    return "\n".join([title, *(f"  {name:25}  {text}" for name, text in lines.items())])


def to_html(stats: SpeculationStats) -> str:
    """Write a table of the figures, and the text with accepted draft tokens coloured if a tokenizer is known."""
    title, lines = _summary(stats)
    # A table, not lines of text: notebooks may show those in a font whose letters differ in width.
    cells = (f"<tr>{_cell(name)}{_cell(text)}</tr>" for name, text in lines.items())
    figures = f"<table><caption>{html.escape(title)}</caption>{''.join(cells)}</table>"
    rows = [row for row in stats.per_row if row.tokens]
    if stats.tokenizer is None or not rows:
        return figures
    legend = f'<p><span style="{ACCEPTED_STYLE}">accepted draft tokens</span> and the target\'s own tokens</p>'
    texts = (f'<div style="{SEQUENCE_STYLE}">{_row_html(row, stats.tokenizer)}</div>' for row in rows)
    # Notebooks would typeset what stands between dollar signs.
    return f'<div class="tex2jax_ignore mathjax_ignore">{figures}{legend}{"".join(texts)}</div>'


def to_figure(stats: SpeculationStats) -> Any:
    """Draw the acceptance by position and the tokens of a step; return the figure of matplotlib.

    Errors: an ImportError if matplotlib is missing.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'hf-spec[notebook]'") from error
    figure, (accepted, emitted) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    pyplot.close(figure)  # a notebook shows what a cell returns, and would show what is open as well
    counts = stats.counts
    shares = counts.acceptance_by_position
    accepted.bar(range(1, len(shares) + 1), shares)
    accepted.set(xlabel="draft token", ylabel="share of steps that accept it", ylim=(0, 1))
    lengths = counts.lengths[1:]
    emitted.bar(range(1, len(lengths) + 1), lengths)
    emitted.axvline(counts.mean_accepted_length, color="grey", linewidth=0.8)
    emitted.set(xlabel=f"tokens of a step (mean {counts.mean_accepted_length:.2f})", ylabel="steps")
    for axes in (accepted, emitted):
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def text_pieces(row: RowStats, tokenizer: Any) -> Iterator[tuple[bool, str]]:
    """Cut the row's text where draft tokens and the target's own meet; a character of both goes to the later piece."""
    start = 0
    for drafted, run in groupby(row.drafted):
        end = start + len(list(run))
        first = max(0, start - CONTEXT)
        before = tokenizer.decode(row.tokens[first:start]).rstrip("\ufffd")
        text = tokenizer.decode(row.tokens[first:end])[len(before) :]
        yield drafted, text if end == len(row.tokens) else text.rstrip("\ufffd")
        start = end


def _summary(stats: SpeculationStats) -> tuple[str, dict[str, str]]:
    """Return a title and the figures that people read, by name."""
    counts = stats.counts
    by_position = " ".join(f"{share:.2f}" for share in counts.acceptance_by_position)
    seconds = (stats.propose_seconds, stats.target_seconds, stats.verify_seconds)
    shares = " / ".join(f"{part / (sum(seconds) or 1):.1%}" for part in seconds)
    emitted, steps = counted(counts.emitted, "token"), counted(stats.steps, "step")
    title = f"SpeculationStats: {steps} gave {emitted}, batch of {stats.batch_size}"
    graphs = counted(stats.graphs, "graph")
    compiled = {"compiled": f"{graphs} in {stats.compile_seconds:.1f} s"} if stats.graphs else {}
    speed = {"speed": f"about {stats.speedup:.1f} x plain steps"} if stats.speedup else {}
    return title, {
        **speed,
        "mean accepted length": f"{counts.mean_accepted_length:.2f} tokens per step and row",
        "acceptance rate": f"{counts.acceptance_rate:.1%} ({counts.accepted} of {counts.proposed})",
        "acceptance by position": by_position or "-",
        "draft lengths": stats.draft_lengths or "-",
        **({"bits": "those of plain generate in the same mode"} if stats.invariant else {}),
        "propose / target / verify": f"{shares} of {sum(seconds):.3f} s",
        "time to first token": f"{stats.time_to_first_token * 1e3:.1f} ms",
        "time per output token": f"{stats.time_per_output_token * 1e3:.2f} ms",
        **compiled,
    }


def _cell(text: str) -> str:
    return f'<td style="text-align: left">{html.escape(text)}</td>'


def _row_html(row: RowStats, tokenizer: Any) -> str:
    escaped = ((accepted, html.escape(text)) for accepted, text in text_pieces(row, tokenizer))
    return "".join(f'<span style="{ACCEPTED_STYLE}">{text}</span>' if accepted else text for accepted, text in escaped)
