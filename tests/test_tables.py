"""The marked tables of README and docs are those of their raw files: ``examples/tables.py`` changes nothing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MADE = {"processor": "a processor", "capability": "AVX2", "commit": "0123456789abcdef", "torch": "2.13.0"}
MADE |= {"transformers": "5.24.0", "hf_spec": "0.1.0", "date": "26 November 2026", "vllm": "0.32.0"}
CALLS = {"plain": [2.0, 2.2, 2.4], "eagle3": [1.0, 1.1, 1.0]}
ROWS = {
    name: {"seconds": seconds, "accepted_length": length, "same_text": "yes"}
    for name, seconds, length in (("plain, eager", 4.0, None), ("plain, compiled", 2.0, None), ("mtp", 1.0, 3.0))
}
RAW: dict[str, Any] = {
    "defaults": {"made_from": MADE, "seconds": {"batch 1, greedy": CALLS}},
    "compiled-mtp": {"made_from": MADE, "tables": [{"title": "demo", "tokens": 8, "rows": ROWS}]},
    "step-costs": {"made_from": MADE, "float32": {"rows": {"0": {"1": 1.0, "32": 3.5}, "6": {"1": 1.25, "32": 9.0}}}},
}
LINES = {
    "defaults": "| batch 1, greedy | 2.00 |",
    "compiled-mtp": "| mtp | 8 | 4.00 | 2.00 | 3.00 | yes |",
    "step-costs": "| float32, 6 nodes | 1.25 | 9.00 |",
}


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "tables.py"))


def marked(name: str, text: str) -> str:
    return f"before\n<!-- table: {name}, by examples/tables.py -->\n{text}<!-- end of table -->\nafter\n"


def test_pages_show_what_the_raw_files_hold(tables: dict[str, Any]) -> None:
    found = []
    for page in tables["pages"]():
        text = page.read_text(encoding="utf-8")
        assert tables["renewed"](text) == text, f"{page} differs: run python examples/tables.py"
        found += [match[2] for match in tables["MARKED"].finditer(text)]
        assert text.count("by examples/tables.py -->") == len(tables["MARKED"].findall(text)), page
    assert sorted(found) == sorted(tables["TABLES"])


def test_a_figure_that_is_not_in_the_raw_file_is_found(tables: dict[str, Any]) -> None:
    page = EXAMPLES.parent / "docs" / "scaling.md"
    text = page.read_text(encoding="utf-8")
    changed = text.replace("| eagle3 | 2.505 |", "| eagle3 | 2.506 |")
    assert changed != text and tables["renewed"](changed) == text


@pytest.mark.parametrize("name", RAW)
def test_raw_files_become_tables(name: str, tables: dict[str, Any], tmp_path: Path) -> None:
    table = tables["TABLES"][name]
    file = tmp_path / "raw.json"
    tables["TABLES"][name] = tables["Table"](table.write, table.command, file)
    try:
        assert tables["renewed"](marked(name, "old\n")) == marked(name, "old\n")  # without a raw file nothing changes
        file.write_text(json.dumps(RAW[name]), encoding="utf-8")
        once = tables["renewed"](marked(name, "old\n"))
    finally:
        tables["TABLES"][name] = table
    assert "old" not in once and once.startswith("before\n") and once.endswith("after\n")
    assert f"\n{LINES[name]}\n" in once
    assert "a processor (AVX2), commit 0123456789ab, torch 2.13.0, transformers 5.24.0, hf_spec 0.1.0." in once


def test_the_commands_write_the_files_that_are_read(tables: dict[str, Any]) -> None:
    for name, table in tables["TABLES"].items():
        script, *options = table.command.split()
        assert (EXAMPLES / script).exists()
        wanted = str(table.file.relative_to(EXAMPLES))
        assert wanted in options or str(Path(wanted).parent) in options, name
