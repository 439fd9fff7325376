"""Write docs/benchmarks.md from raw figures: those of measure.sh, and the logs of training.

    python examples/real_model/page.py RESULTS docs/benchmarks.md [--work WORK] [--readme README.md]

``--work`` names the directory of make.sh. Logs, configs and model cards of its drafts are then copied to RESULTS
first. The page is made from RESULTS alone, so it can be written again without the drafts. It shows RESULTS/note.md,
if there is one. ``--readme`` replaces the table of README by one of the same figures.
"""

import argparse
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

from hf_spec.bench import import_pyplot

KINDS = {
    "eagle3": "EAGLE-3",
    "eagle3-more": "EAGLE-3, trained further",
    "eagle3-new": "EAGLE-3, trained on new answers",
    "dspark": "DSpark",
    "medusa": "Medusa",
    "mtp": "MTP",
    "vanilla": "draft model",
}
NEWEST = "eagle3-new"
FURTHER = {"eagle3-more": "eagle3", "eagle3-new": "eagle3-more"}  # each starts from the weights of the other
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NOTES = {  # of a table, by its file; to be removed when the file is measured again
    "float32-batch1-temperature0-1-auto.json": (
        "Measured with an earlier version that could replace MKL by oneDNN, and "
        "[faster than today's](performance.md#float32-on-a-cpu). "
    ),
}
README_TABLE = re.compile(r"^\| SmolLM2-135M-Instruct, .*\n(?:\|.*\n)+", re.MULTILINE)
README_ROWS = {
    "greedy": "bfloat16-batch1-temperature0-1-auto.json",
    "temperature 1": "bfloat16-batch1-temperature1-1-auto.json",
    "greedy, eight sequences at once": "bfloat16-batch8-temperature0-8-auto.json",
}
README_COLUMNS = {
    "n-grams": "ngram chain",
    "EAGLE-3": f"{NEWEST} chain",
    "history and EAGLE-3": f"history+{NEWEST} chain",
    "transformers' prompt lookup": "prompt lookup",
    "transformers' assisted": "assisted: vanilla chain",
}
LOGGED = ("step", "max_steps", "epoch", "loss", "learning_rate", "num_input_tokens_seen")


def collect(work: Path, results: Path) -> None:
    """Copy logs, configs and model cards of the drafts in ``work`` to ``results``, but no weights."""
    for kind in KINDS:
        states = sorted(work.glob(f"{kind}/checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        if not states:
            continue
        state = json.loads(states[-1].read_text(encoding="utf-8"))
        history = [*state["log_history"], {"step": state["global_step"], "max_steps": state["max_steps"]}]
        kept = [
            {name: value for name, value in line.items() if name in LOGGED or name.startswith("eval_")}
            for line in history
        ]
        lines = ",\n ".join(json.dumps(line) for line in kept)
        (results / f"training-{kind}.json").write_text(f"[{lines}]\n", encoding="utf-8")
        for source, name in (("README.md", f"card-{kind}.md"), ("config.json", f"config-{kind}.json")):
            if (work / kind / source).exists():
                shutil.copyfile(work / kind / source, results / name)


# -- training ---------------------------------------------------------------------------------------------------------


def curves(results: Path, picture: Path) -> str:
    """Draw τ over tokens seen; return a table of each draft's training and acceptance."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    lines = ["| draft | tokens seen | of the training | τ, held-out prompts | token 1 | 2 | 3 | 4 | 5 |"]
    lines.append(f"|{'---|' * 9}")
    ends: dict[str, int] = {}  # tokens seen
    for kind, name in KINDS.items():
        if not (file := results / f"training-{kind}.json").exists():
            continue
        history = json.loads(file.read_text(encoding="utf-8"))
        measured = [line for line in history if "eval_acceptance_length" in line]
        if not measured:
            continue
        before = ends.get(FURTHER.get(kind, ""), 0)
        seen = [before + line["num_input_tokens_seen"] for line in measured]
        ends[kind] = seen[-1]
        axes.plot(seen, [line["eval_acceptance_length"] for line in measured], marker="o", label=name)
        last = measured[-1]
        shares = [1.0, *(last.get(f"eval_acceptance_{k}") for k in range(1, 6))]  # of the first k draft tokens
        cells = " | ".join(f"{share / before:.2f}" if share else "-" for before, share in itertools.pairwise(shares))
        whole = next((line["max_steps"] for line in history if "max_steps" in line), last["step"])
        done = f"{last['step'] / whole:.0%}"
        lines.append(f"| {name} | {seen[-1]:,} | {done} | {last['eval_acceptance_length']:.2f} | {cells} |")
    axes.set(xlabel="tokens seen", ylabel="τ, greedy chains of five, held-out prompts")
    if axes.lines:
        axes.legend()
        figure.savefig(picture, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return "\n".join(lines) if len(lines) > 2 else ""


# -- measurements -----------------------------------------------------------------------------------------------------


def between(figure: float | None, spread: list[float] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.2f}" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread and spread[0] != spread[1] else "")


def overall(report: dict[str, Any]) -> str:
    has_parts = "target_seconds" in report["figures"]["overall"]["plain"]  # reports before them have a share alone
    times = "seconds of target, draft, rest" if has_parts else "outside the models"
    lines = [f"| | x plain | τ | accepted by position, % | {times} | differ |", f"|{'---|' * 6}"]
    for method, one in report["figures"]["overall"].items():
        shares = " ".join(f"{100 * share:.0f}" for share in (one["acceptance_by_position"] or [])[:8])
        differ = "" if one["differing_rows"] is None else f"{one['differing_rows']} of {one['rows']}"
        speed = between(one["ratio_to_plain"], one["ratio_to_plain_spread"])
        tau = between(one["mean_accepted_length"], one["mean_accepted_length_spread"])
        took = f"{one['outside_forwards']:.0%}"
        if has_parts:
            took = ", ".join(f"{one[f'{part}_seconds']:.1f}" for part in ("target", "draft", "rest"))
        lines.append(f"| {label(method)} | {speed} | {tau} | {shares} | {took} | {differ} |")
    return "\n".join(lines)


def by_category(report: dict[str, Any]) -> str:
    """Tabulate speed and τ of every method by category."""
    categories = [name for name in report["figures"] if name != "overall"]
    lines = [f"| | {' | '.join(categories)} |", f"|{'---|' * (1 + len(categories))}"]
    for method in report["figures"]["overall"]:
        cells = []
        for category in categories:
            one = report["figures"][category][method]
            tau = one["mean_accepted_length"]
            cells.append(f"{one['ratio_to_plain']:.2f}" + ("" if tau is None else f" / {tau:.2f}"))
        lines.append(f"| {label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(report: dict[str, Any]) -> str:
    settings, made = report["settings"], report["environment"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    lengths = {one["num_speculative_tokens"] for one in settings["contenders"].values() if one}
    length = "adaptive draft length" if lengths == {"auto"} else "fixed draft length"
    chats = any(name in CHAT for name in report["figures"])
    parts = [made["dtype"].capitalize(), how, f"batch size {settings['batch_size']}", length]
    compiled = "plain, compiled" in report["figures"]["overall"]
    return ", ".join(parts + ["other tasks"] * (not chats) + ["with plain compiled"] * compiled)


def label(method: str) -> str:
    """Return the readable name of a method; a chain is the default shape and not mentioned."""
    name = method.removesuffix(" chain")
    for kind in reversed(KINDS):  # the longer names first
        name = name.replace(kind, "EAGLE-3" if kind == NEWEST else KINDS[kind])
    return name.replace("ngram", "n-grams").replace("memory", "history").replace("+", " and ")


def summary(reports: list[dict[str, Any]]) -> str:
    """Tabulate the speed of every method in every report."""
    methods = list(dict.fromkeys(method for report in reports for method in report["figures"]["overall"]))
    methods.remove("plain")
    lines = [f"| x plain | {' | '.join(label(method) for method in methods)} |", f"|{'---|' * (1 + len(methods))}"]
    for report in reports:
        found = report["figures"]["overall"]
        speeds = {method: one["ratio_to_plain"] for method, one in found.items() if method != "plain"}
        cells = [f"{speeds[method]:.2f}" if method in speeds else "-" for method in methods]
        lines.append(f"| {headline(report)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(report: dict[str, Any]) -> str:
    made = report["environment"]
    return (
        f"{made['processor']}, {made['threads']} of {made['cores']} cores, device {made['device']}; Python "
        f"{made['python']}, torch {made['torch']}, transformers {made['transformers']}, hf_spec {made['hf_spec']}"
    )


def conversations(report: dict[str, Any]) -> str:
    """Return each method's τ over the categories of MT-bench, weighted by rows, if the report has others too."""
    there = [name for name in CHAT if name in report["figures"]]
    found: list[str] = []
    if len(there) == len(report["figures"]) - 1:
        return ""
    for method, one in report["figures"]["overall"].items():
        if one["mean_accepted_length"] is None or not there:
            continue
        parts = [report["figures"][name][method] for name in there]
        # A row's tokens over its steps: steps = tokens / τ.
        steps = sum(part["tokens"] / part["mean_accepted_length"] for part in parts)
        found.append(f"{label(method)} {sum(part['tokens'] for part in parts) / steps:.2f}")
    return f"τ over the conversation categories alone: {', '.join(found)}.\n\n" if found else ""


PAGE = """# Benchmarks of a real model

This page shows the speed of all drafts on a real chat model, SmolLM2-135M-Instruct, on a CPU. Its figures come from
scripts alone, and these commands make them again:

```sh
cd examples/real_model
# prompts, the target's answers, features, drafts
./make.sh ~/smollm2 CORPUS spec_bench.jsonl eagle3 eagle3-more eagle3-new dspark medusa mtp vanilla
./measure.sh ~/smollm2 spec_bench.jsonl results 1 # use a machine that does nothing else
python page.py results ../../docs/benchmarks.md --work ~/smollm2 --readme ../../README.md
```

After an interruption, `make.sh` and `measure.sh` continue where they stopped. `measure.sh` leaves out the tables whose
files are in `examples/real_model/results`: remove a file to measure its table again. `page.py` writes this page and
the table of README from the raw figures there.

How to read the tables:

- Every table is one run, in which each prompt goes through all methods before the next one comes
  ([how it is measured](benchmarking.md#how-it-is-measured)).
- **x plain** is the speed, divided by that of plain `generate`.
- **τ** is the number of tokens per step and sequence.
- **Brackets** hold the range of nine in ten figures when the prompts are resampled.
- **Accepted by position** is how often draft token k was accepted, with all before it, in the steps that drafted that
  many.
- **Assisted** and **prompt lookup** are those of transformers. **Assisted** uses our draft model.
- **n-grams** look in the text itself, **history** looks in earlier answers, too.
- The **draft model** has two layers, and was distilled.
"""


def page(results: Path, target: Path) -> str:
    note = results / "note.md"
    sections = [PAGE, *([note.read_text(encoding="utf-8")] if note.exists() else [])]
    picture = target.with_name("benchmarks-curves.png")
    if table := curves(results, picture):
        sections.append(
            "## Training\n\n"
            "All drafts begin with the same examples of 512 tokens. τ is measured by `generate` in chains of five. "
            "*Token k* is how often draft token k was accepted where all before it were.\n\n"
            "- *Trained further* continues that EAGLE-3 draft over more answers, one and a half times. The learning "
            "rate falls twice: linearly in the first round of this run, by a cosine in the recipe.\n"
            "- *Trained on new answers* continues from there. It reads the answers to new prompts, which no draft had "
            "read, once. The tables below measure this draft.\n"
            "- The held-out prompts differ between the three parts: compare τ within a part only. A third of those of "
            "the second part had been read in the first one.\n\n"
            f"![τ over tokens seen]({picture.name})\n\n{table}\n"
        )
    reports = [
        (path, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(results.glob("*-batch*.json"), key=lambda path: path.stem)
    ]
    if reports:
        sections.append(f"## All tables in one\n\n{summary([report for _, report in reports])}\n")
    for path, report in reports:
        sections.append(
            f"## {headline(report)}\n\n{machine(report)}. "
            f"{report['figures']['overall']['plain']['rows']} answers of up to {report['settings']['max_new_tokens']} "
            f"tokens. {NOTES.get(path.name, '')}Raw figures: `{path.name}`.\n\n{overall(report)}\n\n"
            f"{conversations(report)}x plain / τ by category:\n\n{by_category(report)}\n"
        )
    if not reports:
        sections.append("No tables yet: `measure.sh` has not been run.\n")
    return "\n".join(sections)


def readme_table(results: Path) -> str:
    """Return README's table; the best of a row is bold."""
    columns = " | ".join(README_COLUMNS)
    lines = [f"| SmolLM2-135M-Instruct, bfloat16 | {columns} |", f"|{'---|' * (1 + len(README_COLUMNS))}"]
    for row, file in README_ROWS.items():
        found = json.loads((results / file).read_text(encoding="utf-8"))["figures"]["overall"]
        found |= {name.replace("memory+", "history+"): one for name, one in found.items()}  # names of older files
        ratios = [found[method]["ratio_to_plain"] if method in found else None for method in README_COLUMNS.values()]
        best = max(ratio for ratio in ratios if ratio is not None)
        cells = [
            "not possible" if ratio is None else f"**{ratio:.2f}**" if ratio == best else f"{ratio:.2f}"
            for ratio in ratios
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="directory of raw figures")
    parser.add_argument("page", type=Path, help="file to write; the picture goes next to it")
    parser.add_argument("--work", type=Path, help="directory of make.sh, to copy from")
    parser.add_argument("--readme", type=Path, help="README whose table is to be replaced")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    if args.work:
        collect(args.work, args.results)
    args.page.write_text(page(args.results, args.page), encoding="utf-8")
    if args.readme:
        text = args.readme.read_text(encoding="utf-8")
        args.readme.write_text(README_TABLE.sub(lambda _: readme_table(args.results), text), encoding="utf-8")


if __name__ == "__main__":
    main()
