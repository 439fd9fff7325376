"""In continuous batching in the mode, the bits of a request are plain ``generate``'s, whoever else asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from batches import batching, flawed, greedy, prompts_of, serve
from test_invariance import short_parts as short_parts
from transformers import PreTrainedModel
from twins import CHAIN, TREE, noisy

import hf_spec
from hf_spec import SpeculationConfig, SpeculationStats
from hf_spec.batching import engine

PROMPTS = prompts_of(5, 99, seed=3)
SEEN = engine._seen
SHORT = greedy(max_new_tokens=12)
LONG = 20 * [9, 11, 13]  # a neighbour that is read in many parts
CASES: dict[str, tuple[str, torch.dtype, Any, SpeculationConfig | None]] = {
    "plain": ("llama", torch.float32, "plain", None),
    "n-grams": ("qwen3", torch.bfloat16, "ngram", CHAIN),
    "tree": ("qwen2:swa", torch.bfloat16, "draft", TREE),
}


def target(name: str = "llama", **options: Any) -> PreTrainedModel:
    model = build(name, **options)
    model.generation_config.eos_token_id = None
    return model


def alone(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the text of plain ``generate`` after a prompt, and the log-probability of each token."""
    options = {"return_dict_in_generate": True, "output_logits": True, "generation_config": SHORT}
    out = model.generate(torch.tensor([prompt]), **options)
    text = out.sequences[0, len(prompt) :].tolist()
    scores = [logits[0].log_softmax(-1) for logits in out.logits]
    return text, [float(one[token]) for one, token in zip(scores, text, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_a_request_has_the_bits_of_plain_generate(case: str) -> None:
    name, dtype, speculator, config = CASES[case]
    model = target(name, dtype=dtype)
    asked, options = [*PROMPTS, LONG], {"continuous_batching_config": batching(4, return_logprobs=True)}
    given: dict[str, Any] = {"speculator": "plain", "speculation_config": config, "generation_config": SHORT}
    if speculator == "draft":
        given["speculator"] = noisy(target(name))
    with hf_spec.invariant(model):
        wanted = [alone(model, prompt) for prompt in asked]
        if speculator == "ngram":
            given["speculator"] = flawed([text for text, _ in wanted], 99)
        found, _ = serve(model, asked, 4, **options, **given)
        one_by_one, _ = serve(model, [LONG, PROMPTS[0]], 1, seed=1, **options, **given)
    assert [(one.generated_tokens, one.logprobs) for one in found] == wanted
    assert [(one.generated_tokens, one.logprobs) for one in one_by_one] == [wanted[-1], wanted[0]]
    assert all(one.speculation.invariant for one in found)
    stats = SpeculationStats.merge([one.speculation for one in found if one.speculation])
    assert speculator == "plain" or 0 < stats.accepted < stats.proposed


def test_nodes_of_a_tree_that_see_other_branches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_seen", lambda ancestors, *rest: SEEN(None, *rest))
    model = target()
    with hf_spec.invariant(model):
        wanted = [alone(model, prompt)[0] for prompt in PROMPTS]
        options = {"speculation_config": TREE, "generation_config": SHORT}
        found, _ = serve(model, PROMPTS, 4, speculator=noisy(target()), **options)
    assert [one.generated_tokens for one in found] != wanted


def test_an_engine_does_not_outlive_its_mode() -> None:
    model = target()
    options = {"generation_config": greedy(max_new_tokens=4), "continuous_batching_config": batching(2)}
    making = model.continuous_batching_context_manager(warmup=False, speculator="plain", **options)
    with making as manager, hf_spec.invariant(model):
        manager.add_request(PROMPTS[0])
        while manager.is_running() and (output := manager.get_result(timeout=1)) is None:
            pass
    assert "began or ended" in (output.error or str(manager.background_thread_status.fatal_error))


def test_a_manager_that_is_kept_knows_the_mode() -> None:
    model = target()
    options = {
        "generation_config": SHORT,
        "continuous_batching_config": batching(4),
        "speculator": "ngram",
    }
    outside = model.generate_batch(PROMPTS, **options, persistent_manager=True)
    with hf_spec.invariant(model):
        wanted = [alone(model, prompt)[0] for prompt in PROMPTS]
        for _ in range(2):
            found = model.generate_batch(PROMPTS, **options, persistent_manager=True)
            assert [one.generated_tokens for one in found.values()] == wanted
            assert all(one.speculation.invariant for one in found.values())
    again = model.generate_batch(PROMPTS, **options)
    assert not any(one.speculation.invariant for one in again.values())
    assert [one.generated_tokens for one in again.values()] == [one.generated_tokens for one in outside.values()]
    model.destroy_cached_continuous_batching_manager()


def test_many_prompts_may_go_to_the_engine() -> None:
    model = target("qwen2:swa", dtype=torch.bfloat16)
    with hf_spec.invariant(model):
        wanted = [alone(model, prompt)[0] for prompt in PROMPTS]
        options = {"engine": "generate_batch", "continuous_batching_config": batching(4), "ordered": True}
        found = hf_spec.generate_many(model, PROMPTS, speculator="ngram", generation_config=SHORT, **options)
        assert [one.tokens for one in found] == wanted
