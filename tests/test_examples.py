"""The scripts that users copy run from beginning to end."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
import wave
from argparse import Namespace
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import speech
import torch
from datasets import Dataset
from nbclient import NotebookClient
from test_exactness import noisy_copy
from test_translated import draft
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)

import hf_spec
from hf_spec import demo
from hf_spec.display import ACCEPTED_STYLE

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["generate", "json_grammar", "own_speculator"])
def test_a_text_is_written_with_guesses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "json_grammar":
        pytest.importorskip("xgrammar")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    lengths = re.findall(r"mean accepted length +([0-9.]+)", capsys.readouterr().out)
    assert lengths and all(float(length) > 1 for length in lengths)


@pytest.mark.parametrize("count", [None, "auto", 2])
def test_a_speculator_of_ones_own_guesses_as_deep_as_it_is_asked(count: Any) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_speculator.py"))
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    speculator = names["PhraseSpeculator"](tokenizer(names["PHRASES"], add_special_tokens=False)["input_ids"])
    call = {**tokenizer("Once upon", return_tensors="pt"), "max_new_tokens": 20, "do_sample": False}
    call |= {"return_dict_in_generate": True}
    out = target.generate(**call, speculator=speculator, num_speculative_tokens=count)
    assert torch.equal(out.sequences, target.generate(**call).sequences)
    assert out.speculation.accepted > 0
    assert count != 2 or len(out.speculation.counts.proposed_at) == 2


def test_a_history_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "history.json"
    script, few = str(ROOT / "examples" / "history.py"), ["--limit", "3", "--max-new-tokens", "16"]
    options = [*few, "--sets", "stories", "--ways", "n-gram", "history", "hybrid"]
    monkeypatch.setattr("sys.argv", [script, *options, "--json", str(file)])
    runpy.run_path(script, run_name="__main__")
    report = json.loads(file.read_text(encoding="utf-8"))
    lengths = [report["stories"][way]["mean_accepted_length"] for way in ("n-gram", "history", "hybrid")]
    assert lengths == sorted(lengths)
    assert report["costs"]["bytes per token"] < 110
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [script, "--only-costs"])
    runpy.run_path(script, run_name="__main__")
    assert re.search(r"^\| bytes per token \| \d+ \|$", capsys.readouterr().out, re.M)
    monkeypatch.setattr("sys.argv", [script, *few, "--write-texts", str(file), "--sets", "stories", "chat"])
    runpy.run_path(script, run_name="__main__")
    assert list(json.loads(file.read_text(encoding="utf-8"))) == ["stories", "chat"]
    again = ["--texts", str(file), "--sets", "stories", "--json", str(tmp_path / "again.json")]
    monkeypatch.setattr("sys.argv", [script, *again])
    runpy.run_path(script, run_name="__main__")
    assert {"made_from", "stories"} == json.loads((tmp_path / "again.json").read_text(encoding="utf-8")).keys()
    (told,) = capsys.readouterr().out.splitlines()
    replayed = dict(re.findall(r"(n-gram|history) ([0-9.]+) \(", told))
    assert [float(replayed[way]) for way in ("n-gram", "history")] == [round(length, 2) for length in lengths[:2]]


def test_sets_of_a_history_have_the_prompts_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where texts are written, and where a set has none that is short enough."""
    file, script = tmp_path / "texts.json", str(ROOT / "examples" / "history.py")
    few = ["--limit", "2", "--max-new-tokens", "4", "--max-length", "80"]
    monkeypatch.setattr("sys.argv", [script, *few, "--sets", "edits", "chat", "--write-texts", str(file)])
    runpy.run_path(script, run_name="__main__")
    assert [*json.loads(file.read_text(encoding="utf-8"))] == ["chat"]
    assert "edits: 2 prompts exceed --max-length" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [script, *few, "--sets", "edits", "chat", "--ways", "n-gram"])
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.startswith("chat: tokens (draft tokens) per step: n-gram ")
    monkeypatch.setattr("sys.argv", [script, "--sets", "chats"])
    with pytest.raises(SystemExit, match="there is no set chats, but edits, rewrites, chat, stories"):
        runpy.run_path(script, run_name="__main__")


def test_drafts_with_another_tokenizer_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in draft():
        part.save_pretrained(tmp_path / "draft")
    (tmp_path / "prompts").write_text("Once upon a time, there was a\n", encoding="utf-8")
    script, options = str(ROOT / "examples" / "other_tokenizer.py"), ["--tokens", "16", "--dtype", "float32"]
    places = [str(demo.path()), str(tmp_path / "draft")]
    monkeypatch.setattr("sys.argv", [script, *places, *options, "--prompts", str(tmp_path / "prompts")])
    runpy.run_path(script, run_name="__main__")
    told = capsys.readouterr().out
    rates = {(how, name): float(rate) for how, name, rate in re.findall(r"(greedy|sampled) +(\S+) +([0-9.]+)", told)}
    assert {*rates} >= {(how, name) for how in ("greedy", "sampled") for name in ("plain", "hf_spec")}
    assert rates["greedy", "plain"] == 1 and rates["greedy", "hf_spec"] > 1.2 and rates["sampled", "hf_spec"] > 1
    assert re.search(r"greedy +hf_spec .* 1 of 1 texts as plain", told)


def test_recordings_are_transcribed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short one, and two of several windows, of other widths and rates; by a draft with an encoder and by none."""
    speech.save(target := speech.whisper(), tmp_path / "whisper")
    noisy_copy(target, seed=0, noise=0.05).save_pretrained(tmp_path / "draft")
    files = []
    for name, seconds, rate, width in (("short", 0.7, 16000, 2), ("long", 2.5, 22050, 3), ("thin", 1.3, 8000, 1)):
        files.append(str(tmp_path / f"{name}.wav"))
        sound = np.repeat(speech.wave(seconds * rate / 16000)[:, None], 2, axis=1)  # two channels
        with wave.open(files[-1], "wb") as file:
            file.setparams((2, width, rate, len(sound), "NONE", ""))
            whole = (
                (sound * 2 ** (8 * width - 1)).clip(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1).astype("<i4")
            )
            raw = whole.reshape(-1, 1).view(np.uint8)[:, :width]
            file.writeframes((raw + np.uint8(128) if width == 1 else raw).tobytes())
    transcribe = runpy.run_path(str(ROOT / "examples" / "transcribe.py"))
    short, rate = transcribe["read_wave"](files[0])
    assert rate == 16000 and np.allclose(short[:, 0], speech.wave(0.7), atol=1e-4)
    samples = [len(transcribe["read"](file, 16000)) for file in files]
    assert [round(count / 16000, 2) for count in samples] == [0.7, 2.5, 1.3]
    common = ["--model", str(tmp_path / "whisper"), "--device", "cpu", "--max-new-tokens", "16"]
    for given, name in ((files[:1], "ngram"), (files[1:], str(tmp_path / "draft"))):
        transcribe["main"]([*given, *common, "--draft", name])
        out = capsys.readouterr().out
        assert all(f"{file}: " in out for file in given) and "same text as plain      yes" in out
        plain, fewer = re.findall(r"decoder (\d+) plain, (\d+)", out)[0]
        assert int(fewer) < int(plain)
    with pytest.raises(SystemExit, match="2"):
        transcribe["main"]([str(tmp_path / "missing.wav"), *common])
    assert "no such file: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "soundfile", None)
    (empty := tmp_path / "empty.wav").touch()
    with pytest.raises(SystemExit, match=r"empty\.wav is no plain WAV file; pip install soundfile"):
        transcribe["read"](str(empty), 16000)


def test_arms_of_an_ablation_have_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is drawn, and taken only where data, epochs and seed are those of the call."""
    script, files = str(ROOT / "examples" / "ablations.py"), []
    for name in ("data", "held-out"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
        files += [f"--{name}", str(tmp_path / name)]

    def run(*given: str) -> str:
        monkeypatch.setattr("sys.argv", [script, "--output", str(tmp_path / "arms"), *given])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    for given, error in (["--plot"], "no arm has been measured in"), ([], "training needs --data and --held-out"):
        with pytest.raises(SystemExit):
            run(*given)
        assert error in capsys.readouterr().err
    names = runpy.run_path(script)
    options = Namespace(epochs=1.0, seed=0, data=tmp_path / "data", held_out=tmp_path / "held-out")
    result = {"name": "one step", "settings": names["settings_of"](options), "steps": 9}
    result |= {"eval_acceptance_length": 1.6, "eval_sampled_acceptance_length": 1.5}
    result |= {f"eval_acceptance_{k}": 0.4**k for k in range(1, 8)}
    (tmp_path / "arms" / "one-step").mkdir(parents=True)
    (tmp_path / "arms" / "one-step" / "result.json").write_text(json.dumps(result), encoding="utf-8")
    for given in (["--plot"], ["--arms", "one step", *files]):
        assert "| one step | 9 | 1.60 | 1.50 |" in run(*given)
    assert (tmp_path / "arms" / "ablations.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="was measured with other seed; name another folder"):
        run("--arms", "one step", *files, "--seed", "1")


def test_the_notebook_runs() -> None:
    """In a kernel of its own, as a user has it, but trained for a few steps only."""
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert '%pip install --quiet "hf-spec[' in notebook.cells[1].source  # for Colab; not run where it is installed
    (steps,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    steps.source = "TRAINING_STEPS = 8"
    (texts,) = (cell for cell in notebook.cells if "(192, 1)" in cell.source)
    texts.source = texts.source.replace("(192, 1)", "(16, 1)").replace(
        "eval_max_new_tokens=48", "eval_max_new_tokens=16"
    )
    (options,) = (cell for cell in notebook.cells if '"max_new_tokens": 100' in cell.source)
    options.source = options.source.replace('"max_new_tokens": 100', '"max_new_tokens": 48')
    NotebookClient(notebook, timeout=600).execute()
    outputs = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())]
    shown = [out["text/html"] for out in outputs if "text/html" in out]
    assert len(shown) == 3 and all(ACCEPTED_STYLE in one for one in shown)
    assert sum("image/png" in out for out in outputs) == 2
    tree, kinds, depths, taus = (
        printed(notebook, start) for start in ("class Watched", "drafts =", "depths =", "from matp")
    )
    assert tree.count("\n") == 13 and "\n        '" in tree  # the root and twelve draft tokens
    assert set(kinds) == {"n-grams", "a draft model", "medusa", "mtp", "eagle3"} and min(kinds.values()) >= 1
    assert list(depths.values()) == sorted(depths.values())
    assert len(taus) == 5 and taus[0] < taus[-1]


def printed(notebook: Any, start: str) -> Any:
    """Return what the cell that begins so gave, or printed."""
    (cell,) = (cell for cell in notebook.cells if cell.source.startswith(start))
    found = [out.get("data", {}).get("text/plain") or out.get("text", "") for out in cell.outputs]
    return next((ast.literal_eval(one) for one in found if one[:1] in "[{"), "".join(found))


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target with the demo family's tokenizer, whose forwards take a tenth of the demo target's time."""
    path = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 6}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, **sizes)).save_pretrained(path)
    AutoTokenizer.from_pretrained(demo.path()).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", ["--draft-vocabulary", "512"]),
        ("medusa", ["--heads", "2"]),
        ("mtp", ["--steps", "2"]),
        ("dspark", ["--block", "3", "--rank", "8", "--layers", "1", "--anchors", "16"]),
    ],
)
def test_a_draft_is_trained_measured_and_saved(
    kind: str, options: list[str], small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "draft"
    given = ["--output", str(output), "--evaluations", "2", "--target", str(small_target), *options]
    run(f"train_{kind}", given, tmp_path, monkeypatch)
    draft = AutoModel.from_pretrained(output)
    assert draft.config.speculators_model_type == kind
    assert "mean accepted length" in (output / "README.md").read_text(encoding="utf-8")
    check(draft, small_target)
    with pytest.raises(ValueError, match="of another run"):
        run(f"train_{kind}", given, tmp_path, monkeypatch)
    if kind == "medusa":
        run(f"train_{kind}", [*given, "--resume"], tmp_path, monkeypatch)


def test_a_mask_token_that_the_target_does_not_have_is_refused(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--output", str(tmp_path / "draft"), "--target", str(small_target), "--mask-token", "<|reserved_1|>"]
    with pytest.raises(SystemExit):
        run("train_dspark", given, tmp_path, monkeypatch)
    assert "--mask-token: the target has no token <|reserved_1|>; name one" in capsys.readouterr().err


def test_a_draft_of_the_demo_family_goes_on_from_checkpoints_of_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter training after a longer one would train nothing, and write the longer one's draft."""
    work, tokens = tmp_path / "work", torch.arange(5, 261).tolist()
    row = {"input_ids": tokens, "loss_mask": [1] * len(tokens), "document_ids": [0] * len(tokens)}
    Dataset.from_list([row] * 8).save_to_disk(str(work / "draft_rows"))
    AutoTokenizer.from_pretrained(demo.path()).save_pretrained(work / "tokenizer")
    shutil.copyfile(demo.path() / "tokenizer.json", work / "tokenizer" / "tokenizer.json")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for epochs in (2, 1):
        given = ["--work", str(work), "--output", str(tmp_path), "--kind", "medusa", "--epochs", str(epochs)]
        monkeypatch.setattr("sys.argv", ["train_demo_drafts.py", *given])
        runpy.run_path(str(ROOT / "examples" / "train_demo_drafts.py"), run_name="__main__")
        states = [json.loads(file.read_text()) for file in work.glob("draft-medusa*/checkpoint-*/trainer_state.json")]
        assert epochs in [state["global_step"] for state in states]
        assert (tmp_path / "draft-medusa" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-vanilla"])
def test_an_adapter_is_trained_measured_saved_and_merged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    places = ["--output", str(tmp_path / "adapter"), "--merged", str(tmp_path / "merged")]
    given = ["--draft", str(demo.path(kind)), *places]
    run("finetune_lora", given, tmp_path, monkeypatch)
    assert "tokens per verification on held-out text: 2" in capsys.readouterr().out
    load = AutoModel if kind == "draft-eagle3" else AutoModelForCausalLM
    check(peft.PeftModel.from_pretrained(load.from_pretrained(demo.path(kind)), tmp_path / "adapter"))
    check(load.from_pretrained(tmp_path / "merged"))
    if kind == "draft-vanilla":  # the faster one
        with pytest.raises(ValueError, match="of another run"):
            run("finetune_lora", given, tmp_path, monkeypatch)


def test_time_and_memory_of_a_training_step_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples" / "training_speed.py"
    monkeypatch.setattr("sys.argv", [str(script), "--child", "ours", "24", "128", "128"])
    runpy.run_path(str(script), run_name="__main__")
    seconds, megabytes = json.loads(capsys.readouterr().out)
    assert seconds > 0 and megabytes >= 0


def test_an_environment_that_cannot_measure_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named speculators >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.argv", ["training_speed.py", "--speculators", str(python)])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(subprocess.CalledProcessError):
        runpy.run_path(str(ROOT / "examples" / "training_speed.py"), run_name="__main__")
    assert "No module named speculators" in capfd.readouterr().err


def test_what_is_missing_or_wrong_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--tokens 2 --rounds 1 --backend eager --batch 1 8 --draft-length 5 3 2".split()
    monkeypatch.setattr("sys.argv", ["compiled_speed.py", *few])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "compiled_speed.py"), run_name="__main__")
    assert "--draft-length: give one, or 2, one for each --batch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    small = ["--hidden", "64", "--layers", "1", "--steps", "1", "--most", "64", "--curves", "nodes"]
    files = ["--json", str(tmp_path / "costs.json"), "--png", str(tmp_path / "costs.png")]
    monkeypatch.setattr("sys.argv", ["step_costs.py", *small, *files])
    with pytest.raises(ImportError, match=re.escape("pip install 'hf-spec[bench]'")):
        runpy.run_path(str(ROOT / "examples" / "step_costs.py"), run_name="__main__")
    assert not (tmp_path / "costs.json").exists()


def test_drafts_of_the_demo_family_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stories = tmp_path / "stories.jsonl"
    story = "Once upon a time, there was a little dog named Max. Max loved to play with his toys."
    stories.write_text("\n".join(json.dumps({"text": f"{story} {i}"}) for i in range(3)), encoding="utf-8")
    options = ["--count", "2", "--seeds", "2", "--prompt-length", "12", "--new-tokens", "16"]
    drafts = ["--drafts", "draft-dspark", "draft-medusa"]
    raw = ["--raw", str(tmp_path / "raw.json")]
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for given in (["--stories", str(stories), *drafts, *options], ["--read"]):
        monkeypatch.setattr("sys.argv", ["compare", *raw, *given])
        runpy.run_path(str(ROOT / "examples" / "compare_demo_drafts.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == printed[4:]  # the raw file says the same
    assert set(json.loads((tmp_path / "raw.json").read_text())) == {"drafts", "made_from", "settings", "weights"}
    header, _, *rows = printed[:4]
    chains, trees = ([f"{shape}, {how}" for how in ("greedy", "temperature 1")] for shape in ("chains", "trees of 12"))
    counts = ["operators per proposal", "products"]
    assert [name.strip() for name in header.split("|")[2:-1]] == [*chains, *trees, *counts, "ms per proposal"]
    assert [row.split("`")[1] for row in rows] == ["draft-dspark", "draft-medusa"]
    for row in rows:
        figures = [float(cell.split("±")[0]) for cell in row.split("|")[2:-1]]
        assert min(figures[:4]) > 1 and figures[4] > figures[5] > 0 and figures[6] > 0


def test_drafts_in_folders_of_one_name_are_compared_and_other_settings_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in (("one", "draft-medusa"), ("two", "draft-mtp")):
        shutil.copytree(demo.path(source), tmp_path / name / "draft")
    (tmp_path / "stories.jsonl").write_text(json.dumps({"text": "Once upon a time, there was a cat. " * 9}) + "\n")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)

    def run(*given: str) -> str:
        short = ["--only-speed", "--seeds", "1", "--count", "1", "--prompt-length", "12", "--draft-length", "2"]
        monkeypatch.setattr("sys.argv", ["compare", "--raw", "raw.json", *short, *given])
        runpy.run_path(str(ROOT / "examples" / "compare_demo_drafts.py"), run_name="__main__")
        return capsys.readouterr().out

    with pytest.raises(SystemExit):
        run("--read")
    assert "--read writes the table of a raw file that is there" in capsys.readouterr().err
    stories = ["--stories", "stories.jsonl", "--new-tokens", "4"]
    printed = run(*stories, "--drafts", "one/draft", "two/draft")
    assert re.findall("^[|] `(.*?)`", printed, re.M) == ["one/draft", "two/draft"]
    with pytest.raises(SystemExit, match=r"^raw.json was made with other new_tokens; name another file$"):
        run(*stories, "--new-tokens", "5", "--drafts", "one/draft")
    shutil.copytree(tmp_path / "one" / "draft", tmp_path / "two" / "draft", dirs_exist_ok=True)
    with pytest.raises(SystemExit, match=r"^raw.json was made with another two/draft; name another file$"):
        run(*stories, "--drafts", "one/draft", "two/draft")


@pytest.mark.slow
@pytest.mark.parametrize(("sample", "same"), [([], "yes"), (["--sample"], "sampled")], ids=["greedy", "sampled"])
def test_eager_and_compiled_speed_side_by_side(
    sample: list[str], same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    file = str(tmp_path / "raw.json")
    options = ["--tokens", "6", "--rounds", "1", "--batch", "1", "--backend", "eager", "--json", file, *sample]
    monkeypatch.setattr("sys.argv", ["compiled_speed", *options])
    runpy.run_path(str(ROOT / "examples" / "compiled_speed.py"), run_name="__main__")
    torch.set_num_threads(threads)
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    names = [cells[1].strip() for cells in table]
    assert names == ["plain, eager", "plain, compiled", "eagle3, eager", "eagle3, compiled"]
    assert [cells[10].strip() for cells in table] == [same] * 4
    for cells in table[::2]:  # eager forwards are seen
        seconds, *parts = map(float, cells[5:9])
        assert sum(parts) == pytest.approx(seconds, abs=0.002)
    runpy.run_path(str(ROOT / "examples" / "compiled_speed.py"), run_name="__main__")  # all of it is there
    assert "|" not in capsys.readouterr().out


def run(script: str, options: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script of the examples on a few short stories."""
    _, *stories = (ROOT / "tests/fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
    data = folder / "stories.jsonl"
    data.write_text("\n".join(json.dumps({"text": story.strip()[:200]}) for story in stories), encoding="utf-8")
    given = ["--target", str(demo.path()), "--data", str(data), *options]
    given += ["--length", "64", "--epochs", "1", "--accumulate", "2"]
    monkeypatch.setattr("sys.argv", [script, *given])
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")


def check(draft: Any, path: Path | None = None) -> None:
    """Generate with a draft, and without."""
    target = AutoModelForCausalLM.from_pretrained(path or demo.path(), dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(demo.path())("Once upon a time", return_tensors="pt")
    call = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(**inputs, **call, speculator=draft), target.generate(**inputs, **call))


def test_costs_of_steps_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--hidden", "64", "--layers", "1", "--steps", "2", "--most", "64", "--dtypes", "float32"]
    files = ["--json", str(tmp_path / "costs.json"), "--png", str(tmp_path / "costs.png")]
    monkeypatch.setattr("sys.argv", ["step_costs.py", *small, "--curves", "nodes", "prompt", *files])
    runpy.run_path(str(ROOT / "examples" / "step_costs.py"), run_name="__main__")
    found = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))["float32"]
    assert list(found["nodes"]["nodes"]) == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert set(found["prompt"]) == {"0", "1", "6", "16"} and list(found["prompt"]["6"]) == ["64"]
    assert (tmp_path / "costs.png").read_bytes()[:4] == b"\x89PNG"


def test_the_cost_of_exact_bits_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a new folder" / "costs.json"
    small = ["--shape", "tiny", "--texts", "9", "--rounds", "1", "--nodes", "1", "6", "32"]
    monkeypatch.setattr("sys.argv", ["invariant_cost.py", *small, "--json", str(file)])
    runpy.run_path(str(ROOT / "examples" / "invariant_cost.py"), run_name="__main__")
    content = json.loads(file.read_text(encoding="utf-8"))
    found = content["float32"]
    assert content["made_from"]["commit"] and content["made_from"]["torch"] == torch.__version__
    assert len(found) == 3 * 3 and all(one["seconds"] > 0 for one in found.values())
    assert found["invariant, 9, 6"]["operators"] > found["plain, 9, 6"]["operators"]
    printed = capsys.readouterr().out
    assert "invariant: 15 linear layers" in printed and "| 9 | 32, tree | " in printed
    monkeypatch.setattr("sys.argv", ["invariant_cost.py", "--read", str(file)])
    runpy.run_path(str(ROOT / "examples" / "invariant_cost.py"), run_name="__main__")
    read = capsys.readouterr().out
    assert "| 9 | 32, tree | " in read and printed.endswith(read)


def test_answers_that_depend_on_the_draft_or_the_batch_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "answers.json"
    prompts.write_text("".join(json.dumps({"text": "Once" + " upon" * row}) + "\n" for row in range(1, 5)))

    def run(*more: str) -> dict[str, Any]:
        given = [str(tmp_path / "target"), str(prompts), "--json", str(file), "--new-tokens", "5", *more]
        monkeypatch.setattr("sys.argv", ["exact_answers.py", *given])
        return runpy.run_path(str(ROOT / "examples" / "exact_answers.py"), run_name="__main__")

    run("--answers", "1")
    first = json.loads(file.read_text(encoding="utf-8"))["rounds"]
    module = run("--answers", "3")  # continues with the second answer
    rounds = json.loads(file.read_text(encoding="utf-8"))["rounds"]
    assert {mode: found[:1] for mode, found in rounds.items()} == first
    assert [len(found) for found in rounds.values()] == [2, 2]
    counted = module["summed"](rounds["in the mode"])
    assert len(counted) == 7 * 3 and all(one["differ"] == 0 and one["answers"] == 3 for one in counted.values())
    assert counted["draft model, 1"]["accepted"] > 0
    assert "| draft model, trees | " in capsys.readouterr().out
    run("--answers", "9", "--outside", "2")  # the file has four prompts
    assert "4 answers in the mode and 3 outside" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has other settings \(dtype\)"):
        run("--dtype", "float32")
    asked = prompts.read_text()
    prompts.write_text(asked.replace("upon", "more"))
    with pytest.raises(SystemExit, match=r"has other settings \(prompts\)"):
        run("--answers", "4")
    prompts.write_text(asked)
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"made_from": content["made_from"] | {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match=r"was made with torch 1\.0; name another file"):
        run("--answers", "4")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    other = LogitsProcessorList([lambda ids, scores: -scores])
    ways = {"plain": {"speculator": False}, "other": {"speculator": False, "logits_processor": other}}
    found = dict(module["round_of"](target, ways, [[5, 6, 7, 5], [8, 9]], 5))
    assert found["plain, 4"]["differ"] == 0 and found["other, 4"]["differ"] == 2


@pytest.mark.parametrize(
    "given",
    [
        ["--batch", "2", "--processors"],
        ["--batch", "2", "--packed"],
        ["--batch", "1", "--size", "288", "1024", "12", "--assisted", "3", "--drafts", "vanilla", "eagle3"],
    ],
    ids=["processors", "packed", "inflated"],
)
def test_default_settings_are_measured_beside_plain_generate(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "speeds.json")
    monkeypatch.setattr("sys.argv", ["default_speed.py", "--rounds", "1", "--new-tokens", "6", "--json", file, *given])
    runpy.run_path(str(ROOT / "examples" / "default_speed.py"), run_name="__main__")
    printed, told = capsys.readouterr()
    assert ("weights are packed" in told) == ("--packed" in given)
    header, _, *rows = printed.splitlines()
    assert [row.count("|") for row in rows] == [header.count("|")] * 2
    cells = [re.findall(r"[0-9.]+", cell) for row in rows for cell in row.split("|")[2:-1]]
    assert all(float(one[0]) > 0 and len(one) == 4 for one in cells)  # the ratio, and three parts
    kept = json.loads(Path(file).read_text(encoding="utf-8"))
    for label, parts in kept["parts"].items():
        assert parts["plain"][1] == 0 and all(target > 0 for target, *_ in parts.values())
        for name, times in kept["seconds"][label].items():
            assert sum(parts[name]) == pytest.approx(times[0])
    monkeypatch.setattr("sys.argv", ["default_speed.py", "--read", file])
    runpy.run_path(str(ROOT / "examples" / "default_speed.py"), run_name="__main__")
    assert capsys.readouterr().out == printed


def test_assisted_generation_has_packed_weights_where_other_drafts_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples" / "default_speed.py")
    few = ["--rounds", "1", "--new-tokens", "4", "--batch", "1", "--packed", "--assisted", "3", "--drafts", "vanilla"]
    monkeypatch.setattr("sys.argv", [script, *few])
    runpy.run_path(script, run_name="__main__")
    (packed,) = re.findall("([0-9]+) of [0-9]+ large weights are packed", capsys.readouterr().err)
    names = ("target", "draft-vanilla", "draft-vanilla")
    models = [AutoModelForCausalLM.from_pretrained(demo.path(name), dtype=torch.float32) for name in names]
    assert int(packed) == len(hf_spec.pack(*models, force=True).packed)
    monkeypatch.setattr("sys.argv", [script, "--drafts", "eagle"])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert "invalid choice: 'eagle'" in capsys.readouterr().err


def engine_speed(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Measure two sequences of the demo target with a few methods, unless ``more`` names others."""
    threads = torch.get_num_threads()
    options = ["--out", str(folder), "--model", "demo", "--dtype", "float32", "--cores", "1", "--prompts", "short"]
    options += ["--batch", "2", "--number", "2", "--new-tokens", "4", "--backend", "eager", *more]
    monkeypatch.setattr("sys.argv", ["engine_speed.py", *options])
    try:
        runpy.run_path(str(ROOT / "examples" / "engine_speed.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def test_engines_are_compared_in_turns_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file for each cell, replaced after each turn; an engine that does not start is named with its error."""
    only = ["--only", "^(plain|packed): (plain|hf_spec, eagle3(, tree)?)$|vLLM: plain"]
    only += ["--vllm", shutil.which("false") or "false"]
    engine_speed(tmp_path, monkeypatch, "--turns", "1", *only)
    (file,) = tmp_path.glob("*.json")
    assert file.name == "demo-float32-1core-short-batch2.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    engine_speed(tmp_path, monkeypatch, "--turns", "2", *only, "--markdown", str(tmp_path / "speeds.md"))
    content = json.loads(file.read_text(encoding="utf-8"))
    assert len(content["turns"]) == 2 and content["turns"][0] == before["turns"][0]
    assert content["errors"] == {"vLLM: plain": "RuntimeError: ended with status 1"}
    assert {"commit", "processor", "torch", "transformers", "hf_spec"} <= content["made_from"].keys()
    names = [f"{condition}: {name}" for condition in ("plain", "packed") for name in ("plain", *TWO)]
    assert list(content["turns"][1]) == [*names[1:], names[0]]
    lines = (tmp_path / "speeds.md").read_text(encoding="utf-8").splitlines()
    rows = {cells[1].strip(): cells for line in lines if len(cells := line.split("|")) == 8}
    assert [rows[f"{condition}: plain"][3].strip() for condition in ("plain", "packed")] == ["1.00"] * 2
    assert {cells[6].strip() for title, cells in rows.items() if ": " in title} == {"same"}
    assert "- Not measured: vLLM: plain. RuntimeError: ended with status 1" in lines
    for run in content["turns"][0].values():
        assert run["target"] > 0 and run["seconds"] > run["target"] + run["draft"]
    with pytest.raises(ValueError, match="measured with other new_tokens"):
        engine_speed(tmp_path, monkeypatch, "--turns", "3", *only, "--new-tokens", "5")
    capsys.readouterr()


def test_figures_of_another_model_or_text_of_the_same_name_are_not_taken_for_those_asked(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(small_target, tmp_path / "own")
    given = ["--model", str(own), "--turns", "1", "--only", "^plain: plain$"]
    engine_speed(tmp_path / "out", monkeypatch, *given)
    capsys.readouterr()
    engine_speed(tmp_path / "out", monkeypatch, *given, "--only", "n-grams")
    assert "1 turns are there; --turns 2 adds one" in capsys.readouterr().err
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"category": "a", "text": "Once upon a time"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="measured with other texts"):
        engine_speed(tmp_path / "out", monkeypatch, *given, "--texts", str(texts))
    noisy_copy(AutoModelForCausalLM.from_pretrained(own), seed=0, noise=0.1).save_pretrained(own)
    with pytest.raises(ValueError, match="measured with other weights"):
        engine_speed(tmp_path / "out", monkeypatch, *given)


def test_vllm_is_asked_for_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that has none: what it was started with comes back as its error."""
    python = tmp_path / "python"
    python.write_text(f'#!{sys.executable}\nimport json, sys\nprint(json.dumps({{"error": sys.argv[2]}}))\n')
    python.chmod(0o755)
    only = ["--only", "^vLLM: plain$", "--vllm", str(python), "--turns", "1"]
    engine_speed(tmp_path / "out", monkeypatch, *only, "--batch", "12")
    (file,) = (tmp_path / "out").glob("*.json")
    error = json.loads(file.read_text(encoding="utf-8"))["errors"]["vLLM: plain"]
    assert json.loads(error.removeprefix("RuntimeError: "))["max_num_seqs"] == 12


TWO = ("hf_spec, eagle3", "hf_spec, eagle3, tree")


@pytest.mark.slow
def test_every_method_of_transformers_and_ours_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a target of two layers: what takes time here is tracing, which grows with the layers."""
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).eval()
    drafts = {"vanilla": LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))}
    layers = {"num_hidden_layers": 1}
    eagle3 = hf_spec.Eagle3SpeculatorConfig.for_target(
        target.config, layers, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    drafts["eagle3"] = hf_spec.Eagle3DraftModel(eagle3)
    dspark = hf_spec.DSparkSpeculatorConfig.for_target(target.config, layers, mask_token_id=3)
    drafts["dspark"] = hf_spec.DSparkDraftModel(dspark)
    for name, model in {"target": target, **drafts}.items():
        model.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(demo.path()).save_pretrained(tmp_path / name)
    given = ["--draft", *(f"{name}={tmp_path / name}" for name in drafts), "--model", str(tmp_path / "target")]
    engine_speed(tmp_path / "out", monkeypatch, "--turns", "1", "--batch", "1", *given)
    (file,) = (tmp_path / "out").glob("*.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["errors"] == {}
    assert len(content["turns"][0]) == 2 * 10 + 7 + 2
    assert len({json.dumps(run["tokens"]) for run in content["turns"][0].values()}) == 1


def test_batches_of_a_turn_are_added_up() -> None:
    together = runpy.run_path(str(ROOT / "examples" / "engine_speed.py"))["together"]
    run = {"seconds": 2.0, "target": 1.0, "draft": 0.5, "tokens": [[1, 2, 3, 4]], "accepted_length": 1.0}
    both = together([run, run | {"tokens": [[5, 6, 7, 8]], "accepted_length": 4.0}])
    assert both == {"seconds": 4.0, "target": 2.0, "draft": 1.0, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]]} | {
        "accepted_length": 1.6  # 8 tokens in 4 + 1 steps
    }
    other = run | {"target": None, "draft": None, "accepted_length": None}
    assert together([other])["accepted_length"] is None and together([other, other])["target"] is None


def test_speeds_are_divided_by_plain_of_the_same_conditions() -> None:
    """Packed plain is twice as fast as plain here: a packed draft that is as fast as it gains nothing."""
    names = runpy.run_path(str(ROOT / "examples" / "engine_speed.py"))
    run = {"target": 0.5, "draft": 0.25, "tokens": [[1, 2]], "accepted_length": None}
    seconds = {"plain: plain": 2.0, "packed: plain": 1.0, "packed: hf_spec, n-grams": 1.0, "vLLM: n-grams": 1.0}
    turn = {title: run | {"seconds": one} for title, one in seconds.items()}
    turn["vLLM: n-grams"] |= {"target": None, "draft": None, "tokens": [[1, 3]]}
    found = {row["title"]: row for row in names["rows_of"]({"turns": [turn]})}
    assert [found[title]["ratio"] for title in seconds] == ["1.00", "1.00", "1.00", ""]
    assert found["packed: plain"]["parts"] == [0.5, 0.25, 0.25]
    assert found["vLLM: n-grams"]["parts"] == [None] * 3
    assert [found[title]["same_text"] for title in seconds] == [True, True, True, False]


def test_turns_that_waited_for_a_compiler_are_left_out() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "engine_speed.py"))
    run = {"target": 0.5, "draft": 0.25, "tokens": [[1, 2]], "accepted_length": None}
    pairs = [(84.0, 1.0), (1.0, 0.5), (2.0, 1.0), (2.0, 90.0)]
    turns = [{f"compiled: {name}": run | {"seconds": one} for name, one in zip(("plain", "x"), two, strict=True)}
             for two in pairs]  # fmt: skip
    plain, other = names["rows_of"]({"turns": turns})
    assert plain["tokens_per_second"] == 2 / 2.0 and other["ratio"] == "2.00", "of turns in which neither waited"


def test_turns_that_differ_are_shown_as_a_range() -> None:
    """A median of two would be a figure that nobody measured."""
    shown = runpy.run_path(str(ROOT / "examples" / "engine_speed.py"))["shown"]
    assert [shown([1.48, 0.8]), shown([1.02, 1.04, 1.09]), shown([])] == ["0.80 to 1.48", "1.04", ""]


def test_drafts_are_written_for_engines_and_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without vLLM: our part runs, goes on with more drafts, and refuses to add figures of other settings."""
    script, work = str(ROOT / "examples" / "engines" / "compare.py"), ["--work", str(tmp_path)]

    def run(*given: str) -> str:
        monkeypatch.setattr("sys.argv", [script, *work, *given])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    with pytest.raises(SystemExit):
        run("--read")
    assert "measure first, without --read" in capsys.readouterr().err
    threads = torch.get_num_threads()
    run("--new-tokens", "6", "--drafts", "ngram")
    told = run("--new-tokens", "6", "--drafts", "peagle")
    torch.set_num_threads(threads)
    rows = [line.split("|") for line in told.splitlines() if " as plain |" in line]
    assert [row[1].strip() for row in rows] == ["ngram", "peagle"]
    assert [row[5].strip() for row in rows] == ["8 of 8 as plain"] * 2 and float(rows[1][2]) > 1
    assert run("--read") == told
    with pytest.raises(SystemExit):
        run("--new-tokens", "7", "--drafts", "ngram")
    assert "measured with other settings, {'length': 4, 'new_tokens': 6}" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_and_a_draft_of_one_name_are_two_files_for_llama_cpp(
    dtype: str, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "engines"))
    converted = runpy.run_path(str(ROOT / "examples" / "engines" / "llama_cpp_worker.py"))["converted"]
    folders = [shutil.copytree(small_target, tmp_path / name / "final") for name in ("model", "draft")]
    noisy_copy(AutoModelForCausalLM.from_pretrained(folders[1]), seed=0, noise=0.1).save_pretrained(folders[1])
    files = [converted(folder, dtype, tmp_path) for folder in folders]
    for folder, file in zip(folders, files, strict=True):
        heads = {one.name: one for one in gguf.GGUFReader(file).tensors}
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).lm_head.weight
        found = torch.tensor(gguf.quants.dequantize(heads["output.weight"].data, heads["output.weight"].tensor_type))
        assert torch.equal(found, wanted.float())


def test_steps_are_counted_as_vllm_counts_them() -> None:
    """Steps that begin before the end of a text count whole; the first token belongs to no step."""
    names = runpy.run_path(str(ROOT / "examples" / "engines" / "compare.py"))
    drafted = [False, True, True, False, False, True, False, True, True, False]  # steps of 2, 0, 1 and 2
    assert names["accepted_by_step"](drafted, 20) == [2, 0, 1, 2]
    assert names["accepted_by_step"](drafted, 6) == [2, 0, 1]  # the third begins at 5, and ends at the seventh token
    assert names["accepted_by_step"](drafted, 5) == [2, 0]


@pytest.mark.parametrize(
    ("name", "given", "rows"),
    [
        ("packed_forwards", "--shapes tiny --dtypes float32 --tokens 1 4 --times 1 --turns 1", 3),
        ("padded_prompts", "--shape tiny --lengths 4 9 30 --tokens 4 --rounds 1", 2),
        ("early_exits", "--exits 2 --texts 1 --tokens 8", 1),
        (
            "batch_speed",
            "--size 288 1024 12 --at-once 2 --prompts 3 --new-tokens 2 5 --drafts ngram draft-mtp --rounds 1",
            6,
        ),
    ],
)
def test_scripts_write_raw_files_and_their_tables(
    name: str,
    given: str,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, script = tmp_path / "raw.json", str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr("sys.argv", [script, *given.split(), "--json", str(file)])
    names = runpy.run_path(script, run_name="__main__")
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"commit", "processor", "torch", "transformers"} <= content["made_from"].keys()
    assert names["table"](content) in capsys.readouterr().out
    table = names["table"](content).splitlines()
    table = [line for line in table if line.startswith("|")]
    assert len(table) == rows + 2 and len({line.count("|") for line in table}) == 1
    if name == "batch_speed":
        for ways in content["at_once"]["2"].values():
            assert sum(ways[0]["parts"]) == pytest.approx(ways[0]["seconds"]) and ways[0]["parts"][0] > 0
        assert content["at_once"]["2"]["engine, draft-mtp"][0]["parts"][1] > 0
        runpy.run_path(script, run_name="__main__")  # goes on, and has nothing left to do
        assert json.loads(file.read_text(encoding="utf-8"))["at_once"] == content["at_once"]


@pytest.mark.slow
def test_batches_of_long_texts_have_room_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--size 288 1024 12 --at-once 1 --prompts 2 --new-tokens 256 256 --drafts ngram --rounds 1".split()
    monkeypatch.setattr("sys.argv", ["batch_speed.py", *few])
    runpy.run_path(str(ROOT / "examples" / "batch_speed.py"), run_name="__main__")
    told = capsys.readouterr()
    assert told.out.count("| 1 | ") == 4 and "has room for" not in told.err


def test_only_runs_of_the_same_machine_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, file = runpy.run_path(str(ROOT / "examples" / "engine_speed.py")), tmp_path / "raw.json"
    here = names["machine"]() | {"argv": ["--rounds", "3"]}
    content = {"made_from": here, "rows": [1]}
    assert names["earlier"](None, here) == names["earlier"](file, here) == {}
    file.write_text(json.dumps(content), encoding="utf-8")
    assert names["earlier"](file, here) == content
    assert capsys.readouterr().err == ""
    for name in ("commit", "processor", "torch", "argv"):
        assert names["earlier"](file, here | {name: "another"}) == {}
        told = f"{file} was made with {name} {here[name]}: all is measured again, and it is replaced"
        assert capsys.readouterr().err.strip() == told


def test_a_machine_without_git_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "engine_speed.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = names["machine"]()
    assert found["commit"] == "" and found["torch"] == torch.__version__
