"""The marked tables of README and docs are those of their raw files: ``examples/tables.py`` changes nothing."""

from __future__ import annotations

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_documents import DOCUMENTS, sentences

EXAMPLES = Path(__file__).parents[1] / "examples"
MADE = {"processor": "a processor", "capability": "AVX2", "commit": "0123456789abcdef", "torch": "2.13.0"}
MADE |= {"transformers": "5.24.0", "hf_spec": "0.1.0", "date": "26 November 2026", "vllm": "0.32.0"}
CALLS = {"plain": [2.0, 2.2, 2.4], "eagle3": [1.0, 1.1, 1.0]}
ROWS = {
    name: {"seconds": seconds, "accepted_length": length, "same_text": "yes", "parts": parts}
    for name, seconds, length, parts in (
        ("plain, eager", 4.0, None, [3.0, 0.0, 1.0]),
        ("plain, compiled", 2.0, None, None),
        ("mtp", 1.0, 3.0, [0.5, 0.25, 0.25]),
    )
}
STEPS = {"mean_accepted_length": 2.0, "proposed": 5, "row_steps": 2}
FOUND = {"tokens_per_forward": 1.0, "log_probability": -2.19, "as_plain": 7, "texts": 8}
ARM = {"steps": 270, "eval_acceptance_length": 1.6, "eval_sampled_acceptance_length": 1.62}
ARM |= {f"eval_acceptance_{k}": 0.4**k for k in range(1, 8)}
BATCH = {"seconds": 6.0, "forwards": 9, "parts": [3.0, 0.5, 0.5], "median": 2.0, "late": 5.0}
ANSWERS = {
    mode: {
        f"{way}, {size}": {"answers": 8, "differ": differ * size, "tokens": 200, "accepted": accepted}
        for way, accepted in (("plain", 0), ("n-grams", 50))
        for size in (1, 4, 8)
    }
    for mode, differ in (("outside", 1), ("in the mode", 0))
}
RAW: dict[str, Any] = {
    "defaults": {
        "made_from": MADE,
        "seconds": {"batch 1, greedy": CALLS},
        "parts": {"batch 1, greedy": {"plain": [2.0, 0.0, 0.2], "eagle3": None}},
    },
    "compiled-mtp": {"made_from": MADE, "tables": [{"title": "demo", "tokens": 8, "rows": ROWS}]},
    "history": {"made_from": MADE, "edits": {"n-gram": STEPS, "hybrid": STEPS | {"mean_accepted_length": 3.5}}},
    "other-tokenizer": {"made_from": MADE, "figures": {"plain": {"greedy": FOUND, "sampled": FOUND}}},
    "early-exits": {"made_from": MADE, "exits": {"2": STEPS | {"acceptance_rate": 0.161, "plain_steps": 1.6}}},
    "family-drafts": {"made_from": MADE, "drafts": {"draft-mtp": {"chains, greedy": [2.0, 3.0], "products": [1.0]}}},
    "demo-drafts-speed": {"made_from": MADE, "drafts": {"draft-mtp": {"chains": [2.0], "ms per proposal": [4.25]}}},
    "ablations": {"made_from": MADE, "arms": {"one step": ARM}},
    "training-speed": {"made_from": MADE, "steps": {"512 2048 512": {"theirs": [2, 400, 500], "ours": [1, 100, 400]}}},
    "batches": {
        "made_from": MADE,
        "stories": 16,
        "at_once": {"4": {"engine, plain": [BATCH], "engine, mtp": [BATCH | {"seconds": 4.0}]}},
    },
    "replay": {"made_from": MADE, "rows": {"n-grams, AMD": {"x plain": 1.5, "without": {"decay": [0.97, 0.9]}}}},
    "packed": {"made_from": MADE, "forwards": {"tiny, float32": {"plain": {"1": 2.0}, "packed": {"1": 1.0}}}},
    "padded": {"made_from": MADE, "seconds": {"plain `generate`": [[34.31, 0.25], [31.6, 0.26]]}},
    "exact-answers": {
        "made_from": MADE,
        "settings": {"target": "smollm2", "dtype": "bfloat16", "new_tokens": 24, "packed": True, "threads": 1},
        "rounds": {mode: [ANSWERS[mode], ANSWERS[mode]] for mode in ("outside", "in the mode")},
    },
    "step-costs": {"made_from": MADE, "float32": {"rows": {"0": {"1": 1.0, "32": 3.5}, "6": {"1": 1.25, "32": 9.0}}}},
    "invariant-cost": {
        "made_from": MADE,
        "shape": "smollm2-135m",
        "threads": 1,
        "float32": {
            f"{way}, 256, 32": {"seconds": seconds, "operators": operators}
            for way, seconds, operators in (("plain", 0.5, 900), ("packed", 0.25, 950), ("invariant", 0.3, 4000))
        },
    },
}
LINES = {
    "invariant-cost": "| 256 | 32, tree | 500.0 | 250.0 | 300.0 | 1.20 | 950 | 4000 |",
    "exact-answers": "| n-grams | 2 | 8 | 16 | 0 | 0 | 0 | 25% of the text |",
    "history": "| edits | 2.00 (2.5) | 3.50 (2.5) |",
    "other-tokenizer": "| plain | 1.00 | 7 of 8 | 1.00 | -2.19 |",
    "early-exits": "| 2 | 16% | 2.00 | 1.6 |",
    "family-drafts": "| `draft-mtp` | 2.50 ± 0.50 |",
    "demo-drafts-speed": "| `draft-mtp` | 4.25 |",
    "ablations": "| one step | 270 | 1.60 | 1.62 | 0.40 | 0.40 | 0.40 | 0.40 | - |",
    "training-speed": "| 512 | 2,048 | 512 | 2.00 s, 400 MB (500) | 1.00 s, 100 MB (400) | 0.50, 0.25 (0.80) |",
    "batches": "| 4 | engine, mtp | 1.50 | 9 | 3.0 + 0.5 + 0.5 | 2.0 | 5.0 |",
    "replay": "| n-grams, AMD | 1.50 | 0.97 (0.90) |",
    "packed": "| tiny, float32, packed / plain | 0.50 |",
    "padded": "| the first token | 34.3, 31.6 |",
    "defaults": "| batch 1, greedy | 1.00 (2.00 + 0.00 + 0.20 s) | 2.00 (1.00 s) |",
    "compiled-mtp": "| mtp | 8 | 4.00 | 2.00 | 1.000 | 0.500 | 0.250 | 0.250 | 3.00 | yes |",
    "step-costs": "| float32, 6 nodes | 1.25 | 9.00 |",
}
FIGURE = re.compile(r"[-~*]*\d[\d,]*(?:\.\d+)?\*{0,2} ?(?:%|ms|s|MB|GB|M|G)?(?: ?[(+±/,;].*)?")
PAGE = "examples/real_model/page.py writes it from raw files; tests/demo/test_real_model.py compares"
OLD = "of a machine or weights that are not at hand; the text above it says when and where"
SUMS = "computed, not measured"
COUNTED = "counted once, not timed"
FACTS = "what files or other projects say"
# Tables with figures that no raw file makes: the page, the beginning of the first line, and why.
BY_HAND = {
    ("README.md", "| SmolLM2-135M-Instruct, bfloat16 |"): PAGE,
    ("benchmarks.md", ""): PAGE,
    ("architectures.md", "| | architectures | chains exact |"): "a slow test makes it: tests/decode/test_exactness.py",
    ("batches.md", "| counted for the prompts above |"): COUNTED,
    ("batches.md", "| counted instructions |"): "counted as in tests/batching/test_plain_runs.py",
    ("compilation.md", "| | sizes |"): FACTS,
    ("demo-family.md", "| | `target` | `draft-vanilla` |"): FACTS,
    ("demo-family.md", "| | what it is | parameters |"): FACTS,
    ("exact-to-the-bit.md", "| | outside of the mode | in the mode |"): "by hand, on a GPU that was lent for minutes",
    ("first-draft.md", "| step | seconds | result |"): OLD,
    ("first-draft.md", "| target | draft | tokens | learning rate |"): FACTS,
    ("first-draft.md", "| target | EAGLE-3, 32,000 tokens |"): SUMS,
    ("first-draft.md", "| part | GB |"): SUMS,
    ("first-draft.md", "| | milliseconds per token |"): OLD,
    ("history.md", "| | n-gram, 5 | n-gram, 16 | 0.05 |"): OLD,
    ("long-contexts.md", "| tokens before |"): "quotients of step costs, which test_documents.py computes",
    ("mixtures-of-experts.md", "| model | experts |"): "test_documents.py computes it",
    (
        "performance.md",
        "| draft, step times of |",
    ): "tests/policy/replay.py writes it, without a clock",
    ("performance.md", "| | operators | waits |"): COUNTED,
    ("speech-and-translation.md", "| speculator | forwards of the decoder |"): COUNTED,
    ("speech-and-translation.md", "| batch of 4 |"): OLD,
    ("serving.md", "| option | means | default |"): FACTS,
    ("versions.md", "| feature | from | before that |"): FACTS,
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


def test_files_of_engines_become_one_table(tables: dict[str, Any], tmp_path: Path) -> None:
    """One column for each file; a method that one file lacks, and one that does not say what its parts took."""
    run = {"target": 1.5, "draft": 0.25, "tokens": [[1, 2], [3, 4]], "accepted_length": None}
    cells = {
        ("float32", 8): ["plain: plain"],
        ("float32", 1): ["plain: plain", "llama.cpp: lookup", "llama.cpp: plain"],
        ("bfloat16", 1): ["plain: plain"],
    }
    for (dtype, batch), titles in cells.items():
        turn = {title: run | {"seconds": 2.0} for title in titles}
        if (dtype, batch) == ("float32", 1):
            turn["llama.cpp: lookup"] |= {"seconds": 4.0, "target": None}
        errors = {"vLLM: plain": "no memory"} if batch == 1 else {}
        made = MADE | {"dtype": dtype, "cores": 1, "batch": batch}
        made |= {"commit": "f" * 40, "cores": 2} if dtype == "bfloat16" else {}
        content = {"made_from": made, "errors": errors, "turns": [turn]}
        (tmp_path / f"cell-{dtype}-batch{batch}.json").write_text(json.dumps(content), encoding="utf-8")
    before = tables["TABLES"]["next-to-engines"]
    tables["TABLES"]["next-to-engines"] = tables["Table"](before.write, before.command, tmp_path)
    try:
        page = tables["renewed"](marked("next-to-engines", "old\n"))
    finally:
        tables["TABLES"]["next-to-engines"] = before
    assert [line for line in page.splitlines() if line.startswith("|")] == [
        "| | bfloat16, 2 cores, 1 at once | float32, 1 core, 1 at once | float32, 1 core, 8 at once |",
        "|---|---|---|---|",
        f"| transformers, plain |{' 2.0 (1.00), 1.5 + 0.2 + 0.2 s |' * 3}",
        "| llama.cpp, plain | - | 2.0 (1.00), 1.5 + 0.2 + 0.2 s | - |",
        "| llama.cpp, lookup | - | 1.0 (0.50) | - |",
    ]
    assert "Not measured: vLLM, plain." in page
    assert page.count("commit 0123456789ab") == page.count("commit ffffffffffff") == 1


def test_changes_since_the_commit_are_told(tables: dict[str, Any]) -> None:
    raw = {"made_from": MADE | {"commit": "0123456789abcdef+changes"}, "seconds": {"greedy": CALLS}}
    assert ", commit 0123456789ab with changes, torch" in tables["TABLES"]["defaults"].write(raw)


def test_the_commands_write_the_files_that_are_read(tables: dict[str, Any]) -> None:
    for name, table in tables["TABLES"].items():
        script, *options = table.command.split()
        assert (EXAMPLES / script).exists() or find_spec(options[0]), name
        wanted = str(table.file.relative_to(EXAMPLES))
        assert wanted in options or str(Path(wanted).parent) in options, name


def cell(seconds: float, *parts: float | None, tokens: int = 128) -> dict[str, Any]:
    target, draft, rest = parts or (None,) * 3
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "target_seconds": target,
        "draft_seconds": draft,
        "rest_seconds": rest,
        "tokens_per_step": 2.5,
        "text": "same",
    }


def measured_on_a_gpu() -> dict[str, Any]:
    """Return what ``hf_spec.bench.gpu`` writes, with a part that was stopped and a cell that failed."""
    single = {
        "plain, eager": cell(4.0, 3.5, 0.0, 0.5),
        "plain, CUDA graphs": cell(1.0),
        "EAGLE-3, eager": cell(2.0, 1.5, 0.25, 0.25),
        "EAGLE-3, CUDA graphs": cell(0.5),
        "transformers' assisted, eager": cell(3.2, 2.0, 1.0, 0.2),
        "draft model, compiled": cell(0.7, 0.5, 0.1, 0.1),
    }
    batch = {"plain, eager": cell(4.0, 3.5, 0.0, 0.5, tokens=1024), "EAGLE-3, eager": {"error": "OutOfMemory: a | b"}}
    step = {"seconds": 0.5, "tokens": 4096, "width": 2048, "tokens_per_second": 8192.0, "peak_bytes": 2**33}
    here = {"device": "a GPU", "driver": "580.1, 80 GiB, 700 W", "changed": False, "commit": "0123456789abcdef"}
    here |= {"cores": 16, "processor": "x86_64", "torch": "2.13.0", "cuda": "13.0", "transformers": "5.24.0"}
    return {
        "environment": here | {"triton": None, "tiny": False},
        "parts": {
            "tests": {"title": "pytest -m gpu", "cells": {}, "said": "41 passed in 12 s", "complete": True},
            "decoding-1b-1": {"title": "Decoding, 1b, 1 sequence", "cells": single, "complete": True},
            "decoding-1b-8": {"title": "Decoding, 1b, 8 sequences", "cells": batch},
            "decoding-1b-32": {"title": "Decoding, 1b, 32 sequences", "cells": {"plain, eager": cell(9.0)}},
            "training-1b": {"title": "A training step", "cells": {"seven unrolled steps": step}, "complete": True},
        },
    }


def test_figures_of_a_gpu_become_the_page_and_the_table_of_readme(tables: dict[str, Any]) -> None:
    raw = measured_on_a_gpu()
    short = tables["TABLES"]["gpu-short"].write(raw)
    assert "a GPU (driver, memory, power: 580.1, 80 GiB, 700 W), 16 cores of x86_64. Commit 0123456789ab," in short
    rows = [line for line in short.splitlines() if line.startswith("|")]
    assert rows == [
        "|  | 1B, 1 sequence | 1B, 8 sequences |",
        "|---|---|---|",
        "| plain, eager | 32 tokens/s (3.50 + 0.00 + 0.50 s) | 256 tokens/s (3.50 + 0.00 + 0.50 s) |",
        "| plain, CUDA graphs | 128 tokens/s (1.00 s) | - |",
        "| transformers' assisted, eager | 1.25 (2.00 + 1.00 + 0.20 s) | - |",
        "| EAGLE-3, eager | 2.00 (1.50 + 0.25 + 0.25 s) | failed |",
        "| EAGLE-3, CUDA graphs | 2.00 (0.50 s) | - |",
    ]
    page = tables["TABLES"]["gpu"].write(raw)
    assert "| draft model, compiled | ? (0.50 + 0.10 + 0.10 s) | - | - |" in page
    assert "| EAGLE-3, eager | OutOfMemory: a / b |" in page and "41 passed in 12 s" in page
    assert page.count("Not complete") == 2 and "8.0 GiB" in page
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    assert [one for one in sentences(short + page) if len(one.split()) > 25] == []


def test_figures_of_a_trial_are_refused(tables: dict[str, Any]) -> None:
    raw = measured_on_a_gpu()
    raw["environment"]["tiny"] = True
    for name in ("gpu", "gpu-short"):
        with pytest.raises(ValueError, match="mean nothing"):
            tables["TABLES"][name].write(raw)


def test_no_page_denies_what_was_measured_on_a_gpu(tables: dict[str, Any]) -> None:
    """As long as there is no raw file, pages must say so."""
    denials = "nothing was measured yet|measured on GPUs . no|Not run by us.*any GPU|Nothing was measured on one"
    denied = re.compile(rf"{denials}|we had no GPU|no figures of GPUs yet|\(CUDA\) \| not run")
    said = {path.name for path in DOCUMENTS if denied.search(path.read_text(encoding="utf-8"))}
    pages = {"README.md", "choosing.md", "compilation.md", "first-draft.md", "platforms.md"}
    expected = set() if tables["TABLES"]["gpu"].file.exists() else pages
    assert said == expected


def with_figures(text: str) -> dict[str, str]:
    """Return the tables in which a sixth of the cells are figures, by their first lines, each with the text above."""
    found = {}
    for match in re.finditer(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = match[0].splitlines()
        cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
        if 6 * sum(bool(FIGURE.fullmatch(cell)) for cell in cells) >= max(1, len(cells)):
            found[head] = re.split(r"^#+ .*\n", text[: match.start()], flags=re.M)[-1]
    return found


def unexplained(name: str, text: str, marked: re.Pattern[str]) -> list[str]:
    """Return the first lines of tables with figures that neither a raw file makes nor BY_HAND names."""
    reasons = [first for page, first in BY_HAND if page == name]
    heads = with_figures(marked.sub("", text))
    return [head for head in heads if not any(head.startswith(first) for first in reasons)]


def test_every_table_with_figures_has_a_raw_file_or_a_reason(tables: dict[str, Any]) -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in tables["pages"]()}
    texts.pop("reference.md")  # made from docstrings
    assert {name: heads for name in texts if (heads := unexplained(name, texts[name], tables["MARKED"]))} == {}
    for (name, first), reason in BY_HAND.items():
        above = [text for head, text in with_figures(texts[name]).items() if head.startswith(first)]
        assert above, f"{name} has no such table any more: {first}"
        for text in above if reason == OLD else ():
            assert re.search(r"\d{1,2}\s+November 2026", text), f"{name} does not say when: {first}"
            assert re.search(r"AMD EPYC|CPU", text), f"{name} does not say where: {first}"


def test_tables_that_wait_for_their_raw_file_say_when_and_where_they_were_measured(tables: dict[str, Any]) -> None:
    for page in tables["pages"]():
        for match in tables["MARKED"].finditer(page.read_text(encoding="utf-8")):
            if not tables["TABLES"][match[2]].file.exists() and with_figures(match[3]):
                assert re.search(r"\n\d{1,2} November 2026, .*(?:AMD EPYC|CPU)", match[3]), match[2]


def test_a_table_without_a_raw_file_is_found(tables: dict[str, Any]) -> None:
    table = "| draft | x plain |\n|---|---|\n| eagle3 | 1.75 |\n| ngram | **2.07** (1.62 to 2.79) |\n"
    assert unexplained("trees.md", f"# Trees\n\n{table}", tables["MARKED"]) == ["| draft | x plain |"]
    assert unexplained("trees.md", marked("defaults", f"\n{table}\n"), tables["MARKED"]) == []
    assert with_figures("| option | what it does |\n|---|---|\n| `--card` | writes 1 file |\n") == {}
