"""The models of the exactness matrix are worth testing on: they build, repeat exactly and do not repeat themselves."""

from __future__ import annotations

import pytest
import torch
from architectures import CORE, USUAL, build, diverse, names, prompts
from pairs import usual
from transformers import PreTrainedModel

WINDOWED = dict.fromkeys(
    """mistral qwen2:swa starcoder2:swa gemma2 gemma3_text gpt_oss olmo3 cohere2 gemma3n_text gemma4_text""".split(),
    "sliding_window",
) | {"llama4_text": "attention_chunk_size", "deepseek_v32": "index_topk"}
# Nobody's seed makes these talk; xlm reads a left-padded row as if it were padded on the right.
MONOTONOUS = ("camembert", "roc_bert", "xlm", "xlm-roberta")
OWN_STATE = ("rwkv", "xlstm")
STATEFUL = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


def greedy(model: PreTrainedModel, batch: int = 3) -> torch.Tensor:
    inputs = prompts(batch)
    return model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", usual(CORE, USUAL))
def test_core(name: str) -> None:
    rng = torch.random.get_rng_state()
    model = build(name)
    assert torch.equal(torch.random.get_rng_state(), rng)
    text = greedy(model)
    assert text.shape == (3, 24)
    assert diverse(text) >= 8
    assert torch.equal(text, greedy(build(name)))
    assert not torch.equal(text, greedy(build(name, seed=1)))


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_bite(name: str) -> None:
    assert not torch.equal(greedy(build(name)), greedy(build(name, **{WINDOWED[name]: 64})))


def test_core_is_known() -> None:
    assert set(CORE) <= set(names("all"))


def test_prompts_are_left_padded() -> None:
    inputs = prompts(4, lengths=(5, 2))
    assert inputs["attention_mask"].sum(1).tolist() == [5, 2, 5, 2]
    assert inputs["attention_mask"][1].tolist() == [0, 0, 0, 1, 1]
    assert inputs["input_ids"][1].ne(0).long().tolist() == [0, 0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names("all") if name not in CORE])
def test_all(name: str) -> None:
    model = build(name)
    text = greedy(model)
    assert text.shape == (3, 24)
    assert diverse(text) >= (1 if name in MONOTONOUS else 8)
    assert torch.equal(text, greedy(build(name)))
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    assert (name in names("recurrent")) == (name in OWN_STATE or not STATEFUL.isdisjoint(layer_types))
