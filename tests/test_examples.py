"""The scripts that users copy run from beginning to end."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["generate", "json_grammar", "own_speculator"])
def test_a_text_is_written_with_guesses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "json_grammar":
        pytest.importorskip("xgrammar")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    lengths = re.findall(r"mean accepted length +([0-9.]+)", capsys.readouterr().out)
    assert lengths and all(float(length) > 1 for length in lengths)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle3", ["--draft-vocabulary", "512"]), ("medusa", ["--heads", "2"]), ("mtp", ["--steps", "2"])],
)
def test_a_draft_is_trained_measured_and_saved(
    kind: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *stories = (ROOT / "tests/fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
    data, output = tmp_path / "stories.jsonl", tmp_path / "draft"
    data.write_text("\n".join(json.dumps({"text": story.strip()[:200]}) for story in stories), encoding="utf-8")
    given = ["--target", str(demo.path()), "--data", str(data), "--output", str(output), *options]
    given += ["--length", "64", "--epochs", "1", "--accumulate", "2", "--evaluations", "1"]
    script = ROOT / "examples" / f"train_{kind}.py"
    monkeypatch.setattr("sys.argv", [str(script), *given])
    runpy.run_path(str(script), run_name="__main__")

    draft = AutoModel.from_pretrained(output)
    assert draft.config.speculators_model_type == kind
    assert "mean accepted length" in (output / "README.md").read_text(encoding="utf-8")
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(demo.path())("Once upon a time", return_tensors="pt")
    call = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(**inputs, **call, speculator=draft), target.generate(**inputs, **call))
