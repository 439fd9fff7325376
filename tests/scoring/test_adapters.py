"""An adapter of its own for every row of a batch: PEFT's ``generate(adapter_names=[...])``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build, prompts
from peft import LoraConfig, get_peft_model
from twins import SHAPES, Oracle, noisy

from hf_spec.scoring.adapters import adapted_layers

NAMES = ["one", "__base__", "two"]


def adapted(name: str) -> Any:
    """Put two adapters on a model that change what it writes."""
    config = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj", "out_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(build(name)), config, "one")
    model.add_adapter("two", config)
    return model.eval()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "cache"), [("llama", "dynamic"), ("llama", "static"), ("qwen3_next", "dynamic")])
def test_rows_keep_their_adapters_however_they_advance_and_end(name: str, cache: str, shape: str) -> None:
    model, given = adapted(name), prompts(3, (9, 6, 7))
    options = {"max_new_tokens": 20, "do_sample": False, "adapter_names": NAMES, "cache_implementation": cache}
    text = model.generate(**given, **options)
    alone = model.generate(**given, **options | {"adapter_names": ["__base__"] * 3})
    assert (text != alone).any(1).tolist() == [True, False, True], "the adapters do nothing"
    options |= {"eos_token_id": int(text[0, 13]), "pad_token_id": 0}  # the first row ends early
    plain = model.generate(**given, **options)
    for speculator in (Oracle(text, wrong=3), noisy(build(name))):
        out = model.generate(**given, **options, speculator=speculator, speculation_config=SHAPES[shape])
        assert torch.equal(out, plain)
    assert not adapted_layers(model)


def test_a_first_call_checks_the_target_with_the_adapter_of_the_first_row() -> None:
    """The check reads rows of its own; it runs in the first call, here of one row, and of four in the next."""
    model = adapted("llama")
    for batch in (1, 4):
        names = [*NAMES, "two"][:batch]
        options = {"max_new_tokens": 8, "do_sample": False, "adapter_names": names}
        given = prompts(batch, (9, 6, 7, 5)[:batch])
        plain = model.generate(**given, **options)
        assert torch.equal(model.generate(**given, **options, speculator="ngram"), plain)
