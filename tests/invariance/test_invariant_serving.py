"""A server in the mode: an answer is plain ``generate``'s to the letter, whoever else asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from openai import BadRequestError
from servers import BATCHES, DRAFT, PROMPTS, TARGET, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import SpeculationConfig
from hf_spec.cli import main

NEW = 12
SAMPLED = {"temperature": 0.8, "seed": 3, "extra_body": {"generation_config": '{"do_sample": true}'}}


def begin(model: Any, speculator: Any) -> None:
    hf_spec.invariant(model)


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[str]]:
    """Return the texts of plain ``generate`` in the mode, greedy and with a seed."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found: dict[str, list[str]] = {"greedy": [], "sampled": []}
    with hf_spec.invariant(model):
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            for kind, options in (
                ("greedy", {"do_sample": False}),
                ("sampled", {"do_sample": True, "temperature": 0.8}),
            ):
                torch.manual_seed(SAMPLED["seed"])
                out = model.generate(**inputs, max_new_tokens=NEW, **options)
                found[kind].append(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("options", [{}, BATCHES], ids=["one by one", "batched"])
def test_an_answer_does_not_depend_on_who_else_asks(options: dict[str, Any], wanted: dict[str, list[str]]) -> None:
    exact = SpeculationConfig(verification="exact")
    with serving(DRAFT, exact, dtype="bfloat16", loaded=begin, **options) as client, ThreadPoolExecutor(12) as pool:
        assert client.complete(PROMPTS[0], NEW) == wanted["greedy"][0]  # alone
        neighbours = [pool.submit(client.complete, " a" * (9 * size), size) for size in range(1, 5)]
        for _ in range(2):
            assert list(pool.map(lambda prompt: client.complete(prompt, NEW), PROMPTS)) == wanted["greedy"]
        if options:
            with pytest.raises(BadRequestError, match=r"seed.*without --continuous-batching"):
                client.complete(PROMPTS[0], NEW, **SAMPLED)
        else:
            sampled = pool.map(lambda prompt: client.complete(prompt, NEW, **SAMPLED), PROMPTS)
            assert list(sampled) == wanted["sampled"]
        assert all(one.result() for one in neighbours)


def test_the_command_asks_for_the_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr("hf_spec.serving.server.Server", lambda *args, **options: made.update(options, args=args))
    assert main(["serve", TARGET, "--speculator", str(DRAFT), "--invariant", "--no-pack"]) == 0
    _, speculator, config = made["args"]
    assert config(speculator).verification == "exact"
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    made["loaded"](model, speculator)
    assert "hf-spec: invariant: " in capsys.readouterr().err
    assert main(["serve", TARGET, "--speculator", str(DRAFT)]) == 0
    assert made["args"][2](speculator).verification == "auto"
    assert main(["serve", TARGET, "--invariant", "--compile"]) == 1
    assert "pass one of them" in capsys.readouterr().err
