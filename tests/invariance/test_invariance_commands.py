"""Commands begin the mode with --invariant, and say so in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_spec import cli, demo

MODEL = str(demo.path())
SHORT = ["--max-new-tokens", "6", "--temperature", "0", "--device", "cpu", "--invariant"]


def test_generate_begins_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", MODEL, "--prompt", "Once upon a time", *SHORT]) == 0
    errors = capsys.readouterr().err
    assert "hf-spec: invariant: " in errors
    assert "those of plain generate in the same mode" in errors


def test_bench_begins_the_mode_unless_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once upon a time"}) + "\n", encoding="utf-8")
    asked = ["bench", MODEL, "--draft", "ngram", "--prompts", str(prompts), "--warmup", "0", "--no-baselines", *SHORT]
    assert cli.main([*asked, "--compiled"]) != 0
    assert "pass one of them" in capsys.readouterr().err
    assert cli.main(asked) == 0
    assert "hf-spec: invariant: " in capsys.readouterr().err
