"""The command that runs transformers' generation tests, on a checkout that is made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "transformers_suite.py"

MIXIN = """
import torch

class GenerationTesterMixin:
    def model_and_inputs(self):
        model = self.model_class(self.config()).eval()
        return model, {"input_ids": torch.tensor([[5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]), "max_new_tokens": 8}

    def test_greedy_generate(self):
        model, inputs = self.model_and_inputs()
        assert model.generate(**inputs, do_sample=False).shape == (2, 13)

    def test_sample_generate(self):
        model, inputs = self.model_and_inputs()
        assert model.generate(**inputs, do_sample=True, return_dict_in_generate=True).sequences.shape == (2, 13)

    def test_beam_search_generate(self):
        model, inputs = self.model_and_inputs()
        assert model.generate(**inputs, num_beams=2).shape == (2, 13)

    def test_assisted_decoding(self):
        model, inputs = self.model_and_inputs()
        inputs["input_ids"] = inputs["input_ids"][:1]
        assert model.generate(**inputs, do_sample=False, assistant_model=model).shape == (1, 13)
"""
MODEL = """
import unittest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ...generation.test_utils import GenerationTesterMixin

class Forgetful(LlamaForCausalLM):
    '''A target whose text depends on how often it was asked for one.'''
    calls = 0

    def _prepare_generation_config(self, *args, **kwargs):
        self.calls += 1
        return super()._prepare_generation_config(*args, **kwargs)

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits[..., (7 * self.calls) % 50] += FORGETFUL
        return out

class LlamaModelTest(GenerationTesterMixin, unittest.TestCase):
    model_class = Forgetful

    def config(self):
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
        return LlamaConfig(**sizes, eos_token_id=None)

    def test_of_its_own(self):
        raise AssertionError("not a test of the mixin")
"""


def checkout(folder: Path, forgetful: float = 0.0) -> Path:
    for path in ("tests", "tests/generation", "tests/models", "tests/models/llama"):
        (folder / path).mkdir()
        (folder / path / "__init__.py").touch()
    (folder / "tests/generation/test_utils.py").write_text(MIXIN)
    (folder / "tests/models/llama/test_modeling_llama.py").write_text(MODEL.replace("FORGETFUL", str(forgetful)))
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUITE), *map(str, arguments), "-p", "no:cacheprovider"]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


def test_calls_are_compared_counted_and_refused_by_reason(tmp_path: Path) -> None:
    done = run(checkout(tmp_path), "--draft", "oracle")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 greedy, equal to plain" in done.stdout and "1 sampled" in done.stdout
    assert "1 refused: " in done.stdout and "beam" in done.stdout
    assert "4 passed" in done.stdout and "1 deselected" in done.stdout  # the model's own test is none of the mixin's


@pytest.mark.slow
def test_the_assistant_becomes_the_speculator(tmp_path: Path) -> None:
    done = run(checkout(tmp_path), "--draft", "assistant", "--models", "llama")
    assert done.returncode == 0 and "4 passed" in done.stdout
    assert done.stdout.count("greedy") + done.stdout.count("refused") == 1  # of the one call that passes an assistant


@pytest.mark.slow
def test_a_text_that_differs_fails(tmp_path: Path) -> None:
    done = run(checkout(tmp_path, forgetful=100.0), "--draft", "oracle")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not held: tests/models/llama/test_modeling_llama.py::LlamaModelTest::test_greedy_generate" in done.stdout


def test_a_folder_without_the_tests_is_named(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2 and "pass a checkout of transformers" in done.stderr
