"""The page: tables in Markdown from raw results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...progress import counted
from .decoding import ASSISTED, EAGLE, FORMS, MODEL, PLAIN

HEAD = (
    *("", "tokens/s", "x plain eager", "x plain, same form", "seconds", "target", "draft", "rest"),
    *("tokens per step", "same text"),
)
NOTES = """
- **Targets** are the demo family's, inflated: they cost what a model of that size costs, and say what the demo target
  says. So the acceptance is the demo family's, and says nothing about any other pair.
- **Seconds** are of one call, the least of five. Target, draft and rest are shares of one more call, by the device's
  own clock around their forwards. `?`: a compiled forward that calls no module is not seen.
- **x plain, same form** compares eager with eager, compiled with compiled, and CUDA graphs with CUDA graphs.
- **Same text**: in bfloat16 near-ties may fall the other way, with any method.
"""
SUMMARY = (PLAIN, ASSISTED, MODEL, EAGLE)  # the columns of the short table
SHORT = """\
Speed as a multiple of plain `generate` in the same form; for plain, tokens a second. In brackets: seconds of target,
draft and the rest, or their sum where they cannot be told apart. `-`: not measured.
"""


def page(results: dict[str, Any]) -> str:
    """Return all tables of ``results`` and what they were measured with."""
    lines = ["# Measured on " + str(results["environment"]["device"]), ""]
    lines += [f"- {name}: {value}" for name, value in results["environment"].items() if value not in (None, "")]
    lines += [NOTES.rstrip()]
    if short := summary(results):
        lines += ["", "## Decoding in short", "", SHORT, short]
    return "\n".join(lines) + "\n\n" + tables(results)


def made_from(results: dict[str, Any]) -> str:
    """Say with which device and versions ``results`` were measured."""
    here = results["environment"]
    device = here["device"] + (f" (driver, memory, power: {here['driver']})" if here["driver"] else "")
    commit = _short_commit(here["commit"]) + (" with changes" if here["changed"] else "")
    cells = (cell for part in results["parts"].values() for cell in part["cells"].values())
    if others := sorted({_short_commit(cell["commit"]) for cell in cells if _is_of_another(cell, here["commit"])}):
        commit += f" (\\*: {', '.join(others)})"
    versions = {"torch": "torch", "CUDA": "cuda", "transformers": "transformers", "Triton": "triton"}
    named = [f"{name} {here[key]}" for name, key in versions.items() if here[key]]
    return f"{device}, {here['cores']} cores of {here['processor']}. Commit {commit}, {', '.join(named)}."


def _short_commit(commit: str | None) -> str:
    return (commit or "unknown")[:12]


def summary(results: dict[str, Any], batches: Sequence[int] = (), forms: Sequence[str] = FORMS) -> str:
    """Return one table of the decoding parts with ``batches`` sequences, by default of all; "" without any."""
    columns: dict[str, dict[str, Any]] = {}
    for name, part in results["parts"].items():
        what, *shape = name.split("-")
        if what == "decoding" and (not batches or int(shape[1]) in batches):
            columns[f"{shape[0].upper()}, {counted(int(shape[1]), 'sequence')}"] = part["cells"]
    lines = [_row("", *columns), "|---" * (1 + len(columns)) + "|"]
    commit = results["environment"].get("commit")
    for way in SUMMARY:
        for form in forms:
            cells = [one.get(f"{way}, {form}") for one in columns.values()]
            plain = [one.get(f"{PLAIN}, {form}") for one in columns.values()]
            if any(cells):
                briefs = (_brief(cell, base, commit) for cell, base in zip(cells, plain, strict=True))
                lines.append(_row(f"{way}, {form}", *briefs))
    return "\n".join(lines) if lines[2:] else ""


def _is_of_another(cell: dict[str, Any], commit: str | None) -> bool:
    """Tell whether a cell, put into these results by hand, was measured at another commit than ``commit``."""
    return bool(cell.get("commit", commit) != commit)


def _brief(cell: dict[str, Any] | None, plain: dict[str, Any] | None, commit: str | None) -> str:
    """Return a cell of the summary, next to ``plain`` in the same form."""
    if cell is None:
        return "-"
    if "error" in cell:
        return "failed"
    base = (plain or {}).get("seconds")
    speed = "?" if base is None else f"{base / cell['seconds']:.2f}"
    if cell is plain:
        speed = f"{cell['tokens_per_second']:.0f} tokens/s"
    parts = [cell[f"{what}_seconds"] for what in ("target", "draft", "rest")]
    seconds = [cell["seconds"]] if None in parts else parts
    mark = " \\*" if _is_of_another(cell, commit) else ""
    return f"{speed} ({' + '.join(f'{one:.2f}' for one in seconds)} s){mark}"


def tables(results: dict[str, Any]) -> str:
    """Return all tables of ``results``, each below its heading."""
    lines: list[str] = []
    for name, part in results["parts"].items():
        lines += ["", f"## {part['title']}", ""]
        if "said" in part:
            lines.append(part["said"])
        elif name.startswith("training"):
            lines += _training(part["cells"])
        else:
            lines += _decoding(part["cells"], results["environment"].get("commit"))
        if not part.get("complete"):
            lines += ["", "Not complete: the command was stopped here, or asked for some cells only."]
    return "\n".join(lines[1:]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _decoding(cells: dict[str, Any], commit: str | None) -> list[str]:
    lines = [_row(*HEAD), "|---" * len(HEAD) + "|"]
    for name, cell in cells.items():
        if "error" in cell:
            lines.append(_row(name, _short(cell["error"]), *[""] * (len(HEAD) - 2)))
            continue
        plain = [cells.get(f"plain, {form}", {}).get("seconds") for form in ("eager", name.rpartition(", ")[2])]
        ratios = [f"{one / cell['seconds']:.2f}" if one else "?" for one in plain]
        parts = [cell[f"{what}_seconds"] for what in ("target", "draft", "rest")]
        seconds = ["?" if one is None else f"{one:.3f}" for one in (cell["seconds"], *parts)]
        step = cell["tokens_per_step"]
        text = cells.get("plain, eager", {}).get("text")
        same = "?" if None in (text, cell["text"]) else "yes" if cell["text"] == text else "no"
        name += " \\*" if _is_of_another(cell, commit) else ""
        accepted = "1" if name.startswith("plain") else "?" if step is None else f"{step:.2f}"
        lines.append(_row(name, f"{cell['tokens_per_second']:.0f}", *ratios, *seconds, accepted, same))
    return lines


def _training(cells: dict[str, Any]) -> list[str]:
    head = ("", "tokens", "width", "seconds", "tokens/s", "peak memory")
    lines = [_row(*head), "|---" * len(head) + "|"]
    for name, cell in cells.items():
        if "error" in cell:
            lines.append(_row(name, _short(cell["error"]), *[""] * (len(head) - 2)))
            continue
        peak = "?" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 2**30:.1f} GiB"
        sizes = f"{cell['tokens']:,}", f"{cell['width']:,}"
        lines.append(_row(name, *sizes, f"{cell['seconds']:.3f}", f"{cell['tokens_per_second']:.0f}", peak))
    return lines


def _short(error: str) -> str:
    return error.replace("|", "/").replace("\n", " ")[:120]
