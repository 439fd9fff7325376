"""``hf-spec generate --prompts``: every prompt is answered once, whatever happens in between."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LONG_ROPE, build
from groups import COMMAND, run_two, start
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_spec import demo
from hf_spec.cli import main
from hf_spec.many import generate as generating
from hf_spec.many.answers import AnswerFile

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}: {% endif %}"

ROPE = LONG_ROPE | {"rope_type": "dynamic"}
SIZES = (6, 50, 40, 36)  # of prompts, in tokens
# What the first process of a group sees in the file of answers when it reads prompt 10.
SEEING = """
import os, sys
from hf_spec.many import generate as generating
pending, out = generating.pending, sys.argv[sys.argv.index("--out") + 1]
def seeing(index, *more):
    if index == 10 and os.environ["RANK"] == "0":
        print(sum(1 for _ in open(out)), "are written")
    return pending(index, *more)
generating.pending = seeing
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("target"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=2048, initializer_range=0.5, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


@pytest.fixture(scope="module")
def answered(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that ended, with its answers and their record."""
    folder = tmp_path_factory.mktemp("answered")
    assert main(command(model, write_prompts(folder), folder / "out.jsonl")) == 0
    return folder


def write_prompts(folder: Path) -> Path:
    """Write prompts of several shapes; a text has the line separator of Unicode, and JSON ends no line there."""
    lines: list[dict[str, Any]] = [{"prompt": f"Once upon a time{' there was' * n}\u2028a dog"} for n in range(9)]
    lines += [{"messages": [{"role": "user", "content": "Tell me a story."}]}, {"turns": ["And another."]}]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    return path


def command(model: str, prompts: Path, out: Path, *more: str) -> list[str]:
    call = ["generate", model, "--speculator", "ngram", "--prompts", str(prompts), "--out", str(out)]
    return [*call, "--max-new-tokens", "12", "--temperature", "0", "--batch-size", "3", *more]


def read(out: Path) -> dict[int, Any]:
    entries = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len({entry["index"] for entry in entries}) == len(entries)
    return {entry["index"]: entry for entry in entries}


def wanted(model: str, entries: dict[int, Any]) -> dict[int, str]:
    """Answer what was asked plainly, each prompt by itself."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    texts = {}
    for index, entry in entries.items():
        text = entry.get("prompt")
        if text is None:
            text = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens="prompt" in entry)["input_ids"]
        out = target.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        texts[index] = tokenizer.decode(out, skip_special_tokens=True)
    return texts


def test_answers_are_those_of_plain_generate(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(command(model, prompts, out)) == 0
    told = capsys.readouterr()
    assert told.out == "" and f"11 answers were written to {out}: mean accepted length 1." in told.err
    entries = read(out)
    assert {index: entry["text"] for index, entry in entries.items()} == wanted(model, entries)
    assert sorted(entries) == list(range(11)) and entries[9]["messages"][0]["content"] == "Tell me a story."
    assert entries[0].keys() == {"index", "prompt", "text", "tokens", "cut", "steps", "proposed", "accepted"}
    assert entries[0]["cut"] and entries[0]["tokens"] == 12
    assert main(command(model, prompts, out)) == 0
    assert capsys.readouterr().err.endswith(f"all 11 answers were in {out} already\n") and read(out) == entries


def test_a_run_that_stopped_goes_on(
    model: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main(command(model, prompts, whole)) == 0
    write = AnswerFile.write

    def stopped(self: AnswerFile, index: int, asked: Any, answer: Any) -> None:
        write(self, index, asked, answer)
        if out.read_bytes().count(b"\n") == 5:
            with out.open("ab") as file:
                file.write(b'{"index": 7, "prompt": "Once')  # as a kill leaves it
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerFile, "write", stopped)
    assert main(command(model, prompts, out)) == 130
    monkeypatch.setattr(AnswerFile, "write", write)
    first, asked = out.read_bytes(), []
    pending = generating.pending
    monkeypatch.setattr(generating, "pending", lambda *given: asked.append(given[0]) or pending(*given))
    capsys.readouterr()
    assert main(command(model, prompts, out, "--speculator", "ngram", "--num-speculative-tokens", "2")) == 0
    assert (
        len(asked) == 6
        and "6 answers were written" in (told := capsys.readouterr().err)
        and "in addition to 5" in told
    )
    assert out.read_bytes().startswith(first[: first.rfind(b"\n") + 1])
    texts = [{index: one["text"] for index, one in read(path).items()} for path in (whole, out)]
    assert texts[0] == texts[1]


def test_a_killed_process_loses_nothing(model: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    more = ("--max-new-tokens", "40", "--batch-size", "1")
    running = start(tmp_path, COMMAND, *command(model, prompts, out, *more))
    while running.is_alive() and not (out.exists() and b"\n" in out.read_bytes()):
        time.sleep(0.01)
    running.kill()
    running.join()
    first = out.read_bytes()
    assert first.count(b"\n") >= 1
    assert main(command(model, prompts, out, *more)) == 0
    assert out.read_bytes().startswith(first[: first.rfind(b"\n") + 1]) and len(read(out)) == 11


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--max-new-tokens", "13"], "--max-new-tokens was 12, not 13"),
        (["--temperature", "0.5"], "temperature was left out, not 0.5"),
        (["--chat"], "chat was False, not True"),
        (["--seed", "3"], "seed was left out, not 3"),
        (["--invariant"], "it was outside of the exact mode, not in the exact mode (--invariant"),
        (["--no-pack"], "it was with packed weights, not without packed weights (--no-pack)"),
        (["other target"], "the target's layers differ"),
        (["other prompts"], "does not answer prompt 0"),
        (["fewer prompts"], "does not answer prompt 3"),
        (["no record"], "has no readable out.jsonl.made_from.json next to it"),
        (["half a record"], "has no readable out.jsonl.made_from.json next to it"),
        (["a foreign line"], "line 1 is no answer: b'[1]"),
    ],
)
def test_other_settings_are_refused(
    model: str, answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], problem: str
) -> None:
    folder = Path(shutil.copytree(answered, tmp_path / "run"))
    prompts, out, record = (folder / name for name in ("prompts.jsonl", "out.jsonl", "out.jsonl.made_from.json"))
    lines = prompts.read_text(encoding="utf-8").split("\n")
    if more == ["other target"]:
        target = AutoModelForCausalLM.from_pretrained(model)
        torch.nn.init.ones_(target.model.layers[1].mlp.up_proj.weight)
        target.save_pretrained(tmp_path / "other")
        AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "other")
        model = str(tmp_path / "other")
    elif more == ["other prompts"]:
        prompts.write_text("\n".join(lines[::-1]), encoding="utf-8")
    elif more == ["fewer prompts"]:
        prompts.write_text("\n".join(lines[:3]), encoding="utf-8")
    elif more == ["no record"]:
        record.unlink()
    elif more == ["half a record"]:
        record.write_text(record.read_text(encoding="utf-8")[:40], encoding="utf-8")
    elif more == ["a foreign line"]:
        out.write_bytes(b"[1]\n" + out.read_bytes())
    before = out.read_bytes()
    capsys.readouterr()
    given = more if more[0].startswith("--") else []
    assert main(command(model, prompts, out, *given)) == 1
    assert problem in capsys.readouterr().err
    assert out.read_bytes() == before


def test_answers_of_the_exact_mode_are_not_continued_outside_of_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "one.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n', encoding="utf-8")
    assert main(command(model, prompts, out, "--invariant")) == 0
    assert f"1 answer was written to {out}: " in capsys.readouterr().err
    assert main(command(model, prompts, out)) == 1
    assert "it was in the exact mode (--invariant, hf_spec.invariant), not outside of" in capsys.readouterr().err
    assert main(command(model, prompts, out, "--invariant")) == 0
    assert f"the answer was in {out} already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--prompts", "{prompts}"], "--prompts FILE and --out FILE go together"),
        (["--out", "{out}"], "--prompts FILE and --out FILE go together"),
        (["--prompts", "{prompts}", "--out", "{out}", "--prompt", "x"], "pass one of them"),
        (["--prompts", "{turns}", "--out", "{out}"], "line 2 has 2 turns"),
        (["--prompts", "{empty}", "--out", "{out}"], "empty holds no prompts; write one JSON object per line"),
        (["--prompts", "{bad}", "--out", "{out}"], "line 3: a prompt is"),
        (["--prompts", "{surrogate}", "--out", "{out}"], "line 2: character 3 of a text is '\\ud800', half of a"),
        (["--prompts", "{role}", "--out", "{out}"], "line 1: a prompt is"),
        (["--prompts", "{deep}", "--out", "{out}"], "line 1: lists and objects stand within each other"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], problem: str
) -> None:
    (tmp_path / "turns").write_text('{"prompt": "a"}\n{"turns": ["a", "b"]}\n', encoding="utf-8")
    (tmp_path / "bad").write_text('{"prompt": "a"}\n\n{"prompt": 1}\n', encoding="utf-8")
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    odd = {
        "surrogate": '{"prompt": "a"}\n{"prompt": "b \\ud800"}\n',
        "role": '{"messages": [{"role": ["user"], "content": "a"}, {"role": "user", "content": "a"}]}\n',
        "deep": '{"prompt": "a", "tools": ' + "[" * 300 + "]" * 300 + "}\n",
    }
    for name, content in odd.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    odd = {name: str(tmp_path / name) for name in odd}
    places: dict[str, Any] = {
        **odd,
        "prompts": prompts,
        "out": tmp_path / "out",
        "turns": tmp_path / "turns",
        "bad": tmp_path / "bad",
        "empty": tmp_path / "empty",
    }
    assert main(["generate", "/nowhere", "--speculator", "ngram", *(one.format(**places) for one in more)]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_the_template_does_not_take_is_left_out(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "strict", tmp_path / "out.jsonl"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('\x1b[2Jno') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = strict + CHAT
    tokenizer.save_pretrained(path)
    odd = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    prompts.write_text(json.dumps(odd) + "\n" + prompts.read_text(encoding="utf-8"), encoding="utf-8")
    for _ in range(2):
        assert main(command(str(path), prompts, out)) == 0
        assert "prompt 0 is left out: the chat template fails: \\x1b[2Jno" in capsys.readouterr().err
        entries = read(out)
        assert {*entries} == {*range(1, 12)}
        assert {index: entry["text"] for index, entry in entries.items()} == wanted(str(path), entries)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_leaves_no_room_for_an_answer_is_left_out(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a table of positions, or before rotary frequencies change; an error names the others."""
    ends = {"gpt2": {"n_positions": 48}, "llama": {"max_position_embeddings": 48, "rope_parameters": ROPE}}
    path, prompts, out = tmp_path / "target", tmp_path / "prompts", tmp_path / "out.jsonl"
    target, tokenizer = build(kind, vocab_size=2048, **ends[kind]), AutoTokenizer.from_pretrained(demo.path())
    target.save_pretrained(path)
    tokenizer.save_pretrained(path)
    texts = ["Once upon a time" + " dog" * (size - len(tokenizer("Once upon a time").input_ids)) for size in SIZES]
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
    assert main(command(str(path), prompts, out)) == 0
    told = capsys.readouterr().err
    long, growing = "has 50 tokens, and the target has positions for 48", "changes its frequencies .* may reach"
    short = "after its 40 tokens the target has positions for 8 new ones, not for --max-new-tokens 12; "
    reasons = {1: f"the prompt {long}", 2: short} if kind == "gpt2" else {1: f".*{growing} 62", 2: f".*{growing} 52"}
    assert all(re.search(f"prompt {index} is left out: {reason}", told) for index, reason in reasons.items())
    entries = read(out)
    assert {*entries} == {0, 3}
    assert {index: one["text"] for index, one in entries.items()} == wanted(str(path), entries)
    target.generation_config.num_beams = 2
    target.save_pretrained(path)
    assert main(command(str(path), prompts, tmp_path / "other.jsonl")) == 1
    assert "for the prompts [1, 0]\nwhere 0 is the first prompt that had no answer yet" in capsys.readouterr().err


def test_processes_write_one_file(model: str, prompts: Path, tmp_path: Path) -> None:
    """After four batches of each: when prompt 10 is read, eight answers are there."""
    out = tmp_path / "out.jsonl"
    told = run_two(tmp_path, SEEING + COMMAND, *command(model, prompts, out), "--batch-size", "1")
    assert told.splitlines()[0] == "8 are written"
    entries = read(out)
    assert {index: entry["text"] for index, entry in entries.items()} == wanted(model, entries)
    assert len(entries) == 11
