"""A speculator that proposes nothing: plain ``generate``, by our loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import pairwise
from transformers import GenerationConfig
from twins import TREE, Heard, target

import hf_spec
from hf_spec.drafts.lazy import LazyDrafter
from hf_spec.policy.fixed import FixedLength

LENGTHS = (13, 9, 5)


CALLS: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"speculation_config": TREE}]


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [*pairwise(["llama", "gemma2"], [1, 3, 8], CALLS), pytest.param("qwen3_next", 3, {}, marks=pytest.mark.slow)],
)
def test_text_is_plain(name: str, rows: int, options: dict[str, Any]) -> None:
    model, given = target(name), prompts(rows, LENGTHS)
    usual = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**given, **usual)
    for _ in range(2):
        out = model.generate(**given, **usual, **options, speculator="plain", return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.counts.proposed == 0
        assert "0 draft tokens" in out.speculation.draft_lengths


def test_ends_streams_and_numbers_of_a_call() -> None:
    model, given, heard = target(), prompts(1), [Heard(), Heard()]
    plain = model.generate(**given, max_new_tokens=12, do_sample=False, streamer=heard[0])
    ends = {"eos_token_id": int(plain[0, -4]), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 12}
    text = model.generate(**given, max_new_tokens=12, streamer=heard[1], speculator="plain", num_speculative_tokens=5)
    assert torch.equal(text, plain) and heard[0].tokens == heard[1].tokens
    ended = model.generate(**prompts(3, LENGTHS), **ends)
    assert torch.equal(model.generate(**prompts(3, LENGTHS), **ends, speculator=hf_spec.PlainSpeculator()), ended)


def test_the_policy_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plan = [], FixedLength.plan
    monkeypatch.setattr(FixedLength, "plan", lambda *args: (asked.append(1), plan(*args))[1])
    monkeypatch.setattr(LazyDrafter, "_begun", None)  # nor is a drafter made
    target().generate(**prompts(3, LENGTHS), max_new_tokens=16, speculator="plain")
    assert len(asked) == 1


def test_requests_of_continuous_batching() -> None:
    model, given = build("llama"), [[5, 6, 7, 8], [9, 10, 11]]
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None)
    found = model.generate_batch(given, generation_config=options, speculator="plain")
    for prompt, output in zip(given, found.values(), strict=True):
        plain = model.generate(torch.tensor([prompt]), generation_config=options)
        assert output.generated_tokens == plain[0, len(prompt) :].tolist()
