"""The report of a benchmark: figures by category and method, as JSON, table and picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OVERALL = "overall"


@dataclass(frozen=True)
class Figures:
    """The figures of one method on the prompts of a category; ``None`` where a figure has no meaning.

    Ratios are of tokens per second: over all prompts together, and the median over prompts.
    ``mean_accepted_length`` is τ, or tokens per target forward for transformers' methods. ``target_seconds`` and
    ``draft_seconds`` are those of their forwards. ``rest_seconds`` are all others, and ``outside_forwards`` is their
    share. ``differing_rows`` counts, for greedy decoding, the rows whose text is not that of plain ``generate``. A
    spread is the 90 % interval of a bootstrap over the measured prompts.
    """

    rows: int
    tokens: int
    seconds: float
    tokens_per_second: float
    ratio_to_plain: float
    median_ratio_to_plain: float
    ratio_to_assisted: float | None
    median_ratio_to_assisted: float | None
    mean_accepted_length: float | None
    acceptance_rate: float | None
    acceptance_by_position: list[float] | None
    outside_forwards: float
    differing_rows: int | None
    ratio_to_plain_spread: tuple[float, float] | None = None
    mean_accepted_length_spread: tuple[float, float] | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    rest_seconds: float = 0.0


def _optional(value: float | None, layout: str) -> str:
    return "" if value is None else format(value, layout)


def _between(values: Sequence[float] | None) -> str:
    return "" if values is None else " to ".join(f"{value:.2f}" for value in values)


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "tok/s": lambda one: f"{one.tokens_per_second:.1f}",
    "x plain": lambda one: f"{one.ratio_to_plain:.2f}",
    "spread": lambda one: _between(one.ratio_to_plain_spread),
    "median": lambda one: f"{one.median_ratio_to_plain:.2f}",
    "x assisted": lambda one: _optional(one.ratio_to_assisted, ".2f"),
    "τ": lambda one: _optional(one.mean_accepted_length, ".2f"),
    "accepted": lambda one: _optional(one.acceptance_rate, ".0%"),
    "by position": lambda one: " ".join(f"{100 * share:.0f}" for share in one.acceptance_by_position or ()),
    "target+draft+rest s": lambda one: "+".join(
        f"{seconds:.1f}" for seconds in (one.target_seconds, one.draft_seconds, one.rest_seconds)
    ),
    "outside": lambda one: f"{one.outside_forwards:.1%}",
    "differ": lambda one: "" if one.differing_rows is None else f"{one.differing_rows}/{one.rows}",
    "same text": lambda one: {None: "", 0: "yes"}.get(one.differing_rows, "NO"),
}
TABLE = tuple(column for column in COLUMNS if column not in ("same text", "spread"))


@dataclass(frozen=True)
class BenchReport:
    """The figures of every category and ``"overall"``, by method: ``figures[category][method]``."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    figures: dict[str, dict[str, Figures]]

    @property
    def overall(self) -> dict[str, Figures]:
        """Return the figures over all categories, by method."""
        return self.figures[OVERALL]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)

    def table(self, category: str = OVERALL, columns: Sequence[str] = TABLE) -> str:
        """Format one category as text, with those ``columns`` that have a value for any method.

        Acceptance is in per cent of the draft tokens, overall and by position.
        """
        lines = [["method", *columns]]
        for method, one in self.figures[category].items():
            lines.append([method, *(COLUMNS[column](one) or "-" for column in columns)])
        kept = [column for column in zip(*lines, strict=True) if set(column[1:]) != {"-"}]
        widths = [max(map(len, column)) for column in kept]
        return "\n".join(_aligned(line, widths) for line in zip(*kept, strict=True))

    def note(self) -> str:
        """Return an explanation of greedy texts that differ from those of plain ``generate``; "" if none does."""
        differ = {name for name, one in self.overall.items() if one.differing_rows}
        if not differ:
            return ""
        dtype = self.environment["dtype"]
        if dtype == "float32" and differ.isdisjoint(self.settings["contenders"]):
            return "differ: greedy text that is not that of plain generate; transformers' own methods round otherwise."
        if dtype == "float32":
            return "differ: greedy text is not that of plain generate; in float32 this is a mistake: please report it."
        return (
            f"differ: rows whose greedy text is not that of plain generate. In {dtype} a block of draft tokens and "
            "single steps\nround differently, so that two tokens which are nearly equally likely may change places; "
            "from there on the texts\ndiffer. Neither is the better one. In float32 (--dtype float32) they agree."
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw speed and acceptance as a PNG file. Errors: ImportError if matplotlib is missing."""
        pyplot = import_pyplot()
        picture = self.draw(pyplot)
        picture.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(picture)  # so that a notebook does not show it

    def draw(self, pyplot: Any) -> Any:
        """Return the matplotlib figure that ``plot`` writes: each method has one colour, in both parts."""
        overall = self.overall
        colours = dict(zip(overall, _colours(pyplot, len(overall)), strict=True))
        picture, (speed, accepted) = pyplot.subplots(1, 2, figsize=(11, 1.5 + 0.5 * max(4, len(overall))))
        names = list(overall)[::-1]
        lengths = [overall[name].ratio_to_plain for name in names]
        bars = speed.barh(names, lengths, color=[colours[name] for name in names])
        speed.bar_label(bars, [_label(overall[name]) for name in names], padding=3)
        speed.axvline(1, color="grey", linewidth=0.8)
        speed.margins(x=0.4)
        speed.set_xlabel("tokens per second, plain generate = 1")
        for name, one in overall.items():
            if shares := one.acceptance_by_position:
                accepted.plot(range(1, len(shares) + 1), shares, marker="o", label=name, color=colours[name])
        accepted.xaxis.get_major_locator().set_params(integer=True)
        accepted.set(xlabel="position of the draft token", ylabel="accepted", ylim=(0, 1.02))
        picture.tight_layout()
        if accepted.lines:
            accepted.legend(loc="upper left", bbox_to_anchor=(1.02, 1))  # outside the axes, so that it covers no line
        return picture


def _colours(pyplot: Any, count: int) -> list[Any]:
    """Return ``count`` different colours; more than twenty come from a rainbow colormap."""
    if count <= len(listed := pyplot.colormaps["tab20"].colors):
        return list(listed[:count])
    return [pyplot.colormaps["turbo"](i / (count - 1)) for i in range(count)]


def import_pyplot() -> Any:
    """Import matplotlib, or raise an ImportError that says how to install it.

    Without a screen it falls back to writing files by itself, and in a notebook its way of showing pictures stays.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'hf-spec[bench]'") from error
    return pyplot


def _label(one: Figures) -> str:
    tau = one.mean_accepted_length
    return f"{one.ratio_to_plain:.2f}" + ("" if tau is None else f"  (τ {tau:.2f})")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded[1:]])
