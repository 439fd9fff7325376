"""Sampled text of encoder-decoder targets follows their distribution, enumerated token by token after two sources."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from encoder_decoders import START, build, generate
from pairs import each_value
from test_exactness import noisy_copy
from test_verification import TOO_FAR, deviation
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec.scoring.buffers
from hf_spec import NgramSpeculator, SpeculationConfig
from hf_spec.scoring.runner import ModelRunner

VOCAB, DEPTH = 5, 3
TEXTS = 2500  # drawn in one call after each of two sources
SOURCES = torch.tensor([[3, 1, 4, 1, 4], [2, 3, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
CASES = {
    "chain": SpeculationConfig(num_speculative_tokens=3),
    "sampled tree": SpeculationConfig(num_speculative_tokens=3, tree="sampled", tree_topk=2, num_tree_tokens=6),
    "static tree": SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic tree": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=5),
}


@functools.cache
def target(name: str) -> PreTrainedModel:
    sizes = {"t5": {"num_layers": 1, "num_decoder_layers": 1}, "bart": {"encoder_layers": 1, "decoder_layers": 1}}
    model = build(name, vocab_size=VOCAB, seed=3, **sizes[name])
    model.generation_config.no_repeat_ngram_size = None
    return model


@functools.cache
def distribution(name: str) -> Tensor:
    """Enumerate the distribution of the first tokens after both sources: (sources, token, ..., token)."""
    joint = torch.ones(2, 1, dtype=torch.double)
    for depth in range(DEPTH):
        texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=depth)), dtype=torch.long)
        text = torch.nn.functional.pad(texts, (1, 0), value=START).repeat(2, 1)
        source, mask = (one.repeat_interleave(len(texts), 0) for one in (SOURCES, MASK))
        with torch.no_grad():
            logits = target(name)(input_ids=source, attention_mask=mask, decoder_input_ids=text).logits[:, -1]
        p = (logits.double() / 1.5).softmax(-1).view(2, -1, VOCAB)
        joint = (joint[:, :, None] * p).flatten(1)
    return joint / 2


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_spec.scoring.buffers, "SLOTS_ADDED", 8)


def sample(name: str, speculator: Any, config: SpeculationConfig) -> Tensor:
    """Draw texts after both sources and number them: (texts,)."""
    torch.manual_seed(0)
    texts = generate(
        target(name),
        input_ids=SOURCES,
        attention_mask=MASK,
        do_sample=True,
        temperature=1.5,
        top_k=0,
        max_new_tokens=DEPTH + 1,
        num_return_sequences=TEXTS,
        speculator=speculator,
        speculation_config=config,
    )
    accepted = hf_spec.last_speculation(target(name)).counts.accepted  # type: ignore[union-attr]
    assert accepted, "nothing to verify"
    number = torch.arange(2).repeat_interleave(TEXTS)
    for token in texts[:, 1 : 1 + DEPTH].unbind(1):
        number = VOCAB * number + token
    return number


@pytest.mark.parametrize(("name", "case"), each_value(["t5", "bart"], CASES))
def test_a_draft_with_an_encoder(name: str, case: str) -> None:
    draft = noisy_copy(target(name), seed=0, noise=0.2)
    assert deviation(sample(name, draft, CASES[case]), distribution(name)) < TOO_FAR


def test_ngrams() -> None:
    corpus = NgramSpeculator(corpus=[[0, 1, 2, 3, 4, 2, 1, 0, 3, 1, 4, 4, 0]])
    assert deviation(sample("t5", corpus, CASES["chain"]), distribution("t5")) < TOO_FAR


def test_a_lost_mask_of_the_source_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ModelRunner._inputs

    def lost(runner: ModelRunner, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in inputs(runner, *args).items() if name != "attention_mask"}

    monkeypatch.setattr(ModelRunner, "_inputs", lost)
    target.cache_clear()  # what the self-check found is remembered
    draft = noisy_copy(target("t5"), seed=0, noise=0.2)
    with pytest.raises(ValueError, match="differently from single steps"):
        sample("t5", draft, CASES["chain"])
    assert deviation(sample("t5", draft, CASES["chain"].merge(self_check=False)), distribution("t5")) > TOO_FAR
    target.cache_clear()
