"""Heads in groups attend over a block without repeated keys and values, and see the same."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import build, prompts
from test_exactness import noisy_copy
from test_static import on_any_device, with_a_cpp_compiler
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from twins import SHAPES, target

import hf_spec
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.proposal import Proposal
from hf_spec.scoring import attention
from hf_spec.scoring.attention import folding
from hf_spec.scoring.runner import ModelRunner

HEADS, KEY_HEADS = 4, 2  # of all models here
CHAIN, TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 2, 2)


@contextlib.contextmanager
def attending(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Note heads, nodes and key heads of every scaled dot product with a mask."""
    plain, seen = torch.nn.functional.scaled_dot_product_attention, []

    def noting(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None:
            seen.append((query.shape[1], query.shape[2], key.shape[1]))
        return plain(query, key, value, attn_mask=attn_mask, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
        yield seen


@torch.no_grad()
def scored(model: PreTrainedModel, parents: tuple[int, ...]) -> Tensor:
    """Score a block behind prompts of three lengths, (rows, nodes, vocabulary)."""
    given = prompts(3)
    runner = ModelRunner(model)
    runner.prefill_tokens(given["input_ids"], given["attention_mask"])
    tokens = prompts(3, (len(parents),), seed=1)["input_ids"]
    shape = torch.tensor([parents] * 3)
    return runner.score(Proposal(tokens, shape, len(parents), is_chain=parents == CHAIN)).logits


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "cohere2", "gpt_bigcode"])
def test_the_same_scores_without_repeated_keys(
    name: str, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    groups = 1 if name == "gpt_bigcode" else KEY_HEADS
    with attending(monkeypatch) as seen:
        found = scored(model, parents)
    blocks = [call for call in seen if call[2] == groups]
    assert set(blocks) == {(groups, len(parents) * HEADS // groups, groups)}
    assert len(blocks) == model.config.num_hidden_layers
    monkeypatch.setattr(attention, "_can_fold", lambda *args: False)
    with attending(monkeypatch) as seen:
        expected = scored(model, parents)
    assert all(key_heads == HEADS for _, _, key_heads in seen)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_repeat_no_keys_either(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("llama")
    eagle = Eagle3DraftModel(
        Eagle3SpeculatorConfig.for_target(model.config, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    ).eval()
    options = {"max_new_tokens": 12, "do_sample": False}
    text = model.generate(**prompts(3), **options)
    for draft in (noisy_copy(model, 0), eagle):
        model.generate(**prompts(3), **options, speculator=draft, speculation_config=SHAPES[shape])  # checks itself
        with attending(monkeypatch) as seen:
            out = model.generate(**prompts(3), **options, speculator=draft, speculation_config=SHAPES[shape])
        assert torch.equal(out, text)
        repeated = {nodes for _, nodes, key_heads in seen if key_heads == HEADS}
        assert min(repeated) >= 12  # prompts are read as ever, and guesses that are read with them
        assert len([call for call in seen if call[2] == KEY_HEADS]) > 10


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_node_is_left_to_transformers(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which packs its heads itself, so that an ordinary step rounds as plain ``generate`` does."""
    model, asked = target("llama"), []
    monkeypatch.setattr(attention, "_can_fold", lambda *args: bool(asked.append(1)))
    with torch.no_grad(), folding():
        mask = torch.ones(1, 1, nodes, nodes, dtype=torch.bool)
        model(torch.full((1, nodes), 7), attention_mask=mask)
    assert len(asked) == (0 if nodes == 1 else model.config.num_hidden_layers)


def test_other_threads_attend_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("llama")
    given = prompts(3)
    with torch.no_grad(), folding(), attending(monkeypatch) as seen:
        model(**given)
        here = len(seen)
        thread = threading.Thread(target=torch.no_grad()(lambda: model(**given)))
        thread.start()
        thread.join()
    assert {key_heads for _, _, key_heads in seen[:here]} == {KEY_HEADS}
    assert {key_heads for _, _, key_heads in seen[here:]} == {HEADS}
    assert len(seen) == 2 * here


def test_compiled_blocks_repeat_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspecting(graph: fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                query, key = (argument.meta["example_value"] for argument in node.args[:2])
                shapes.append((query.shape[1], query.shape[2], key.shape[1]))
        return graph.forward

    shapes: list[tuple[int, int, int]] = []
    model = target("llama")
    text = model.generate(**prompts(1), max_new_tokens=16, do_sample=False)
    config = on_any_device(backend=inspecting)
    torch._dynamo.reset()
    found = []
    for ways in ({"speculator": noisy_copy(model, 0), "num_speculative_tokens": 4}, {}):
        options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
        assert torch.equal(model.generate(**prompts(1), **options, **ways, compile_config=config), text)
        found.append([*shapes])
        shapes.clear()
    torch._dynamo.reset()
    assert set(found[0]) == {(KEY_HEADS, nodes * HEADS // KEY_HEADS, KEY_HEADS) for nodes in (1, 5)}
    assert set(found[1]) == {(HEADS, 1, HEADS)}  # transformers' own graph is what it was


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_boolean", [True, False])
@pytest.mark.parametrize(("heads", "nodes"), [(3, 1), (6, 1), (6, 2)])
def test_attention_that_is_written_out(heads: int, nodes: int, is_boolean: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, *shape) for shape in ((heads, nodes, 8), (3, 5, 8), (3, 5, 4)))
    shown = torch.rand(2, 1, nodes, 5) > 0.4
    shown[..., 0] = True
    mask = shown if is_boolean else torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)
    kernel = functools.partial(nn.functional.scaled_dot_product_attention, enable_gqa=True, scale=scale)
    wanted = kernel(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(attention._written_out(query, key, value, mask, scale), wanted)
    assert not torch.allclose(attention._written_out(query, key, value, shown | True, scale), wanted)
    nothing = attention._written_out(query, key, value, shown & False, scale)
    assert nothing.isfinite().all()  # a row that sees nothing


@pytest.mark.parametrize(
    ("changed", "is_written_out"),
    [
        ({}, True),
        ({"dtype": torch.float16, "key_heads": 2}, True),
        ({"dtype": torch.float32}, False),
        ({"key_heads": 2}, False),
        ({"nodes": 2}, False),
        ({"fuses": False}, False),  # all products would be in memory
    ],
    ids=["bfloat16", "float16 in groups", "float32", "bfloat16 in groups", "two nodes", "another compiler"],
)
def test_what_graphs_write_out(changed: dict[str, Any], is_written_out: bool) -> None:
    case = {"dtype": torch.bfloat16, "key_heads": HEADS, "nodes": 1, "fuses": True} | changed
    model = build("llama", num_hidden_layers=2, num_key_value_heads=case["key_heads"]).to(case["dtype"])
    kernels: list[int] = []

    def counting(graph: fx.GraphModule, inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes]
        kernels.append(targets.count(torch.nn.functional.scaled_dot_product_attention))
        return graph.forward

    ids, mask = torch.full((2, case["nodes"]), 7), torch.ones(2, 1, case["nodes"], case["nodes"], dtype=torch.bool)
    attention._hook_attention()
    torch._dynamo.reset()
    with torch.no_grad(), attention.folding_in_graphs(case["fuses"]):
        found = torch.compile(model, backend=counting, fullgraph=True, dynamic=False)(ids, attention_mask=mask).logits
    torch._dynamo.reset()
    assert kernels == [0 if is_written_out else 2]
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, wanted, atol=0.05 * wanted.float().std().item(), rtol=0)


@pytest.mark.slow
@with_a_cpp_compiler
def test_inductor_fuses_what_is_written_out() -> None:
    model = build("llama", num_hidden_layers=1, num_key_value_heads=HEADS).to(torch.bfloat16)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    options["compile_config"] = on_any_device(backend="inductor", mode="default")
    torch._dynamo.reset()
    asked = {}
    for nodes in (1, 3):
        ways = {"speculator": "plain"} if nodes == 1 else {"speculator": noisy_copy(model, 0)}
        for _ in range(2):  # the second one compiles nothing
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                out = model.generate(**prompts(1), **options, **ways, return_dict_in_generate=True)
        assert out.speculation.graphs == 0
        calls = {event.key: event.count for event in profile.key_averages()}
        asked[nodes] = calls["aten::_scaled_dot_product_flash_attention_for_cpu"]
    torch._dynamo.reset()
    assert asked[1] == 1  # of the prompt, which is not compiled
    assert asked[3] > 1


class Module(nn.Module):
    num_key_value_groups = 2


LEFT_ALONE = {
    "no mask": {"mask": None},
    "a mask for each head": {"mask": torch.ones(1, 4, 3, 7, dtype=torch.bool)},
    "no groups": {"key": torch.ones(1, 4, 7, 8)},
    "dropout": {"others": {"dropout": 0.1}},
    "a bias": {"others": {"position_bias": torch.ones(1, 4, 3, 7)}},
    "sinks": {"others": {"s_aux": torch.ones(4)}},
    "a soft cap": {"others": {"softcap": 30.0}},
    "a paged cache": {"others": {"cache": object()}},
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone(case: str) -> None:
    usual = {"query": torch.ones(1, 4, 3, 8), "key": torch.ones(1, 2, 7, 8), "others": {}}
    usual["mask"] = torch.ones(1, 1, 3, 7, dtype=torch.bool)

    def can_fold(query: Tensor, key: Tensor, mask: Tensor | None, others: dict[str, Any]) -> bool:
        return attention._can_fold(Module(), query, key, key, mask, others)

    assert can_fold(**usual)
    assert not can_fold(**usual | LEFT_ALONE[case])


def test_uninstall_gives_transformers_its_attention_back() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]  # a copy of hf_spec that other tests loaded may have wrapped it, too
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    try:
        scored(target("llama"), CHAIN)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"]._hf_spec_original is sdpa_attention_forward
        hf_spec.uninstall()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    finally:
        AttentionInterface.register("sdpa", before)
        hf_spec.install()
