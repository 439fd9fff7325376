"""Adapters of PEFT and quantised layers in the mode: computed to the bit, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import each_value, usual
from peft import LoraConfig, get_peft_model
from test_invariance import DTYPES, OPTIONS, alone_differs, compare, row_of, same_bits, target
from test_invariance import short_parts as short_parts
from test_quantized import bitsandbytes, dynamic, torchao
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

import hf_spec
from hf_spec.invariance import columns, mode
from hf_spec.invariance.rows import SIZES, cancelling


def small(**options: Any) -> Any:
    model = copy.deepcopy(build("llama", num_hidden_layers=2, **options))
    model.generation_config.eos_token_id = None
    return model


def adapted(model: Any) -> Any:
    """Put two adapters on a model; the first is active."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(model, config, "one")
    model.add_adapter("two", config)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_have_the_bits_of_plain_alone(dtype: torch.dtype) -> None:
    model = adapted(small(dtype=dtype))
    with hf_spec.invariant(model) as invariance:
        assert sum(invariance.products.values()) == 15 + 2 * 2 * 3 * 2  # layers, adapters, places, factors
        compare(model.get_base_model(), "tree", "three")
        model.merge_adapter()
        compare(model.get_base_model(), "chain", "three")


def test_a_row_may_have_an_adapter_of_its_own() -> None:
    model, inputs, names = adapted(small(dtype=torch.bfloat16)), prompts(3, (28, 9, 21)), ["one", "__base__", "two"]
    with hf_spec.invariant(model):
        alone = [model.generate(**row_of(inputs, row), **OPTIONS, adapter_names=[names[row]]) for row in range(3)]
        fast = model.generate(**inputs, **OPTIONS, adapter_names=names, speculator="ngram")
    assert all(same_bits(fast, one, row) for row, one in enumerate(alone))


def test_adapters_may_change_before_each_row_names_its_own() -> None:
    model, inputs, names = adapted(small(dtype=torch.bfloat16)), prompts(3, (28, 9, 21)), ["one", "__base__", "two"]
    with hf_spec.invariant(model):
        wanted = model.generate(**inputs, **OPTIONS, adapter_names=names)
        model.set_adapter("two")
        for speculator in ("ngram", "plain"):
            fast = model.generate(**inputs, **OPTIONS, adapter_names=names, speculator=speculator)
            assert torch.equal(fast.sequences, wanted.sequences) and torch.equal(fast.logits[0], wanted.logits[0])


def test_adapters_that_come_later_are_tried_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checked = small(dtype=torch.bfloat16), []
    check = mode.check_bits
    monkeypatch.setattr(mode, "check_bits", lambda model: checked.append(check(model)))
    with hf_spec.invariant(model) as invariance:
        text = model.generate(**prompts(2, (9, 5)), **OPTIONS).sequences
        wrapped = adapted(model)
        assert len(checked) == 1
        compare(model, "ngram", "three")
        assert len(checked) == 2 and sum(invariance.products.values()) == 15 + 2 * 2 * 3 * 2
        for wanted in (3, 3):  # once for the other adapter, and not again
            wrapped.set_adapter("two")
            assert not torch.equal(wrapped.generate(**prompts(2, (9, 5)), **OPTIONS).sequences, text)
            assert len(checked) == wanted
        with wrapped.disable_adapter():
            assert torch.equal(wrapped.generate(**prompts(2, (9, 5)), **OPTIONS).sequences, text)
    assert not any("forward" in vars(module) for module in model.modules())


class OfAllRows(nn.Module):
    """An adapter whose output depends on all rows."""

    def forward(self, states: Tensor) -> Tensor:
        return states * states.abs().amax()


def test_an_adapter_that_looks_at_all_rows_ends_the_mode() -> None:
    model = adapted(small())
    with hf_spec.invariant(model):
        wrapped = model.base_model.model.model.layers[1].self_attn.q_proj
        wrapped.lora_dropout["two"] = OfAllRows()
        model.generate(**prompts(1), **OPTIONS)  # it is not active yet
        model.set_adapter("two")
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj"):
            model.generate(**prompts(1), **OPTIONS)
    assert not mode.is_invariant(model)


def test_a_mode_ends_that_cannot_be_renewed() -> None:
    """The adapters have changed, and meanwhile the model is in train mode; later both are as they were."""
    model = adapted(small())
    with hf_spec.invariant(model):
        model.set_adapter("two")
        model.train()
        with pytest.raises(ValueError, match="train mode"):
            model.generate(**prompts(1), **OPTIONS)
        assert not mode.is_invariant(model)
        model.set_adapter("one")
        model.eval()
        out = model.generate(**prompts(1), **OPTIONS, speculator="ngram")
        assert not out.speculation.invariant
    with hf_spec.invariant(model):
        assert mode.is_invariant(model), "it can be entered again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_weights_of_torchao_have_the_bits_of_plain_alone(dtype: torch.dtype) -> None:
    model = torchao(small(dtype=dtype))
    with hf_spec.invariant(model) as invariance:
        assert sum(invariance.products.values()) == 15
        compare(model, "tree", "three")


def test_trials_bring_products_of_other_weights_close_to_zero() -> None:
    layer = torchao(small(dtype=torch.bfloat16)).model.layers[0].mlp.up_proj
    found = layer(cancelling(layer, torch.randn(SIZES[-1], layer.in_features).bfloat16())).abs()
    assert (found < found.median() / 1000).any(1).float().mean() > 0.5


def test_trials_see_an_order_that_a_bias_added_later_hides(monkeypatch: pytest.MonkeyPatch, seeded: None) -> None:
    """Falcon's layers round the product before they add their bias."""

    def halves(self: nn.Linear, states: Tensor) -> Tensor:
        weight, states = self.weight.float(), states.float()
        parts = (slice(32), slice(32, 64)) if len(states) == 1 else (slice(64),)
        product = sum(states[:, part] @ weight[:, part].T for part in parts).bfloat16()
        return product if self.bias is None else product + self.bias

    monkeypatch.setattr(FalconLinear, "forward", halves)
    layer, states = FalconLinear(64, 32).bfloat16(), torch.randn(SIZES[-1], 64).bfloat16()
    layer.bias.data.fill_(1000)
    with torch.no_grad():
        assert 1 not in mode._sizes_of(layer, states)
        monkeypatch.setattr(mode, "multiplies_rows", lambda module: False)
        assert 1 in mode._sizes_of(layer, states)  # the bias hides it
    assert layer.bias is not None


def test_one_scale_for_all_rows_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cannot be made invariant: model\.layers\.0\.self_attn\.\w+ \(Linear\) computes"
    ):
        hf_spec.invariant(dynamic(small()))


def test_layers_with_products_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"q_proj \(Linear4bit\) is quantised"):
        hf_spec.invariant(bitsandbytes(small()))


# -- mixtures of experts, caps of scores ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("mixtral", torch.float32), ("gpt_oss", torch.bfloat16)], ids=str)
def test_experts_compute_row_by_row(name: str, dtype: torch.dtype) -> None:
    model = target(name, dtype=dtype)
    with hf_spec.invariant(model) as invariance:
        assert set(invariance.mixtures) == {(1,)} and "mixtures of experts" in str(invariance)
        compare(model, "tree", "three")


def test_the_way_of_experts_stays_as_it_was_compared() -> None:
    model = copy.deepcopy(target("qwen2_moe", dtype=torch.bfloat16))
    model.set_experts_implementation("batched_mm")
    with hf_spec.invariant(model) as invariance:
        assert set(invariance.mixtures) == {(1,)}
        compare(model, "tree", "three")
        model.set_experts_implementation("grouped_mm")
        with pytest.raises(ValueError, match="experts' implementation was set"):
            model.generate(**prompts(1), **OPTIONS)


def test_experts_that_compute_the_rows_of_a_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not alone_differs():
        pytest.skip("this processor multiplies one row as it does several")
    monkeypatch.setattr(mode, "mixture_in_sizes", lambda compute, states, sizes: compute(states))
    with pytest.raises(ValueError, match=r"mlp\S* .*computes other bits"):
        hf_spec.invariant(target("mixtral"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_capped_scores_have_the_bits_of_plain_alone(dtype: torch.dtype) -> None:
    model = target("gemma2", dtype=dtype)
    with hf_spec.invariant(model):
        compare(model, "tree", "three")


def test_capped_scores_are_those_of_transformers() -> None:
    model, inputs = target("gemma2", attn_implementation="eager"), prompts(2, (28, 9))
    wanted = model(**inputs).logits
    with hf_spec.invariant(model):
        found = model(**inputs).logits
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-4, atol=1e-4)


# -- attention of a model's own, ALiBi, short convolutions ------------------------------------------------------------

OWN = ["bloom", "mpt", "falcon", "falcon:new", "lfm2"]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "batch"), each_value(OWN, DTYPES, ["chain", "ngram"], ["one", "three"])
)
def test_attention_of_its_own_has_the_bits_of_plain_alone(
    name: str, dtype: torch.dtype, shape: str, batch: str
) -> None:
    model = target(name, dtype=dtype)
    with hf_spec.invariant(model):
        compare(model, shape, batch)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", usual(["falcon", "lfm2"], ["lfm2"]))
def test_trees_of_such_models_have_them_too(name: str) -> None:
    model = target(name)
    with hf_spec.invariant(model):
        compare(model, "tree", "three")


@pytest.mark.parametrize("name", usual(OWN, ["bloom", "mpt", "falcon"]))
def test_such_attention_is_that_of_transformers(name: str) -> None:
    model, inputs = target(name), prompts(3, (28, 9, 21))
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        wanted = model(**inputs).logits
        with hf_spec.invariant(model):
            found = model(**inputs).logits
            duplicate = copy.deepcopy(model)
        again = duplicate(**inputs).logits
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-4, atol=1e-4)
    assert torch.equal(again, wanted)


def test_distances_from_the_last_column_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPT's own biases, by the distance to the last column of a forward, depend on how many tokens are read."""

    def bias_of(self: columns.Text, bias: Tensor) -> Tensor:
        return (bias[:, None, None] * (self.place - self.place.amax())).expand(-1, len(self.visible), -1)

    monkeypatch.setattr(columns.Text, "bias_of", bias_of)
    with pytest.raises(ValueError, match=r"transformer\..* computes other bits"):
        hf_spec.invariant(target("mpt"))
