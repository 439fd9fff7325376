"""Several processes answer one dataset: the file is the one that a process writes by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from groups import COMMAND, leave, run_two
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo
from hf_spec.training import Endpoint, regenerate

TARGET = str(demo.path())
OPTIONS: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 8, "do_sample": False, "progress": False}


def chats() -> list[list[dict[str, str]]]:
    said = [("a dog", 1), ("a cat", 2), ("the sea", 1), ("Tom", 2), ("a bird", 1), ("Lily", 1), ("rain", 1)]
    pair = [{"role": "user", "content": "Tell me of {}."}, {"role": "assistant", "content": "No."}]
    return [[{**one, "content": one["content"].format(what)} for one in pair] * turns for what, turns in said]


def work(folder: str) -> None:
    """Be one of two processes, which share the conversations."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer, together, asked = AutoTokenizer.from_pretrained(TARGET), Path(folder) / "together.jsonl", []
    whole = model.generate
    model.generate = lambda ids, **options: asked.append(len(ids)) or whole(ids, **options)
    for _ in range(2):  # the second call finds all answers there
        regenerate(iter(chats()), model, tokenizer, together, accelerator=state, **OPTIONS)
    # Two conversations each, of one turn and of two; then two of the three that are left, and one.
    assert sum(asked) == (5, 4)[state.process_index]
    # What goes wrong in one process ends both.
    mine = chats() if state.is_main_process else chats()[::-1]
    with pytest.raises(ValueError, match="different prompts"):
        regenerate(mine, model, tokenizer, Path(folder) / "mixed.jsonl", accelerator=state, **OPTIONS)
    with pytest.raises((ValueError, RuntimeError), match="max_new_tokens was 8, not 9"):
        regenerate(chats(), model, tokenizer, together, accelerator=state, **OPTIONS | {"max_new_tokens": 9})
    with pytest.raises(ValueError, match="one process is enough for an Endpoint"):
        regenerate(chats(), Endpoint("http://localhost:1/v1", "m"), None, together, accelerator=state, **OPTIONS)
    leave()


def test_processes_share_the_conversations(tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    alone = regenerate(chats(), model.float(), tokenizer, tmp_path / "alone.jsonl", **OPTIONS | {"batch_size": 1})
    run_two(tmp_path, f"import test_regenerating_together as test\ntest.work({str(tmp_path)!r})")
    assert (tmp_path / "together.jsonl").read_bytes() == alone.read_bytes()


def test_the_command_prepares_once_what_its_processes_have_answered(tmp_path: Path) -> None:
    data, answers = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in chats()), encoding="utf-8")
    call = ["prepare", str(data), str(tmp_path / "rows"), "--target", TARGET, "--regenerate", str(answers)]
    options = ["--temperature", "0", "--max-new-tokens", "8", "--batch-size", "2", "--speculator", "ngram"]
    printed = run_two(tmp_path, COMMAND, *call, *options, timeout=180)
    assert len(answers.read_text(encoding="utf-8").splitlines()) == len(chats())
    assert printed.count("of them answers") == 2  # train and test, each told once
    assert (tmp_path / "rows" / "dataset_dict.json").is_file()
