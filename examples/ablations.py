"""Measure which parts of EAGLE-3 training matter, at the scale of the demo target; docs/training.md shows the results.

    python examples/ablations.py --data WORK/stories.jsonl --held-out WORK/validation.jsonl --output ablations
    python examples/ablations.py --output ablations --plot

Both files are those of prepare_demo_corpus.py, or others with a `text` in each line. Every arm trains a draft from
scratch on the same text in the same order, with the changes in ARMS. It then drafts for the same held-out stories.
Finished arms are not trained again, and all arms in a folder have the same data, epochs and seed. An arm takes about
ten minutes on one core of a recent server processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import file_digest, machine  # the folder is no package

from hf_spec import demo
from hf_spec.bench import import_pyplot
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft, prepare_dataset
from hf_spec.whole_files import write_files

LENGTH = 7  # draft tokens of the measurement, however a draft was trained
# `share` of the text, read once; `layers` of the target that the draft reads; the rest are DraftTrainingArguments.
ARMS: dict[str, dict[str, Any]] = {
    "seven steps": {},
    "one step": {"unroll_steps": 1},
    "feature loss": {"feature_loss_weight": 1.0},
    "top feature": {"layers": [10]},
    "frozen head": {"freeze_lm_head": True},
    "eighth": {"share": 1 / 8},
    "quarter": {"share": 1 / 4},
    "all": {"share": 1.0},
}


def run(name: str, options: argparse.Namespace) -> None:
    """Train and measure one arm; write its draft and `result.json`."""
    change = dict(ARMS[name])
    share, layers = change.pop("share", 0.5), change.pop("layers", None)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    data, held_out = (
        prepare_dataset(str(path), tokenizer, max_length=256, packing=packing)
        for path, packing in ((options.data, True), (options.held_out, False))
    )
    data = data.shuffle(seed=options.seed)

    torch.manual_seed(options.seed)
    config = Eagle3SpeculatorConfig.for_target(target.config, eagle_aux_hidden_state_layer_ids=layers)
    draft = new_draft(config, target)
    directory = options.output / name.replace(" ", "-")
    common = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 8,
        "eval_prompts": 64,
        "eval_max_new_tokens": 96,
        "eval_speculative_tokens": LENGTH,
        "eval_temperature": 1.0,
        "seed": options.seed,
        "report_to": [],
    }
    recipe = {
        "num_train_epochs": options.epochs,
        "muon_learning_rate": 42e-3,
        "learning_rate": 6e-3,
        "weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "warmup_steps": 0.1,
        "logging_steps": 20,
        "save_strategy": "no",
        **change,
    }
    trainer = DraftTrainer(
        draft,
        target,
        DraftTrainingArguments(**common, **recipe),
        train_dataset=data.select(range(int(share * len(data)))),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    judge = DraftTrainer(draft, target, DraftTrainingArguments(unroll_steps=LENGTH, **common), eval_dataset=held_out)
    result = {"name": name, "settings": settings_of(options), "steps": trainer.state.global_step, **judge.evaluate()}
    write_files({"result.json": json.dumps(result, indent=1)}, directory)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what all arms of a folder share."""
    digests = {"data": file_digest(options.data), "held_out": file_digest(options.held_out)}
    return {"epochs": options.epochs, "seed": options.seed} | digests


def finished(name: str, options: argparse.Namespace) -> bool:
    """Tell whether an arm was measured. Errors: a SystemExit if that was with other settings."""
    file = options.output / name.replace(" ", "-") / "result.json"
    if not file.exists():
        return False
    before, now = json.loads(file.read_text(encoding="utf-8")).get("settings", {}), settings_of(options)
    if other := [one for one in now if before.get(one) != now[one]]:
        raise SystemExit(f"{file} was measured with other {', '.join(other)}; name another folder")
    return True


def curve(result: dict[str, Any]) -> list[float]:
    """Return the acceptance of draft token k if those before it were accepted, for all positions that chains reach."""
    reached = [1.0, *(result[f"eval_acceptance_{k}"] for k in range(1, LENGTH + 1))]
    return [after / before for before, after in pairwise(reached) if before > 0.01]


def table(content: dict[str, Any]) -> str:
    """Write the arms of a raw file as Markdown."""
    lines = ["| | steps | τ, greedy | τ, temperature 1 | token 1 | 2 | 3 | 5 | 7 |", "|" + "---|" * 9]
    for name, result in content["arms"].items():
        lengths = [result[f"eval_{kind}acceptance_length"] for kind in ("", "sampled_")]
        accepted = dict(enumerate(curve(result), start=1))
        late = (f"{accepted[k]:.2f}" if k in accepted else "-" for k in (1, 2, 3, 5, 7))
        lines.append(f"| {' | '.join([name, str(result['steps']), *(f'{one:.2f}' for one in lengths), *late])} |")
    return "\n".join(lines)


def report(output: Path, raw: Path | None) -> dict[str, dict[str, Any]]:
    """Print a table of all arms that are done, and write the raw file."""
    found = [json.loads(path.read_text()) for path in sorted(output.glob("*/result.json"))]
    results = {result["name"]: result for result in found}
    content = {"made_from": machine() | {"argv": sys.argv[1:]}}
    content["arms"] = {name: results[name] for name in ARMS if name in results}
    print(table(content))
    if raw:
        write_files({raw.name: json.dumps(content, indent=1) + "\n"}, raw.absolute().parent)
    return results


def plot(results: dict[str, dict[str, Any]], output: Path) -> None:
    """Draw acceptance over the steps of a chain, what each change does to tau, and tau over the amount of data."""
    pyplot = import_pyplot()
    length = {name: result["eval_acceptance_length"] for name, result in results.items()}
    pyplot.rcParams["font.size"] = 8
    figure, (steps, changes, growth) = pyplot.subplots(1, 3, figsize=(9, 2.5), layout="constrained")
    for name in filter(results.__contains__, ("seven steps", "one step")):
        accepted = curve(results[name])
        steps.plot(range(1, len(accepted) + 1), accepted, marker="o", markersize=3, label=f"trained in {name}")
    steps.set(
        xlabel="draft token k", ylabel="accepted, if those before were", ylim=(0, 0.8), xticks=range(1, LENGTH + 1)
    )
    steps.legend()

    bars = sorted((name for name in results if "share" not in ARMS.get(name, {})), key=lambda name: length[name])
    shown = changes.barh(bars, [length[name] for name in bars], height=0.6)
    changes.bar_label(shown, fmt="%.2f", padding=2)
    changes.set(xlabel="τ, greedy chains of seven", xlim=(1, 1.1 * max(length.values())))

    shares = {"eighth": 1 / 8, "quarter": 1 / 4, "seven steps": 1 / 2, "all": 1.0}
    done = {share: length[name] for name, share in shares.items() if name in results}
    growth.plot(list(done), list(done.values()), marker="o", markersize=3)
    growth.set(xlabel="share of the stories, each read once", ylabel="τ, greedy chains of seven", xscale="log")
    growth.set_xticks(list(done), [f"{share:g}" for share in done])
    growth.minorticks_off()
    figure.savefig(output / "ablations.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="only draw what is there")
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures of all arms")
    options = parser.parse_args()
    import_pyplot()  # what is missing is said before anything is trained
    if not options.plot:
        if None in (options.data, options.held_out):
            parser.error("training needs --data and --held-out; --plot draws what --output has")
        for name in [one for one in options.arms if not finished(one, options)]:
            run(name, options)
    if not any(options.output.glob("*/result.json")):
        parser.error(f"no arm has been measured in {options.output}")
    plot(report(options.output, options.json), options.output)


if __name__ == "__main__":
    main()
