"""Batches of drawn lengths, models, drafts and settings: each row has the bits that it has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_invariance import DTYPES, OPTIONS, same_bits, target
from test_invariance import short_parts as short_parts
from transformers import GenerationConfig, PreTrainedModel

import hf_spec
from hf_spec import NgramSpeculator, SpeculationConfig

NAMES = ["llama", "qwen2:swa", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "gemma2", "phi", "olmo2"]


def seeds(few: int, many: int) -> list[Any]:
    """List seeds, of which ``few`` are always tried, and ``many`` where slow tests run."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= few else []) for seed in range(few + many)]


def drawn_options(rng: random.Random, draft: PreTrainedModel) -> dict[str, Any]:
    """Draw how a batch is decoded."""
    chain = SpeculationConfig(num_speculative_tokens=rng.randint(1, 6))
    depth, nodes = rng.randint(2, 5), rng.randint(3, 20)
    tree = SpeculationConfig(tree="dynamic", num_tree_tokens=nodes, num_speculative_tokens=depth, tree_topk=3)
    ways: list[dict[str, Any]] = [
        {},
        {"cache_implementation": "static"},
        {"speculator": NgramSpeculator(), "speculation_config": chain},
        {"speculator": draft, "speculation_config": chain},
        {"speculator": draft, "speculation_config": tree},
    ]
    return rng.choice(ways)


def drawn_batch(rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    """Draw the tokens of rows that are about as long, or of rows of any length; and their lengths."""
    longest, apart = rng.randint(1, 60), rng.choice([0, 2, 8, 30])
    lengths = [max(1, longest + rng.randint(-apart, 3)) for _ in range(rng.choice([2, 3, 4, 8]))]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randint(3, 90, (len(lengths), max(lengths)), generator=generator), lengths


@pytest.mark.parametrize("seed", seeds(16, 200))
def test_rows_of_drawn_batches_have_the_bits_of_rows_alone(seed: int) -> None:
    rng = random.Random(seed)
    name, dtype = rng.choice(NAMES), rng.choice(DTYPES)
    model, draft = target(name, dtype=dtype), target(name, dtype=dtype, seed=1)
    ids, lengths = drawn_batch(rng)
    mask = torch.tensor([[0] * (ids.shape[1] - length) + [1] * length for length in lengths])
    with hf_spec.invariant(model):
        found = model.generate(ids, attention_mask=mask, **OPTIONS, **drawn_options(rng, draft))
        for row, length in enumerate(lengths):
            alone = model.generate(ids[row : row + 1, -length:], **OPTIONS)
            assert same_bits(found, alone, row), f"seed {seed}, {name}, {dtype}, row {row} of {lengths}"


@pytest.mark.parametrize("seed", seeds(4, 60))
def test_drawn_requests_of_an_engine_have_the_texts_of_prompts_alone(seed: int) -> None:
    rng = random.Random(seed)
    name, dtype = rng.choice(["llama", "qwen2:swa", "gemma3_text"]), rng.choice(DTYPES)
    model, draft = target(name, dtype=dtype), target(name, dtype=dtype, seed=1)
    ids, lengths = drawn_batch(rng)
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    nodes, depth = rng.randint(3, 20), rng.randint(2, 5)
    tree = SpeculationConfig(tree="dynamic", num_tree_tokens=nodes, num_speculative_tokens=depth, tree_topk=3)
    given = {"speculator": draft, "speculation_config": tree} if rng.random() < 0.6 else {"speculator": "plain"}
    settings = GenerationConfig(**options, eos_token_id=-1)
    with hf_spec.invariant(model):
        found = model.generate_batch(prompts, generation_config=settings, progress_bar=False, **given)
        for output in found.values():
            prompt = torch.tensor([output.prompt_ids])
            alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            assert output.generated_tokens == alone[0, prompt.shape[1] :].tolist(), f"seed {seed}, {name}, {lengths}"
    model.destroy_cached_continuous_batching_manager()
