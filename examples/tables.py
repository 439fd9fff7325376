"""Write the tables of README and docs that come from raw files: figures, machine and versions.

    python examples/tables.py             # all tables whose raw file is there
    python examples/tables.py --check     # name the pages that differ from their raw files, and change nothing

    python examples/tables.py --commands  # list the commands that measure them, to be run in this folder

A page marks such a table with two comments. The first names its entry in TABLES below, the second is its end. README's
table and docs/benchmarks.md come from real_model/page.py instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path[:0] = [str(HERE), str(HERE / "engines"), str(ROOT / "tests" / "policy")]
import ablations  # noqa: E402  # the folders are no packages
import batch_speed  # noqa: E402
import compare  # noqa: E402
import compare_demo_drafts  # noqa: E402
import compiled_speed  # noqa: E402
import default_speed  # noqa: E402
import early_exits  # noqa: E402
import engine_speed  # noqa: E402
import exact_answers  # noqa: E402
import history  # noqa: E402
import invariant_cost  # noqa: E402
import other_tokenizer  # noqa: E402
import packed_forwards  # noqa: E402
import padded_prompts  # noqa: E402
import replay  # noqa: E402
import training_speed  # noqa: E402

from hf_spec.bench.gpu import page as gpu_page  # noqa: E402

MARKED = re.compile(r"(<!-- table: ([\w-]+), by examples/tables.py -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
NODES = {"nodes": "by nodes", "0": "plain", "1": "1 node"}
FAMILY = "--drafts draft-vanilla draft-eagle3 draft-medusa draft-mtp draft-dspark"
SHORT = "--drafts SHORT/draft-jetspec SHORT/draft-dflash SHORT/draft-dflash2 SHORT/draft-dspark SHORT/draft-eagle3"
FEW = "--shapes smollm2-135m llama-1b --dtypes bfloat16 float32 --tokens 1 2 4 6 8 16 --turns 2"
SIXTEEN = "--rounds 1 --prompts 16 --at-once 4 16 --drafts ngram draft-mtp"
CURVES = {"nodes": "nodes, one sequence", "rows": "sequences", "prompt": "tokens before", "vocabulary": "vocabulary"}
ENGINES = """\
Next to other engines, in one run for each column: tokens a second (multiple of plain under the same conditions).
A multiple is a range where turns differ by more than 0.1.
SmolLM2-135M-Instruct, greedy, two cores, eight short prompts with answers of 48 tokens, which repeat little.
llama.cpp and vLLM are faster here, because each of their forwards takes less time. hf_spec and vLLM have the same
EAGLE-3 draft, trained for this table on 1,024 answers only; "vanilla" is a draft model of two layers.
[Compiled and packed](docs/compilation.md#on-a-cpu): graphs that read packed weights.
[Seconds of target and draft](docs/benchmarking.md#next-to-other-engines)."""
GPU = """\
On a GPU, greedy chains of five in bfloat16. The target is the demo target with weights of zero added, until it costs
what a model of 1 B or 8 B costs. So acceptance is the demo family's. A cell is a multiple of plain `generate` of the
same kind, eager or with CUDA graphs. For plain it is tokens a second. Seconds of target + draft + rest follow.
[All that was measured](docs/gpu.md), and the command."""


@dataclass(frozen=True)
class Table:
    """A raw file or a folder of some, how its content becomes Markdown, and the command that measures it again."""

    write: Callable[[Any], str]
    command: str
    file: Path


def made_from(content: dict[str, Any]) -> str:
    """Say on which machine, at which commit and with which versions a raw file was measured."""
    made = content["made_from"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "transformers", "hf_spec"))
    commit = made["commit"][:12] + " with changes" * made["commit"].endswith("+changes")
    return f"{made['processor']} ({made['capability']}), commit {commit}, {versions}.\n"


def step_costs(content: dict[str, Any]) -> str:
    """Write one table for each curve."""
    dtypes = [name for name in content if name != "made_from"]
    lines = [made_from(content)]
    for curve, title in CURVES.items():
        rows = [(dtype, nodes, points) for dtype in dtypes for nodes, points in content[dtype].get(curve, {}).items()]
        if not rows:
            continue
        values = list(rows[0][2])
        lines.append(f"| {title} | {' | '.join(f'{int(one):,}' for one in values)} |\n|---|{'---|' * len(values)}")
        for dtype, nodes, points in rows:
            label = dtype if curve == "nodes" else f"{dtype}, {NODES.get(nodes, f'{nodes} nodes')}"
            lines.append(f"| {label} | {' | '.join(f'{points[one]:.2f}' for one in values)} |")
        lines.append("")
    return "\n".join(lines)


def drafts(content: dict[str, Any], columns: tuple[str, ...]) -> str:
    """Write the ``columns`` of compare_demo_drafts.py whose names begin so."""
    rows = content["drafts"].items()
    kept = {name: {what: one for what, one in found.items() if what.startswith(columns)} for name, found in rows}
    return f"{made_from(content)}\n{compare_demo_drafts.table(kept)}\n"


def positions(content: dict[str, Any]) -> str:
    """Write the acceptance by position of compare_demo_drafts.py."""
    return compare_demo_drafts.positions_table(content["drafts"])


def below_its_machine(table: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Return a writer of the ``table`` of a script, below the line that says what it was made from."""
    return lambda content: f"{made_from(content)}\n{table(content)}\n"


def compiled(content: dict[str, Any]) -> str:
    """Write the tables of compiled_speed.py."""
    return f"{made_from(content)}\n" + "\n".join(map(compiled_speed.written, content["tables"])) + "\n"


def gpu(content: dict[str, Any]) -> str:
    """Write all tables of ``hf_spec.bench.gpu``. Errors: a ValueError for a trial."""
    if content["environment"]["tiny"]:
        raise ValueError("figures of --tiny mean nothing, and stand on no page")
    short = gpu_page.summary(content)
    return f"{gpu_page.made_from(content)}\n\n## Decoding in short\n\n{short}\n\n{gpu_page.tables(content)}"


def gpu_short(content: dict[str, Any]) -> str:
    """Write README's table of the same file."""
    gpu(content)
    table = gpu_page.summary(content, (1, 8), ("eager", "CUDA graphs"))
    return f"{GPU}\n\n{table}\n\n{gpu_page.made_from(content)}\n"


def next_to_engines(contents: list[dict[str, Any]]) -> str:
    """Write raw files of engine_speed.py as one table, and name what could not be measured."""
    errors = {title for content in contents for title in content["errors"]}
    left = f"\nNot measured: {'; '.join(sorted(map(engine_speed.named, errors)))}.\n" if errors else ""
    return f"{made_from_all(contents)}\n{engine_speed.summary(contents)}{left}"


def next_to_engines_short(contents: list[dict[str, Any]]) -> str:
    """Write README's table of the same files."""
    return f"{ENGINES}\n\n{engine_speed.summary(contents, with_parts=False)}\n{made_from_all(contents)}"


def made_from_all(contents: list[dict[str, Any]]) -> str:
    """Say what several raw files were made from, each way once."""
    return "".join(dict.fromkeys(map(made_from, contents)))


def default_file(name: str, *options: str) -> Table:
    """Return a table of default_speed.py with ``options``."""
    file = RESULTS / f"{name}.json"
    command = " ".join(["default_speed.py --json", f"results/{file.name}", *options])
    return Table(below_its_machine(default_speed.table), command, file)


def script_file(
    table: Callable[[dict[str, Any]], str], script: str, name: str, *options: str, option: str = "--json"
) -> Table:
    """Return the ``table`` of a script that writes a raw file of that name."""
    command = " ".join([f"{script}.py", option, f"results/{name}.json", *options])
    return Table(table, command, RESULTS / f"{name}.json")


def family_file(write: Callable[[dict[str, Any]], str], name: str, *options: str) -> Table:
    """Return a table of compare_demo_drafts.py; ``WORK`` is what prepare_demo_corpus.py made."""
    return script_file(write, "compare_demo_drafts", name, "--stories WORK/validation.jsonl", *options, option="--raw")


def compiled_file(draft: str, *options: str) -> Table:
    """Return a table of compiled_speed.py with a draft of the family."""
    file = RESULTS / f"compiled-{draft}.json"
    given = ["compiled_speed.py --json", f"results/{file.name}", "--draft", draft, *options]
    return Table(compiled, " ".join(given), file)


def engines_folder(write: Callable[[list[dict[str, Any]]], str]) -> Table:
    """Return a table of engine_speed.py's comparison with other engines."""
    models = "--model SMOLLM2 --draft eagle3=EAGLE3 vanilla=VANILLA --texts SPEC_BENCH"
    command = f"engine_speed.py --out results/next-to-engines {models}"
    given = "--cores 2 --prompts short --new-tokens 48 --turns 2 --vllm VLLM/bin/python --llama-cpp LLAMA/bin/python"
    left_out = (
        "compiled: (prompt|assisted|hf_spec, [ev])|compiled and packed: hf_spec, v|(plain|packed): hf_spec, v.*tree"
    )
    only = f"--only '^(?!{left_out}|plain: hf_spec, eagle3, tree)'"
    return Table(write, f"{command} {given} {only}", RESULTS / "next-to-engines")


def gpu_file(write: Callable[[dict[str, Any]], str]) -> Table:
    """Return a table of the command for a GPU."""
    command = "-m hf_spec.bench.gpu --out gpu && cp gpu/results.json results/gpu.json"
    return Table(write, command, RESULTS / "gpu.json")


TABLES = {
    "engines": Table(
        compare.table,
        "engines/compare.py --work engines/results --vllm VLLM/bin/python --serve",
        HERE / "engines" / "results" / "engines.json",
    ),
    "step-costs": Table(
        step_costs,
        "step_costs.py --steps 6 --most 4096 --json results/step-costs.json --png ../docs/step-costs.png",
        RESULTS / "step-costs.json",
    ),
    "invariant-cost": Table(
        lambda content: made_from(content) + "\n" + invariant_cost.table(content),
        "invariant_cost.py --dtypes bfloat16 float32 --json results/invariant-cost.json",
        RESULTS / "invariant-cost.json",
    ),
    "invariant-cost-1b": Table(
        lambda content: made_from(content) + "\n" + invariant_cost.table(content),
        "invariant_cost.py --shape llama-1b --dtypes bfloat16 --rounds 6 --json results/invariant-cost-1b.json",
        RESULTS / "invariant-cost-1b.json",
    ),
    "exact-answers": script_file(
        below_its_machine(exact_answers.table),
        "exact_answers",
        "exact-answers",
        "--new-tokens 24 --packed --outside 48 SMOLLM2 SPEC_BENCH",
    ),
    "next-to-engines": engines_folder(next_to_engines),
    "next-to-engines-short": engines_folder(next_to_engines_short),
    "next-to-engines-1b": Table(
        next_to_engines,
        "engine_speed.py --out results/next-to-engines-1b --model 1.1b --dtype bfloat16 float32 --cores 1 2 "
        "--batch 1 --prompts short --number 4 --new-tokens 24 --vllm VLLM/bin/python --vllm-batched-tokens 128 "
        "--only '^(plain: plain|packed: plain|packed: hf_spec, n-grams|vLLM: plain)$'",
        RESULTS / "next-to-engines-1b",
    ),
    "next-to-engines-avx2": Table(
        next_to_engines,
        "engine_speed.py --out results/next-to-engines-avx2 --model SMOLLM2 --texts SPEC_BENCH --dtype float32 "
        "--cores 2 --batch 1 --prompts short --new-tokens 48 --vllm VLLM/bin/python --llama-cpp LLAMA/bin/python "
        "--only '^((plain|packed|compiled and packed): plain|packed: hf_spec, n-grams|compiled and packed: hf_spec, "
        "n-grams|vLLM: (plain|n-grams)|llama.cpp: (plain|lookup))$'",
        RESULTS / "next-to-engines-avx2",
    ),
    "defaults": default_file("defaults", "--rounds 7"),
    "defaults-processors": default_file("defaults-processors", "--rounds 5 --processors"),
    "defaults-packed": default_file("defaults-packed", "--rounds 5 --packed --cores 2"),
    "defaults-300m": default_file(
        "defaults-300m",
        "--rounds 2 --packed --size 1152 4608 16 --batch 1 --new-tokens 64 --assisted 3 5 8",
    ),
    "compiled-mtp": compiled_file("mtp", "--rounds 3 --tokens 64 --draft-length 7 3"),
    "compiled-vanilla": compiled_file("vanilla", "--rounds 3 --tokens 64 --draft-length 5 3"),
    "history": script_file(below_its_machine(history.table), "history", "history", "--max-new-tokens 64"),
    "history-costs": script_file(below_its_machine(history.costs_table), "history", "history-costs", "--only-costs"),
    "other-tokenizer": script_file(
        below_its_machine(other_tokenizer.table),
        "other_tokenizer",
        "other-tokenizer",
        "--dtype float32 ../hf_spec/demo/target STORIES260K",
    ),
    "early-exits": script_file(below_its_machine(early_exits.table), "early_exits", "early-exits"),
    "family-drafts": family_file(lambda raw: drafts(raw, ("chains", "trees")), "family-drafts", FAMILY),
    "family-positions": family_file(positions, "family-drafts", FAMILY),
    "demo-drafts": family_file(
        lambda raw: drafts(raw, ("chains", "trees")), "demo-drafts", "--tree-tokens 16 32 64", SHORT
    ),
    "demo-drafts-speed": family_file(
        lambda raw: drafts(raw, ("operators", "products", "ms")), "demo-drafts-speed", "--only-speed", SHORT
    ),
    "ablations": script_file(
        below_its_machine(ablations.table),
        "ablations",
        "ablations",
        "--data WORK/stories.jsonl --held-out WORK/validation.jsonl --output ABLATIONS",
    ),
    "training-speed": script_file(
        below_its_machine(training_speed.table), "training_speed", "training-speed", "--speculators VENV/bin/python"
    ),
    "batches": script_file(below_its_machine(batch_speed.table), "batch_speed", "batches", SIXTEEN),
    "packed-avx512": script_file(below_its_machine(packed_forwards.table), "packed_forwards", "packed-avx512", FEW),
    "packed-amx": script_file(below_its_machine(packed_forwards.table), "packed_forwards", "packed-amx", FEW),
    "packed": script_file(
        below_its_machine(packed_forwards.table),
        "packed_forwards",
        "packed",
        "--shapes smollm2-135m llama-1b --dtypes float32/bfloat16 --tokens 1 2 4 6 8 16 64 --cores 1 2 "
        "--turns 1 --times 2",
    ),
    "packed-float32": script_file(
        below_its_machine(packed_forwards.table),
        "packed_forwards",
        "packed-float32",
        "--shapes smollm2-135m llama-1b --dtypes float32 --tokens 1 2 4 6 8 16 64 --cores 1 2 --turns 2",
    ),
    "padded": script_file(below_its_machine(padded_prompts.table), "padded_prompts", "padded"),
    "replay": Table(
        below_its_machine(replay.table),
        "../tests/policy/replay.py --json results/replay.json",
        RESULTS / "replay.json",
    ),
    "gpu": gpu_file(gpu),
    "gpu-short": gpu_file(gpu_short),
}


def pages() -> Iterator[Path]:
    """Yield the pages that may have marked tables."""
    yield from [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def renewed(text: str) -> str:
    """Return a page's text with the tables of the raw files that are there. Errors: a KeyError for an unknown name."""

    def replaced(match: re.Match[str]) -> str:
        table = TABLES[match[2]]
        if not table.file.exists():
            return match[0]
        files = sorted(table.file.glob("*.json")) if table.file.is_dir() else [table.file]
        contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        written = table.write(contents if table.file.is_dir() else contents[0])
        return f"{match[1]}\n{written.strip()}\n\n{match[4]}"

    return MARKED.sub(replaced, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="name the pages that differ, and change nothing")
    parser.add_argument("--commands", action="store_true", help="list the commands that measure the tables again")
    args = parser.parse_args()
    if args.commands:
        print("\n".join(dict.fromkeys(f"python {one.command}" for one in TABLES.values())))
        return 0
    differing = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            differing.append(page)
            if not args.check:
                page.write_text(after, encoding="utf-8")
    print("\n".join(f"{page.relative_to(ROOT)} {'differs' if args.check else 'is written'}" for page in differing))
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
