"""A small model inflated to the cost of a big one says the same, and its drafts guess as well."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import each_value
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_spec import SpeculationConfig, VanillaSpeculator, demo
from hf_spec.demo.inflation import Narrowed, inflate

SIZES = {"hidden_size": 288, "intermediate_size": 512, "num_hidden_layers": 13}
STORY = "Once upon a time, there was a little dog named Max."


def tiny_llama(spread: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        initializer_range=spread,
        rms_norm_eps=1e-3,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.randint(3, 2048, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_an_inflated_model_says_the_same():
    small = tiny_llama(spread=0.2)
    for norm in (module for name, module in small.named_modules() if "norm" in name):
        torch.nn.init.normal_(norm.weight, mean=1)
    large = inflate(small, hidden_size=96, intermediate_size=128, num_hidden_layers=5)
    assert large.num_parameters() > 2 * small.num_parameters()
    assert large.config.num_attention_heads // large.config.num_key_value_heads == 2
    expected = logits(small)
    torch.testing.assert_close(logits(large), expected, atol=1e-4, rtol=0)
    for module in large.modules():  # negative control: the epsilon matters
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = small.config.rms_norm_eps
    assert (logits(large) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("sizes", "problem"), [((16, 128, 5), "hidden_size is 16"), ((40, 128, 5), "multiple of 16")])
def test_sizes_that_hold_no_small_model_are_refused(sizes, problem):
    with pytest.raises(ValueError, match=problem):
        inflate(tiny_llama(0.2), *sizes)


@pytest.fixture(scope="module")
def family() -> tuple[Any, Any]:
    """Return the demo target and the same one inflated."""
    small = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    return small, inflate(small, **SIZES)


@pytest.mark.parametrize(("tree", "name"), each_value([None, "dynamic"], demo.MODELS[1:]))
def test_drafts_of_the_small_model_guess_the_same(name: str, tree: Any, family: tuple[Any, Any]) -> None:
    small, large = family
    kind: Any = AutoModelForCausalLM if name == "draft-vanilla" else AutoModel
    draft = kind.from_pretrained(demo.path(name), dtype=torch.float32)
    draft = VanillaSpeculator(draft) if name == "draft-vanilla" else draft
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    inputs = tokenizer([STORY, "Tom and Lily"], return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    config = SpeculationConfig(num_speculative_tokens=4, tree=tree, tree_topk=3, num_tree_tokens=8)
    found = [
        model.generate(**inputs, **options, speculator=speculator, speculation_config=config)
        for model, speculator in ((small, draft), (large, Narrowed(draft, small)))
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert found[0].speculation.counts == found[1].speculation.counts
    assert found[1].speculation.accepted > 5
    assert torch.equal(large.generate(**inputs, max_new_tokens=24, do_sample=False), found[1].sequences)


def test_the_script_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "examples" / "inflate_llama.py"
    sizes = [
        f"--{name}={SIZES[key]}" for name, key in (("hidden-size", "hidden_size"), ("layers", "num_hidden_layers"))
    ]
    monkeypatch.setattr(sys, "argv", [str(script), str(demo.path()), str(tmp_path), *sizes, "--intermediate-size=512"])
    runpy.run_path(str(script), run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 288 and len(AutoTokenizer.from_pretrained(tmp_path)) == 2048
