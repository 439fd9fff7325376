"""Layers with packed weights attend with several queries of a key head, and compute what transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_packing import make
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_spec
from hf_spec import integration
from hf_spec.packing import attention
from hf_spec.packing.packing import why_not_here

DTYPES = [torch.bfloat16, torch.float16]
TEXT = torch.arange(3, 43).view(2, 20)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the shapes of queries that are attended to together."""
    found: list[tuple[int, ...]] = []
    together, kernel = attention.folded, functional.scaled_dot_product_attention

    def noting(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(tuple(query.shape))
        return kernel(query, *args, **kwargs)

    def attend(*args: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(functional, "scaled_dot_product_attention", noting)
            return together(*args)

    monkeypatch.setattr(attention, "folded", attend)
    return found


@pytest.fixture(autouse=True)
def attends_together() -> Iterator[None]:
    """Let layers attend together also where this processor packs no weights of half precision."""
    integration.uninstall()
    integration.install()
    attention.attend_together()
    yield
    integration.uninstall()
    integration.install()


def layer(groups: int) -> Any:
    model = make(torch.bfloat16, num_attention_heads=4, num_key_value_heads=4 // groups)
    return model.model.layers[0].self_attn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", ["none", "padding", "numbers"])
def test_the_result_is_that_of_transformers(
    masked: str, groups: int, dtype: torch.dtype, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_is_packed", lambda module: True)
    module = layer(groups)
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 16).to(dtype)
    key, value = (torch.randn(3, 4 // groups, 50, 16).to(dtype) for _ in range(2))
    mask = (
        None
        if masked == "none"
        else torch.arange(50)[None, None, None] >= torch.tensor([0, 7, 30])[:, None, None, None]
    )
    if mask is not None and masked == "numbers":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.3, dropout=0.0)
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert asked == [(3, 4 // groups, max(2, groups), 16)]
    assert found.shape == wanted.shape == (3, 1, 4, 16) and found.is_contiguous()
    assert torch.allclose(found.float(), wanted.float(), atol=2e-2)
    turned = query.roll(1, 1)  # a control: heads at other places are seen
    other, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, turned, key, value, mask, scaling=0.3, dropout=0.0)
    assert not torch.allclose(other.float(), wanted.float(), atol=2e-2)


@pytest.mark.parametrize(
    "what",
    ["not packed", "float32", "several tokens", "gradients", "dropout", "position_bias", "mask of heads", "groups"],
)
def test_everything_else_is_left_to_transformers(
    what: str, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_is_packed", lambda module: what != "not packed")
    module = layer(2)
    if what == "groups":
        module.num_key_value_groups = 1
    dtype = torch.float32 if what == "float32" else torch.bfloat16
    query = torch.randn(1, 4, 2 if what == "several tokens" else 1, 16, requires_grad=what == "gradients").to(dtype)
    key, value = (torch.randn(1, 4 if what == "groups" else 2, 9, 16).to(dtype) for _ in range(2))
    if what == "groups":
        key, value = key[:, :2], value[:, :2]
    mask = torch.zeros(1, 4, 1, 9).to(dtype) if what == "mask of heads" else None
    options: dict[str, Any] = {"dropout": 0.1 if what == "dropout" else 0.0, "scaling": 0.3}
    if what == "position_bias":
        options["position_bias"] = torch.zeros(1, 4, 1, 9).to(dtype)
    assert not attention._is_slow(module, query, key, mask, options)
    if what != "groups":
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
    assert not asked


@pytest.mark.parametrize("first", ["pack", "speculate"])
def test_it_meets_draft_tokens_and_is_undone(first: str, asked: list[tuple[int, ...]]) -> None:
    if reason := why_not_here(torch.bfloat16, force=True):
        pytest.skip(reason)
    model = make(torch.bfloat16)
    integration.uninstall()
    integration.install()
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if first == "speculate":
        model.generate(TEXT, **options, speculator="ngram")
    for _ in range(2):
        hf_spec.pack(model, force=True)
        before = len(asked)
        texts = [
            model.generate(TEXT, **options, **given)
            for given in ({}, {"speculator": "plain"}, {"speculator": "ngram"})
        ]
        assert len(asked) > before and all(torch.equal(text, texts[0]) for text in texts[:2])
        before = len(asked)
        hf_spec.unpack(model)
        model.generate(TEXT, **options)
        assert len(asked) == before, "a plain model attends as transformers does"
    integration.uninstall()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    integration.install()


def test_projections_under_adapters_are_seen() -> None:
    if reason := why_not_here(torch.float32, force=True):
        pytest.skip(reason)
    adapted = get_peft_model(make(), LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    module = adapted.get_base_model().model.layers[0].self_attn
    assert not attention._is_packed(module)
    hf_spec.pack(adapted, force=True)
    assert attention._is_packed(module)
    hf_spec.unpack(adapted)
    assert not attention._is_packed(module)


def test_a_step_has_the_logits_that_transformers_attention_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not_here(torch.bfloat16, force=True):
        pytest.skip(reason)
    model = make(torch.bfloat16)
    hf_spec.pack(model, force=True)

    @torch.no_grad()
    def step() -> Tensor:
        cache = DynamicCache(config=model.config)
        model(TEXT, past_key_values=cache)
        return model(TEXT[:, :1], past_key_values=cache).logits.float()

    found = step()
    monkeypatch.setattr(attention, "_is_packed", lambda module: False)
    wanted = step()
    assert torch.allclose(found, wanted, atol=2e-2 * float(wanted.abs().max()))
