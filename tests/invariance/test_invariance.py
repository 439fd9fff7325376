"""In the mode of ``hf_spec.invariant`` the bits of a row are plain's, alone or in a batch, with chains and trees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import pairwise
from torch import Tensor
from transformers import PreTrainedModel
from twins import SHAPES, Oracle

import hf_spec
from hf_spec import SpeculationConfig
from hf_spec.invariance import columns, mode, rows
from hf_spec.scoring.plain import prompt_kwargs

# Families with one thing each that others lack: biases, norms of heads, parallel blocks, packed query and key weights.
NAMES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "gpt2", "gpt_neox", "olmo2", "smollm3"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCHES = {"one": (124,), "three": (124, 90, 121), "eight": (124, 20, 121, 1)}  # lengths; a block of keys has 118 places
NEW = 12
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
}


def batch_of(name: str) -> dict[str, Tensor]:
    return prompts({"one": 1, "three": 3, "eight": 8}[name], BATCHES[name])


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Take one row out of its batch, without padding."""
    real = inputs["attention_mask"][row].bool()
    return {name: values[row : row + 1, real] for name, values in inputs.items()}


def same_bits(found: Any, wanted: Any, row: int = 0) -> bool:
    """Compare a row of ``found`` with the only row of ``wanted``: text, logits, scores, hidden states, and cache."""
    new = len(wanted.logits)
    parts = [(found.sequences[row, -new:], wanted.sequences[0, -new:])]
    for one, other in ((found.logits, wanted.logits), (found.scores, wanted.scores)):
        parts += [(step[row], own[0]) for step, own in zip(one, other, strict=True)]
    for step, own in zip(found.hidden_states, wanted.hidden_states, strict=True):
        parts += [(state[row, -own_state.shape[1] :], own_state[0]) for state, own_state in zip(step, own, strict=True)]
    for layer, own_layer in zip(found.cache.layers, wanted.cache.layers, strict=True):
        for name in ("keys", "values"):
            own_states = getattr(own_layer, name)[0]
            parts.append((getattr(layer, name)[row, :, -own_states.shape[1] :], own_states))
    return all(torch.equal(one, other) for one, other in parts)


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("name", "dtype", "shape", "batch"), pairwise(NAMES, DTYPES, [*SHAPES, "ngram"], [*BATCHES]))
def test_everything_of_a_row_has_the_bits_of_plain_alone(
    name: str, dtype: torch.dtype, shape: str, batch: str
) -> None:
    model, inputs = without_end(build(name, dtype=dtype, num_hidden_layers=2)), batch_of(batch)
    with hf_spec.invariant(model):
        alone = [model.generate(**row_of(inputs, row), **OPTIONS) for row in range(len(inputs["input_ids"]))]
        text = torch.cat([inputs["input_ids"], torch.cat([one.sequences[:, -NEW:] for one in alone])], dim=1)
        given: dict[str, Any] = {"speculator": "ngram"}
        if shape != "ngram":
            given = {"speculator": Oracle(text), "speculation_config": SHAPES[shape]}
        plain = model.generate(**inputs, **OPTIONS)
        fast = model.generate(**inputs, **OPTIONS, **given)
    assert all(same_bits(plain, one, row) for row, one in enumerate(alone))
    assert all(same_bits(fast, one, row) for row, one in enumerate(alone))
    assert fast.speculation.invariant and (shape == "ngram" or fast.speculation.acceptance_rate > 0.2)
