"""The page: tables in Markdown from raw results."""

from __future__ import annotations

from typing import Any

HEAD = (
    *("", "tokens/s", "x plain eager", "x plain, same form", "seconds", "target", "draft", "rest"),
    *("tokens per step", "same text"),
)
NOTES = """
- **Targets** are the demo family's, inflated: they cost what a model of that size costs, and say what the demo target
  says. So the acceptance is the demo family's, and says nothing about any other pair.
- **Seconds** are of one call, the median of five. Target, draft and rest are shares of one more call, by the device's
  own clock around their forwards. `?`: a compiled forward that calls no module is not seen.
- **x plain, same form** compares eager with eager, compiled with compiled, and CUDA graphs with CUDA graphs.
- **Same text**: in bfloat16 near-ties may fall the other way, with any method.
"""


def page(results: dict[str, Any]) -> str:
    """Return all tables of ``results`` and what they were measured with."""
    lines = ["# Measured on " + str(results["environment"]["device"]), ""]
    lines += [f"- {name}: {value}" for name, value in results["environment"].items() if value not in (None, "")]
    lines += [NOTES.rstrip()]
    for name, part in results["parts"].items():
        lines += ["", f"## {part['title']}", ""]
        if "said" in part:
            lines.append(part["said"])
        elif name.startswith("training"):
            lines += _training(part["cells"])
        else:
            lines += _decoding(part["cells"])
        if not part.get("complete"):
            lines += ["", "Not complete: the command was stopped here."]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _decoding(cells: dict[str, Any]) -> list[str]:
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
        same = "?" if text is None else "yes" if cell["text"] == text else "no"
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
