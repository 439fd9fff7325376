"""Every step of examples/real_model, on the demo target: it runs, and goes on after a kill."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import demo
from hf_spec.cli import main
from hf_spec.training.recipe import read_recipe, training_arguments

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/real_model"
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
ASKED = "how many apples are left when nine of the twelve apples in the basket were eaten"


def script(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def write_corpus(folder):
    """Write prompts of three sources: some near the benchmark, some long, some said twice, some not free."""
    folder.mkdir()
    rows = [("dolly", f"Tell me the story of the cat number {i}.") for i in range(30)]
    rows += [("gsm8k_train", f"{ASKED[:-3]} {i}?") for i in range(5)]  # near
    rows += [("math", "x" * 601), ("dolly", rows[0][1]), ("unknown_licence", "Say something free.")]
    rows += [("math", f"What is {i} plus {i}?") for i in range(20)]
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        for source, question in rows:
            said = [("user", question), ("assistant", "Once there was a cat. It slept all day long and was happy.")]
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"source": source, "messages": messages}) + "\n")


@pytest.fixture
def place(tmp_path):
    """A work directory with the demo target in place of the real one, a corpus, and a benchmark."""
    write_corpus(tmp_path / "corpus")
    (tmp_path / "benchmark.jsonl").write_text(json.dumps({"category": "math", "turns": [f"Well, {ASKED}?"]}) + "\n")
    shutil.copytree(demo.path(), tmp_path / "work" / TARGET)
    return tmp_path


def test_prompts_are_free_short_said_once_and_not_near_the_benchmark(place, monkeypatch):
    given = ["--corpus", place / "corpus", "--benchmark", place / "benchmark.jsonl"]
    script("prompts", *given, "--output", place / "all.jsonl", monkeypatch=monkeypatch)
    found = [json.loads(line) for line in (place / "all.jsonl").read_text().splitlines()]
    asked = [one["messages"][0]["content"] for one in found]
    assert {one["source"] for one in found} == {"dolly", "math"}
    assert len(asked) == len(set(asked)) == 50
    assert asked == sorted(asked, key=len)  # fewer than a group
    script("prompts", *given, "--output", place / "again.jsonl", monkeypatch=monkeypatch)
    assert (place / "again.jsonl").read_bytes() == (place / "all.jsonl").read_bytes()


def test_prompts_that_are_answered_already_are_left_out(place, monkeypatch):
    given = ["--corpus", place / "corpus", "--benchmark", place / "benchmark.jsonl"]
    read = {}
    for name, part in {"all": (), "first": ("--number", 20), "rest": ("--skip", 20)}.items():
        script("prompts", *given, "--output", place / f"{name}.jsonl", *map(str, part), monkeypatch=monkeypatch)
        read[name] = set((place / f"{name}.jsonl").read_text().splitlines())
    assert (len(read["all"]), len(read["first"]), len(read["rest"])) == (50, 20, 30)
    assert read["first"] | read["rest"] == read["all"]


def test_more_prompts_begin_with_the_same_ones(place, monkeypatch):
    prompts = runpy.run_path(str(FOLDER / "prompts.py"))
    made = []
    for number in (8, 24):
        pools = {source: [(source, i) for i in range(20)] for source in prompts["SOURCES"]}
        made.append(list(prompts["mixed"](pools, number, prompts["random"].Random(0))))
    assert made[0] == made[1][:8]


@pytest.mark.parametrize(
    "kinds", [["eagle3-more"], ["eagle3-new"], ["eagle3-more", "eagle3"], ["eagle3", "eagle3-new", "eagle3-more"]]
)
def test_further_training_needs_a_draft_to_go_on_from(place, kinds):
    call = ["bash", FOLDER / "make.sh", place / "nothing", place / "corpus", place / "benchmark.jsonl", *kinds]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    last, first = ("eagle3-new", "eagle3-more") if "eagle3-new" in kinds else ("eagle3-more", "eagle3")
    assert (done.returncode, done.stderr) == (1, f"{last} continues from {first}: name {first} before it\n")


@pytest.mark.parametrize("kinds", [["eagle3", "eagle3-more", "eagle3-new"], ["eagle3", "dspark", "eagle3-more"]])
def test_further_training_may_follow_its_draft(place, kinds):
    call = ["bash", FOLDER / "make.sh", place / "nothing", place / "corpus", place / "no-benchmark.jsonl", *kinds]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert "continues from" not in done.stderr and "no-benchmark.jsonl" in done.stderr  # what is missed next


def test_recipes_of_further_training():
    recipe = read_recipe(FOLDER / "eagle3-new.yaml")
    assert (recipe["draft"], recipe["data"]) == ("eagle3-more", "data-new")
    assert training_arguments(recipe["trainer"] | {"use_cpu": True}).output_dir == "eagle3-new"
    recipe = read_recipe(FOLDER / "eagle3-more.yaml")
    assert recipe["draft"] == "eagle3"
    assert training_arguments(recipe["trainer"] | {"use_cpu": True}).lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa", "mtp", "vanilla"])
def test_recipes_are_of_one_mould_and_read(kind):
    recipe = read_recipe(FOLDER / f"{kind}.yaml")
    arguments = training_arguments(recipe["trainer"] | {"use_cpu": True})
    assert (recipe["target"]["name"], recipe["data"], recipe["features"]["directory"]) == (TARGET, "data", "features")
    assert (arguments.output_dir, arguments.target_name) == (kind, TARGET)
    assert recipe["draft"] == "two-layers" if kind == "vanilla" else recipe["draft"]["kind"] == kind


def test_two_layers_are_the_targets_first_and_last(tmp_path, monkeypatch):
    script("two_layers", demo.path(), tmp_path / "small", monkeypatch=monkeypatch)
    small, target = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "small", demo.path()))
    assert len(small.model.layers) == small.config.num_hidden_layers == 2
    for mine, theirs in zip(small.model.layers, (target.model.layers[0], target.model.layers[-1]), strict=True):
        pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
        assert all(one.equal(other.float()) for one, other in pairs)


def commands(place):
    """Return an environment in which ``hf-spec`` and ``python`` are these."""
    bin_ = place / "bin"
    bin_.mkdir()
    (bin_ / "hf-spec").write_text(f'#!/bin/sh\nexec {sys.executable} -m hf_spec "$@"\n')
    (bin_ / "python").symlink_to(sys.executable)
    (bin_ / "hf-spec").chmod(0o755)
    return os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_what_is_measured_are_the_drafts_that_are_there(place):
    """One of them lies in a directory whose name is a word of hf-spec."""
    for kind in ("mtp", "eagle3"):
        shutil.copytree(demo.path(f"draft-{kind}"), place / "work" / kind)
        (place / "work" / kind / "finished").touch()
    call = [
        "bash",
        FOLDER / "measure.sh",
        place / "work",
        place / "benchmark.jsonl",
        place / "results",
        "1",
        "float32",
    ]
    subprocess.run(call, check=True, env=commands(place) | {"THREADS": "1", "MORE": "--warmup 0"})
    (found,) = (place / "results").glob("*-own.json")
    figures = json.loads(found.read_text())["figures"]["overall"]
    methods = ["ngram chain", "history chain", "eagle3 chain", "history+eagle3 chain", "mtp chain"]
    assert [name for name in figures if name.endswith("chain")] == methods
    assert all(figures[name]["mean_accepted_length"] > 1.2 for name in methods[2:])


def test_the_table_of_the_readme_is_measured_under_its_name_and_what_is_there_is_said(place):
    """All tables are there but README's of eight sequences at once, for which eight prompts are taken."""
    results = place / "results"
    results.mkdir()
    there = [f"bfloat16-batch1-temperature{how}" for how in ("0-1-auto", "0-1-own", "0.6-1-auto", "1-1-auto")]
    there += [f"bfloat16-batch8-temperature{how}-8-auto" for how in ("0.6", "1")]
    for name in there:
        (results / f"{name}.json").touch()
    call = ["bash", FOLDER / "measure.sh", place / "work", place / "benchmark.jsonl", results, "1", "bfloat16"]
    more = {"THREADS": "1", "MORE": "--warmup 0 --max-new-tokens 4"}
    done = subprocess.run(call, check=True, env=commands(place) | more, stderr=subprocess.PIPE, text=True)
    (new,) = (path for path in results.iterdir() if path.stem not in there)
    assert new.name == runpy.run_path(str(FOLDER / "page.py"))["README_ROWS"]["greedy, eight sequences at once"]
    assert all(f"{name}.json is there and not measured again" in done.stderr for name in there)


@pytest.mark.slow
def test_one_command_makes_a_draft_and_goes_on_after_a_kill(place):
    pytest.importorskip("tensorboard")
    changes = "--max_steps 6 --save_steps 1 --eval_steps 6 --logging_steps 1 --eval_prompts 2 --eval_max_new_tokens 8"
    inputs = [place / "work", place / "corpus", place / "benchmark.jsonl"]
    call = ["bash", FOLDER / "make.sh", *inputs, "eagle3", "--", *changes.split()]
    environment = commands(place) | {"PROMPTS": "40", "HELD_OUT": "1", "SMOLLM2": ""}
    draft = place / "work/eagle3"
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(call, start_new_session=True, **options) as process:
        for _ in range(3000):
            if (draft / "checkpoint-2").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (draft / "finished").exists()
    answers = (place / "work/answers.jsonl").read_bytes()
    subprocess.run(call, check=True, **options)
    assert (draft / "finished").exists()
    assert (place / "work/answers.jsonl").read_bytes() == answers
    target = AutoModelForCausalLM.from_pretrained(demo.path())
    loaded = hf_spec.AutoDraftModel.from_pretrained(draft)
    ids = torch.arange(5, 15)[None]
    out = target.generate(ids, speculator=loaded, max_new_tokens=12, do_sample=False)
    assert out.equal(target.generate(ids, max_new_tokens=12, do_sample=False))


def write_figures(results, monkeypatch):
    """Measure n-grams on the demo target, as measure.sh would."""
    prompts = results.parent / "prompts.jsonl"
    rows = [{"category": name, "turns": ["Tell me about a cat."]} for name in ("writing", "rag")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    file = results / "float32-batch1-temperature0-1.json"
    options = ["--max-new-tokens", "8", "--warmup", "0", "--json", str(file)]
    assert main(["bench", str(demo.path()), "--draft", "ngram", "history", "--prompts", str(prompts), *options]) == 0
    return json.loads(file.read_text())


def test_the_page_holds_what_was_measured(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results, state = tmp_path / "results", tmp_path / "work/eagle3/checkpoint-4"
    results.mkdir()
    state.mkdir(parents=True)
    history = [
        {"step": step, "num_input_tokens_seen": 1024 * step, "eval_acceptance_length": 1 + step / 10, "secret": "x"}
        for step in (2, 4)
    ]
    (state / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 4, "max_steps": 16}))
    report = write_figures(results, monkeypatch)
    script("page", results, tmp_path / "benchmarks.md", "--work", tmp_path / "work", monkeypatch=monkeypatch)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "| EAGLE-3 | 4,096 | 25% | 1.40 |" in page
    assert (tmp_path / "benchmarks-curves.png").read_bytes().startswith(b"\x89PNG")
    assert "secret" not in (results / "training-eagle3.json").read_text()
    names = {"plain": "plain", "prompt lookup": "prompt lookup", "ngram chain": "n-grams", "history chain": "history"}
    speeds = {names[method]: f"{one['ratio_to_plain']:.2f}" for method, one in report["figures"]["overall"].items()}
    assert len(speeds) == 4 and all(f"| {name} | {speed}" in page for name, speed in speeds.items())
    others = [name for name in speeds if name != "plain"]
    assert f"| x plain | {' | '.join(others)} |" in page
    assert f"length | {' | '.join(speeds[name] for name in others)} |" in page
    assert f"## {report['environment']['dtype'].capitalize()}, greedy, batch size 1" in page
    assert report["environment"]["processor"] in page
    (tmp_path / "work").rename(tmp_path / "gone")
    script("page", results, tmp_path / "again.md", monkeypatch=monkeypatch)
    again = (tmp_path / "again.md").read_text(encoding="utf-8")
    assert again == page  # from the raw figures alone


def test_the_page_and_the_table_of_the_readme_are_made_from_the_raw_figures(tmp_path, monkeypatch):
    """As committed, and after somebody changed a figure by hand."""
    readme = tmp_path / "README.md"
    committed = (ROOT / "README.md").read_text(encoding="utf-8")
    readme.write_text(committed.replace("| **2.25** |", "| **2.26** |"), encoding="utf-8")
    assert readme.read_text(encoding="utf-8") != committed
    given = [FOLDER / "results", tmp_path / "page.md", "--readme", readme]
    script("page", *given, monkeypatch=monkeypatch)
    assert readme.read_text(encoding="utf-8") == committed
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == (ROOT / "docs/benchmarks.md").read_text(
        encoding="utf-8"
    )
