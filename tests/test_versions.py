"""What versions of transformers lack: asked for in one module, and said where a feature needs a newer one."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
from architectures import build, prompts
from packaging.version import Version
from transformers import AutoConfig, LlamaConfig

from hf_spec import versions
from hf_spec.batching.refusals import why_not_batched

ROOT = Path(__file__).parents[1]
PLACES = [ROOT / ".ci/run", ROOT / ".github/workflows/ci.yml", ROOT / "docs/versions.md"]


def asks_for_a_version(source: str) -> bool:
    """Tell whether code compares versions, or imports what may be missing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "packaging.version":
            return True
        if isinstance(node, ast.Try) and any(_is_import_error(handler) for handler in node.handlers):
            inside = [one for part in node.body for one in ast.walk(part)]
            modules = [one.module or "" for one in inside if isinstance(one, ast.ImportFrom)]
            if any(module.split(".")[0] in ("transformers", "torch") for module in modules):
                return True
    return False


def _is_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and "Import" in ast.unparse(handler.type)


def test_one_module_asks_for_versions() -> None:
    found = [file.name for file in (ROOT / "hf_spec").rglob("*.py") if asks_for_a_version(file.read_text("utf-8"))]
    assert found == ["versions.py"]
    assert asks_for_a_version(
        "try:\n    from transformers.cache_utils import DummyLayer\nexcept ImportError:\n    pass"
    )
    assert not asks_for_a_version("try:\n    import peft\nexcept ImportError:\n    pass")


@pytest.mark.parametrize(("installed", "is_old"), [("5.17.0", True), ("5.20.2", True), ("5.21.0", False)])
def test_continuous_batching_names_both_versions(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_old: bool
) -> None:
    monkeypatch.setattr(versions, "INSTALLED", Version(installed))
    reason = versions.older_than(Version("5.21"))
    assert (reason is not None) is is_old
    if reason is not None:
        assert "transformers 5.21" in reason and installed in reason


def test_a_release_candidate_counts_as_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "INSTALLED", Version("5.21.0rc1"))
    assert versions.older_than(Version("5.21")) is None


def test_an_old_version_refuses_requests_and_not_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: ``generate`` with the same model and draft still runs."""
    model: Any = build("llama")
    monkeypatch.setattr(versions, "INSTALLED", Version("5.17.0"))
    assert "5.17.0 is installed" in str(why_not_batched(model))
    inputs = prompts(1)
    with pytest.raises(ValueError, match=r"needs transformers .* and 5\.17\.0 is installed"):
        model.generate_batch(inputs["input_ids"].tolist(), speculator="ngram", max_new_tokens=4)
    plain = model.generate(**inputs, max_new_tokens=4)
    assert model.generate(**inputs, max_new_tokens=4, speculator="ngram").equal(plain)


def test_the_stand_in_makes_the_same_layers_as_transformers() -> None:
    spec = versions._SubConfigSpec(AutoConfig, "llama", {"num_hidden_layers": 1})
    assert (spec.make(None).model_type, spec.make(None).num_hidden_layers) == ("llama", 1)
    given = LlamaConfig(num_hidden_layers=3)
    assert spec.make(given) is given
    made = spec.make({"model_type": "qwen3", "num_hidden_layers": 2})
    assert (made.model_type, made.num_hidden_layers) == ("qwen3", 2)
    with pytest.raises(ValueError, match="nothing_such"):
        spec.make({"model_type": "nothing_such"})


def test_bounds_are_those_of_the_checks_and_of_the_documents() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = dict(re.findall(r"(torch|transformers)>=([0-9.]+)", " ".join(project["dependencies"])))
    for place in PLACES:
        text = place.read_text("utf-8")
        for name, bound in bounds.items():
            assert re.search(rf"{re.escape(bound)}\b", text), f"{place.name} does not run {name} {bound}"
    assert Version(transformers.__version__) >= Version(bounds["transformers"])
