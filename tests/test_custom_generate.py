"""Decoding that transformers loads from a repository: `generate(custom_generate=FOLDER, trust_remote_code=True)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import hf_spec
from hf_spec import demo

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = {"custom_generate": str(EXAMPLES), "trust_remote_code": True}
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let transformers copy code to a folder of the test's own."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def inputs() -> Any:
    return AutoTokenizer.from_pretrained(demo.path())("Once upon a time, there was a little", return_tensors="pt")


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_folder_decodes_with_a_draft(target: Any, inputs: Any, is_installed: bool) -> None:
    plain = target.generate(**inputs, **CALL)
    draft = hf_spec.as_speculator(demo.path("draft-eagle3"), target)
    call = {**inputs, **CALL, **FOLDER, "return_dict_in_generate": True}
    try:
        if not is_installed:  # as in a process that has not imported hf_spec yet
            hf_spec.uninstall()
        for options in ({"speculator": draft}, {}, {"speculator": draft, "num_speculative_tokens": 7}):
            out = target.generate(**call, **options)
            assert torch.equal(out.sequences, plain) and out.speculation.emitted
    finally:
        hf_spec.install()
    assert len(out.speculation.counts.proposed_at) == 7, "our keywords reach the folder's function"


def test_a_target_with_such_a_folder_does_not_call_itself(target: Any, inputs: Any) -> None:
    """transformers sets ``model.generate`` to the function of a model's own repository."""
    plain = target.generate(**inputs, **CALL)
    loaded = target.load_custom_generate(str(EXAMPLES), trust_remote_code=True)
    own = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    own.generate = lambda *args, **kwargs: loaded(own, *args, **kwargs)
    assert torch.equal(own.generate(**inputs, **CALL, speculator="ngram"), plain)


def test_nothing_is_executed_without_trust(target: Any, inputs: Any, modules: Path) -> None:
    for trust in ({}, {"trust_remote_code": False}):
        call = {**inputs, **CALL, "custom_generate": str(EXAMPLES), "speculator": "ngram", **trust}
        with pytest.raises((ValueError, EOFError, OSError)):  # transformers asks, where somebody could answer
            target.generate(**call)
    assert not [*modules.rglob("generate.py")]
