"""Over a static cache the text is plain `generate`'s too, compiled or not, and no graph is made without need.

Rings are short here, so that texts of 37 tokens grow out of them and windows go round in them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import CORE, USUAL, build, prompts
from groups import environment
from pairs import each_value, usual
from peft import LoraConfig, get_peft_model
from test_exactness import BATCHES, CHAIN, NEW_TOKENS, NO_TREES, TREE, flawed, noisy_copy
from test_inputs import tiny
from torch import Tensor, fx
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from twins import Heard, Oracle, target

from hf_spec import Eagle3SpeculatorConfig, NgramSpeculator, Proposal, SpeculationConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.scoring import rings
from hf_spec.scoring.compiled import CompiledForward
from hf_spec.scoring.factory import runner_for
from hf_spec.scoring.kept import KeptBuffers
from hf_spec.scoring.names import CACHE
from hf_spec.scoring.plain import new_cache, new_static_cache, prompt_kwargs
from hf_spec.scoring.rings import Ring, fewest_slots, power_of_two, ring_size
from hf_spec.scoring.static import StaticTreeKVCache
from hf_spec.training import new_draft

COMPILED = ("llama", "gemma2")
NOT_COMPILED = ("bloom", "mpt", "bart")
# Transformers reads no prompt of theirs over a static cache.
NO_STATIC = ("falcon:alibi",)

with_a_cpp_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler here")


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 16)
    monkeypatch.setattr(rings, "STEP", 4)


def on_any_device(**options: Any) -> CompileConfig:
    """Compile here too: plain `generate` compiles on accelerators only, unless it is told to."""
    config = CompileConfig(**{"backend": "eager", "fullgraph": True, "mode": None} | options)
    config._compile_all_devices = True
    return config


def generate(model: PreTrainedModel, batch: int, **options: Any) -> Any:
    inputs = {**prompts(batch, BATCHES[batch]), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(**inputs | options)


def guessing(model: PreTrainedModel, batch: int, text: Tensor, config: SpeculationConfig, **options: Any) -> Any:
    ways = {"speculator": NgramSpeculator(corpus=flawed(text)), "cache_implementation": "static"}
    return generate(model, batch, speculation_config=config, **ways | options)


# -- rings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_ring_holds_the_last_columns(size: int) -> None:
    ring = Ring(size)
    for end in range(3 * size):
        slots = [-1] * size
        for column in range(end):
            slots[column % size] = column
        found = ring.columns(torch.tensor([end]))[0]
        assert found.where(found >= 0, -1).tolist() == slots


def test_sizes_are_few() -> None:
    assert [power_of_two(number) for number in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [fewest_slots(columns) for columns in (None, 8, 9, 1000)] == [16, 8, 16, 16]
    assert [ring_size(None, end, 5, 16) for end in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    assert {ring_size(8, end, 5, 16) for end in range(1, 200)} == {12}  # 7 columns and 5 nodes


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual([name for name in CORE if name not in NO_STATIC], set(USUAL) - set(NO_STATIC)))
def test_same_text_as_plain_generate(name: str) -> None:
    """Each way in one of the batches, the next architecture in the next one."""
    model, turn = build(name), CORE.index(name)
    texts = {batch: generate(model, batch) for batch in BATCHES}
    ways: list[tuple[SpeculationConfig, dict[str, Any]]] = [
        (CHAIN, {"speculator": noisy_copy(model, 0)}),
        (CHAIN, {}),
        (TREE, {}),
    ]
    for place, (config, options) in enumerate(ways[: 2 if name in NO_TREES else 3]):
        batch = list(BATCHES)[(turn + place) % len(BATCHES)]
        assert torch.equal(guessing(model, batch, texts[batch], config, **options), texts[batch]), (batch, config.tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CORE if name not in NO_STATIC])
def test_same_text_in_every_way_and_batch(name: str) -> None:
    model = build(name)
    for batch in BATCHES:
        text = generate(model, batch)
        for config in (CHAIN, TREE)[: 1 if name in NO_TREES else 2]:
            assert torch.equal(guessing(model, batch, text, config), text), (batch, config.tree)
        assert torch.equal(guessing(model, batch, text, CHAIN, speculator=noisy_copy(model, 0)), text)


@pytest.mark.parametrize("name", NO_STATIC)
def test_what_transformers_cannot_prefill_is_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        generate(model, 1, cache_implementation="static")
    with pytest.raises(ValueError, match=r"own plain steps, which fail with text alone .* leave the cache dynamic"):
        guessing(model, 1, generate(model, 1), CHAIN)


@pytest.mark.parametrize("name", ["gpt_neo", "imagegpt"])
def test_masks_that_count_columns_are_refused(name: str) -> None:
    """Plain `generate` lets these models attend to slots that are empty, and to as many as the cache has."""
    model = build(name) if name == "gpt_neo" else tiny("ImageGPT", "ForCausalImageModeling")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]])} | {"cache_implementation": "static", "do_sample": False}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"takes no static cache: its causal mask .* leave the cache dynamic"):
            model.generate(**inputs, max_new_tokens=4, speculator="ngram")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "attention"), each_value(["llama", "gemma3_text", "llama4_text", "gpt2"], ["eager", "sdpa"])
)
def test_windows_and_chunks_go_round(name: str, attention: str) -> None:
    """A long text: rings for windows of 8 go round many times, and those for the whole text double twice."""
    model = build(name, attn_implementation=attention)
    for config in (CHAIN, TREE):
        text = generate(model, 3, max_new_tokens=90)
        found = guessing(model, 3, text, config, max_new_tokens=90, return_dict_in_generate=True)
        assert torch.equal(found.sequences, text)
        assert found.speculation.accepted > 20


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_that_end_apart(shape: SpeculationConfig, batch: int) -> None:
    model = target("llama")
    text = generate(model, batch)
    ends = [int(text[row, 20 + 2 * row % 15]) for row in range(batch)]
    options = {"eos_token_id": ends, "pad_token_id": 0, "repetition_penalty": 1.3, "min_new_tokens": 3}
    expected = generate(model, batch, **options, return_dict_in_generate=True, output_scores=True)
    found = guessing(model, batch, text, shape, **options, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        alive = ours.abs().sum(-1) > 0  # rows that are done have no scores
        torch.testing.assert_close(ours[alive], theirs[alive], atol=1e-4, rtol=1e-4)


def test_hidden_states_logits_and_streams() -> None:
    model = target("gemma2")

    told = Heard(), Heard()
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    expected = generate(model, 1, streamer=told[0], **options)
    found = guessing(model, 1, expected.sequences, TREE, streamer=told[1], **options)
    assert told[0].tokens == told[1].tokens
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)


def test_sampling_exactly_draws_the_same_tokens() -> None:
    model = target("llama")
    torch.manual_seed(5)
    text = generate(model, 3, do_sample=True, temperature=2.0)
    torch.manual_seed(5)
    config = SpeculationConfig(num_speculative_tokens=4, verification="exact")
    assert torch.equal(guessing(model, 3, text, config, do_sample=True, temperature=2.0), text)


# -- the cache that is handed in and back -----------------------------------------------------------------------------


def states(cache: Any, row: int, length: int) -> list[Tensor]:
    """Return the keys and values of a row of the first ``length`` columns, those that a layer keeps."""
    found = []
    for layer in cache.layers:
        kept = min(length, layer.max_cache_len)
        found += [layer.keys[row, :, :kept], layer.values[row, :, :kept]]
    return found


@pytest.mark.parametrize(("batch", "name"), each_value([1, 3], ["llama", "gemma2", "gemma3_text", "deepseek_v32"]))
def test_a_static_cache_is_handed_back_with_the_text(name: str, batch: int) -> None:
    model = build(name)
    caches = [StaticCache(config=model.config, max_cache_len=60) for _ in range(2)]
    text = generate(model, batch, past_key_values=caches[0])
    addresses: list[int] = []
    speculator = NgramSpeculator(corpus=flawed(text))
    found = generate(model, batch, past_key_values=caches[1], speculator=speculator, speculation_config=TREE)
    assert torch.equal(found, text)
    length = text.shape[1] - 1
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert isinstance(ours, StaticLayer)
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == length
        assert torch.equal(ours.cumulative_length, theirs.cumulative_length)
        addresses += [ours.keys.data_ptr(), theirs.keys.data_ptr()]
    for row in range(batch):
        both = [states(cache, row, length) for cache in caches]
        torch.testing.assert_close(both[1], both[0], atol=1e-4, rtol=1e-4)
    # Both go on with another question, as in a chat.
    more = torch.cat([text, prompts(batch, (4,), seed=9)["input_ids"]], dim=1)
    mask = torch.cat([prompts(batch, BATCHES[batch])["attention_mask"], torch.ones_like(more[:, 13:])], dim=1)
    again = [
        model.generate(more, attention_mask=mask, max_new_tokens=8, do_sample=False, past_key_values=cache, **ways)
        for cache, ways in zip(caches, ({}, {"speculator": "ngram"}), strict=True)
    ]
    assert torch.equal(again[0], again[1])


def test_the_cache_of_a_call_is_returned_filled() -> None:
    model = target("llama")
    text = generate(model, 3)
    options = {"return_dict_in_generate": True, "eos_token_id": int(text[1, 20]), "pad_token_id": 0}
    expected = generate(model, 3, cache_implementation="static", **options)
    found = guessing(model, 3, text, CHAIN, **options)
    assert type(found.past_key_values) is StaticCache
    length = found.sequences.shape[1] - 1
    for row in range(3):
        ended = (expected.sequences[row, 13:] == options["eos_token_id"]).nonzero()
        until = 13 + int(ended[0]) + 1 if len(ended) else length  # behind its end, plain generate reads padding
        rows = [
            [part[:, : min(until, length)] for part in states(out.past_key_values, row, length)]
            for out in (found, expected)
        ]
        torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("last", [13, 17, 24])
def test_a_failed_call_leaves_what_plain_generate_leaves(name: str, last: int) -> None:
    """That is the text that was seen, but for its last token."""
    model = target(name)
    text = generate(model, 1)

    def fail(ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if ids.shape[1] > last:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    caches = [StaticCache(config=model.config, max_cache_len=60) for _ in range(2)]
    speculator = NgramSpeculator(corpus=flawed(text))
    for cache, ways in zip(caches, ({}, {"speculator": speculator, "speculation_config": TREE}), strict=True):
        with pytest.raises(KeyboardInterrupt):
            generate(model, 1, past_key_values=cache, stopping_criteria=[fail], **ways)
    lengths = [int(cache.get_seq_length()) for cache in caches]
    assert lengths == [last, last]
    both = [states(cache, 0, last) for cache in caches]
    torch.testing.assert_close(both[1], both[0], atol=1e-4, rtol=1e-4)
    rest = [
        generate(model, 1, past_key_values=cache, input_ids=text[:, : last + 1], attention_mask=None)
        for cache in caches
    ]
    assert torch.equal(rest[0], rest[1])


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v32"])
@pytest.mark.parametrize("used", [False, True], ids=["empty", "used"])
def test_a_call_that_fails_before_it_shows_text_leaves_the_cache_as_it_was(name: str, used: bool) -> None:
    model = build(name)
    cache = StaticCache(config=model.config, max_cache_len=70)
    text = generate(model, 1, past_key_values=cache if used else None)
    before, length = copy.deepcopy(cache), 36 if used else 0

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    more = torch.cat([text, text[:, :5]], dim=1)
    options = {"input_ids": more, "attention_mask": None, "past_key_values": cache, "speculator": "ngram"}
    with pytest.raises(KeyboardInterrupt):
        generate(model, 1, logits_processor=[fail], **options)
    assert int(cache.get_seq_length()) == length
    assert all(int(layer.get_seq_length()) == length for layer in cache.layers)
    if used:
        torch.testing.assert_close(states(cache, 0, length), states(before, 0, length), atol=0, rtol=0)
    assert torch.equal(generate(model, 1, **options), generate(model, 1, input_ids=more, attention_mask=None))


def test_draft_tokens_that_overflow_are_rolled_back() -> None:
    """A nan in the slot of a draft token would reach every query of a mask that hides it: 0 * nan."""
    cache = StaticTreeKVCache.adopt(prefilled(target("gemma2")), 1, torch.device("cpu"), 4, None, KeptBuffers())
    cache.make_room(4)
    cache.reserve(4)
    states = torch.full((1, cache.layers[0].keys.shape[1], 4, cache.layers[0].keys.shape[3]), torch.nan)
    before = [layer.keys.clone() for layer in cache.slot_layers]
    for layer in cache.slot_layers:
        layer.update(states, states)
    cache.rows.draft_nodes = 4
    cache.rollback()
    for layer, keys in zip(cache.slot_layers, before, strict=True):
        column = layer.ring.columns(cache.rows.lengths + 4)[0]
        held = (column >= 0) & (column < 13)
        assert torch.equal(layer.keys[:, :, held], keys[:, :, held])
        assert not layer.keys[:, :, ~held].any()
    assert cache.rows.draft_nodes == 0


@torch.no_grad()
def test_a_wider_block_gets_its_room_where_the_text_itself_needs_no_more() -> None:
    cache = StaticTreeKVCache.adopt(prefilled(target("gemma2")), 1, torch.device("cpu"), 1, None, KeptBuffers())
    windows = [layer for layer in cache.slot_layers if layer.window is not None]
    assert windows
    for count in (4, 19):  # the text and either fit 32 slots
        cache.make_room(count)
        assert all(layer.ring.size >= layer.window - 1 + count for layer in windows)


def prefilled(model: PreTrainedModel) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=60)
    inputs = model.prepare_inputs_for_generation(prompts(1, (13,))["input_ids"], past_key_values=cache)
    model(**inputs)
    return cache


# -- compiled ---------------------------------------------------------------------------------------------------------


class Forwards:
    """Note what the compiled forwards of a test were given, and which of them made a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []  # batch, nodes, and the sizes of the rings
        self.compiled: list[tuple[int, ...]] = []
        self.addresses: set[int] = set()
        run = CompiledForward._run

        def noted(forward: CompiledForward, inputs: dict[str, Any]) -> Any:
            cache, before = inputs[CACHE], forward.graphs.made
            shape = (*inputs["input_ids"].shape, *sorted(cache.rings))
            self.addresses.add(cache.layers[0].keys.data_ptr())
            outputs = run(forward, inputs)
            self.shapes.append(shape)
            self.compiled += [shape] * (forward.graphs.made - before)
            return outputs

        monkeypatch.setattr(CompiledForward, "_run", noted)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forwards]:
    torch._dynamo.reset()
    yield Forwards(monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_for_each_shape(name: str, forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 32)
    model = target(name)
    text = generate(model, 3)
    for _ in range(2):
        out = guessing(model, 3, text, TREE, compile_config=on_any_device(), return_dict_in_generate=True)
        assert torch.equal(out.sequences, text)
    assert sorted(forwards.compiled) == sorted(set(forwards.shapes))
    assert {nodes for _, nodes, *_ in forwards.shapes} <= {1, 9}
    assert {size for size, *_ in forwards.shapes} <= {1, 2, 4}
    assert out.speculation.graphs == 0  # all were there from the first call
    assert out.speculation.compile_seconds == 0.0
    assert len(forwards.shapes) > 2 * len(forwards.compiled) > 2  # it did grow


@pytest.mark.parametrize(
    ("new_tokens", "slots"),
    [(12, 32), pytest.param(60, 64, marks=pytest.mark.slow), pytest.param(30, 64, marks=pytest.mark.slow)],
)
def test_rings_are_no_longer_than_the_text_can_get(
    new_tokens: int, slots: int, forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 13 + 12 tokens fits in half of the usual slots, blocks of guesses included, and never needs more."""
    monkeypatch.setattr(rings, "SHORTEST", 64)
    model, draft = target("llama"), noisy_copy(target("llama"), 0)
    options = {"max_new_tokens": new_tokens, "eos_token_id": None}
    text = generate(model, 1, **options)
    for way in ({}, {"speculator": draft}):
        out = guessing(model, 1, text, CHAIN, compile_config=on_any_device(), **options, **way)
        assert torch.equal(out, text)
    assert {shape[2] for shape in forwards.shapes if shape[2] <= 64} == {slots}


def test_plain_generate_has_graphs_left(forwards: Forwards) -> None:
    """Torch makes so many graphs of a model and then none: ours must not be among those of plain `generate`."""
    model = target("llama")
    options = {"cache_implementation": "static", "compile_config": on_any_device()}
    text = generate(model, 3)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert torch.equal(generate(model, 3, **options), text)
        assert torch.equal(guessing(model, 3, text, CHAIN, compile_config=on_any_device()), text)
        assert len(forwards.compiled) > 2
        assert torch.equal(generate(model, 3, **options), text)


def test_torch_without_limits_of_its_own_for_what_it_compiles(
    forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.13 there was one limit for all graphs: what is compiled here gets code of its own."""
    compile_now = torch.compile

    def compile_before(model: Any, *, fullgraph: bool, dynamic: bool, backend: Any, mode: Any, options: Any) -> Any:
        return compile_now(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options)

    monkeypatch.setattr(torch, "compile", compile_before)
    model = target("llama")
    text = generate(model, 3)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            assert torch.equal(guessing(model, 3, text, CHAIN, compile_config=on_any_device()), text)
    assert len(forwards.compiled) > 2


def test_a_graph_holds_nothing_that_changes(forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs need it: no number goes in or comes out but in tensors, and what is written to stays in place."""
    graphs: list[fx.GraphModule] = []

    def inspecting(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(rings, "SHORTEST", 64)
    model = build("gemma3_text")
    text = generate(model, 1)
    assert torch.equal(guessing(model, 1, text, TREE, compile_config=on_any_device(backend=inspecting)), text)
    assert len(graphs) == len(forwards.compiled) > 0
    assert len(forwards.addresses) == 1
    for graph in graphs:
        methods = {node.target for node in graph.graph.nodes if node.op == "call_method"}
        assert not methods & {"item", "tolist", "nonzero", "cpu"}
        examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert examples and all(isinstance(example, Tensor) for example in examples)
        assert all(isinstance(size, int) for example in examples for size in example.shape)


def test_features_and_hidden_states_of_compiled_forwards(forwards: Forwards) -> None:
    """Those before and after the final norm are caught by hooks, others come from transformers."""
    model = target("llama")
    given, block = prompts(3), prompts(3, (5,), seed=3)["input_ids"]
    layers = (1, -1, model.config.num_hidden_layers)
    scores = []
    for cache in (new_cache(model), new_static_cache(model, 60)):
        runner = runner_for(model, cache, layers, hidden_states=True, one_chain=True)
        kwargs = prompt_kwargs(model, given["input_ids"], given["attention_mask"], cache)
        config = GenerationConfig(compile_config=on_any_device())
        with torch.no_grad():
            runner.prefill(given["input_ids"], config, kwargs)
            scores.append(runner.score(Proposal.chain(block[:, 0], block[:, 1:])))
    assert runner.compilation[0] == len(forwards.compiled) == 1
    torch.testing.assert_close(scores[1].logits, scores[0].logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores[1].features, scores[0].features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores[1].hidden_states, scores[0].hidden_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {}], ids=["static", "dynamic"])
def test_what_plain_generate_does_not_compile_is_not_compiled(options: dict[str, Any], forwards: Forwards) -> None:
    """On a CPU neither, unless it is told to."""
    model = target("llama")
    text = generate(model, 3)
    config = on_any_device() if not options else CompileConfig(backend="eager")
    way = {"cache_implementation": None, "return_dict_in_generate": True} | options
    with warnings_of(model) as told:
        out = guessing(model, 3, text, CHAIN, compile_config=config, **way)
    assert torch.equal(out.sequences, text)
    assert out.speculation.graphs == 0
    assert not forwards.shapes
    assert any("unable to meet the criteria for compilation" in message for message in told)


def test_one_warning_where_a_model_cannot_be_compiled(forwards: Forwards) -> None:
    model = build("bloom")
    text = generate(model, 3)
    with warnings_of(model) as told:
        for _ in range(2):
            assert torch.equal(guessing(model, 3, text, CHAIN, compile_config=on_any_device()), text)
    told = [message for message in told if "not compiled" in message]
    assert told == [
        "BloomForCausalLM is not compiled for scoring draft tokens, but runs as it is: it makes its attention masks "
        "inside its forward."
    ]


def test_a_compiler_that_fails_costs_a_warning_only(forwards: Forwards) -> None:
    def failing(graph: fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("no such machine")

    model = noisy_copy(target("llama"), 3)
    text = generate(model, 3)
    with warnings_of(model) as told:
        out = guessing(model, 3, text, TREE, compile_config=on_any_device(backend=failing))
    assert torch.equal(out, text)
    assert ["no such machine" in message for message in told if "not compiled" in message] == [True]
    assert not forwards.shapes
    assert torch.equal(guessing(model, 3, text, TREE, compile_config=on_any_device()), text)
    assert forwards.shapes, "another configuration was not tried"


def test_a_call_without_memory_for_its_graphs_runs_as_it_is_and_the_next_one_compiles(forwards: Forwards) -> None:
    def recording(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    def too_large(graph: fx.GraphModule, inputs: Any) -> Any:
        return recording

    model = noisy_copy(target("llama"), 5)
    text = generate(model, 3)
    with warnings_of(model) as told:
        out = guessing(model, 3, text, TREE, compile_config=on_any_device(backend=too_large))
    assert torch.equal(out, text) and not told
    assert torch.equal(guessing(model, 3, text, TREE, compile_config=on_any_device()), text)
    assert forwards.shapes


def test_masks_that_a_model_does_not_take_are_noticed(forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
    model = noisy_copy(target("llama"), 4)
    text = generate(model, 3)
    mask = CompiledForward._mask
    monkeypatch.setattr(CompiledForward, "_mask", lambda self, inputs: torch.ones_like(mask(self, inputs)))
    with warnings_of(model) as told:
        assert torch.equal(guessing(model, 3, text, TREE, compile_config=on_any_device()), text)
    assert ["something else with masks" in message for message in told if "not compiled" in message] == [True]


def test_threads_take_turns(forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 64)  # few graphs
    model = target("llama")
    texts = [generate(model, batch) for batch in (1, 3)]
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        batch = (1, 3)[index]
        draft = {"speculator": noisy_copy(model, 1)} if index else {}  # fewer graphs than two drafts
        found[index] = guessing(model, batch, texts[index], CHAIN, **draft, compile_config=on_any_device())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], text) for index, text in enumerate(texts))


@contextlib.contextmanager
def warnings_of(model: PreTrainedModel) -> Iterator[list[str]]:
    """Collect what transformers' loggers, ours among them, say."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Handler()
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_spec")]
    transformers.utils.logging.warning_once.cache_clear()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield told
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CORE if name not in (*COMPILED, *NO_STATIC)])
def test_core_architectures_are_compiled_or_said_not_to_be(name: str, forwards: Forwards) -> None:
    model = build(name)
    text = generate(model, 3, max_new_tokens=8)
    with warnings_of(model) as told:
        options = {"max_new_tokens": 8, "compile_config": on_any_device(), "return_dict_in_generate": True}
        out = guessing(model, 3, text, CHAIN, **options)
    assert torch.equal(out.sequences, text)
    assert [True for message in told if "not compiled" in message] == [True] * (name in NOT_COMPILED)
    assert (out.speculation.graphs == 0) == (name in (*NOT_COMPILED, "llama4_text"))  # transformers leaves Llama 4 out


TWO_PROCESSES = """
import torch
from architectures import build, prompts
from transformers import CompileConfig
from torch._dynamo.utils import counters
import hf_spec
torch.set_num_threads(1)
model, config = build("llama", num_hidden_layers=1), CompileConfig(mode="default", fullgraph=True)
config._compile_all_devices = True
options = {"max_new_tokens": 24, "do_sample": False}
ways = {"speculator": "ngram", "num_speculative_tokens": 5, "cache_implementation": "static", "compile_config": config}
text = model.generate(**prompts(3), **options)
assert torch.equal(model.generate(**prompts(3), **options, **ways), text)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@with_a_cpp_compiler
def test_inductor_and_its_cache_between_processes(tmp_path: Path) -> None:
    place = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    figures = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", TWO_PROCESSES], env=place, capture_output=True, text=True, check=True
        )
        figures.append([int(figure) for figure in done.stdout.split()])
    assert figures[0][0] > 0
    assert figures[1] == [0, sum(figures[0])]


@pytest.mark.slow
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_weights_that_the_compiler_packs(cpp_wrapper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 64)
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    draft = new_draft(Eagle3SpeculatorConfig.for_target(model.config), model).eval()
    counters.clear()
    with torch._inductor.config.patch(freezing=True, cpp_wrapper=cpp_wrapper):
        for call, length in enumerate((5, 5, 9, 12)):  # a graph must not keep what it read in the first call
            ids = torch.arange(3, 3 + length)[None]
            text = model.generate(ids, max_new_tokens=12, do_sample=False)
            for speculator in (Oracle(text), draft):
                options = {"cache_implementation": "static", "return_dict_in_generate": True}
                options |= {"compile_config": on_any_device(backend="inductor", mode="default")}
                out = model.generate(
                    ids, max_new_tokens=12, do_sample=False, speculator=speculator, num_speculative_tokens=2, **options
                )
                assert torch.equal(out.sequences, text)
                assert call != 1 or out.speculation.graphs == 0
    assert any("mkldnn" in name and "pack" in name for name in counters["inductor"]), counters["inductor"]
    torch._dynamo.reset()


def test_prompts_in_chunks_may_be_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers compiles the forwards that read them, plain or ours; a draft's hidden states need no graph."""
    monkeypatch.setattr(rings, "SHORTEST", 64)
    model, ids = build("llama", num_hidden_layers=2), prompts(1)["input_ids"]
    text = model.generate(ids, max_new_tokens=8, speculator="ngram")  # from now on masks and attention are looked into
    chunks = {"cache_implementation": "static", "compile_config": on_any_device(), "prefill_chunk_size": 4}
    draft = new_draft(Eagle3SpeculatorConfig.for_target(model.config), model).eval()
    for options in ({}, {"speculator": "ngram"}, {"speculator": draft}):
        assert torch.equal(model.generate(ids, max_new_tokens=8, **chunks, **options), text)


def test_hooks_and_adapters_of_rows_that_come_later_are_in_a_graph() -> None:
    model, given = build("llama", num_hidden_layers=1), prompts(2)
    adapter = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft = get_peft_model(model, adapter, adapter_name="one").eval()
    options = {"cache_implementation": "static", "compile_config": on_any_device(), "num_speculative_tokens": 3}
    for names in (None, ["one", "__base__"], ["__base__", "one"], "steered"):
        if names == "steered":
            names = None
            model.model.layers[0].register_forward_hook(lambda module, args, states: states.roll(1, -1))
        given |= {"do_sample": False, "max_new_tokens": 8, "adapter_names": names}
        text = peft.generate(**given)
        assert torch.equal(peft.generate(**given, speculator=Oracle(text), **options), text)


def test_drafts_that_watch_other_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was made without a hook never calls it."""
    monkeypatch.setattr(rings, "SHORTEST", 64)
    model, ids = build("llama", num_hidden_layers=2), prompts(1)["input_ids"]
    text = model.generate(ids, max_new_tokens=8)
    configs = (MedusaSpeculatorConfig, MTPSpeculatorConfig)
    medusa, mtp = (new_draft(config.for_target(model.config), model).eval() for config in configs)
    options = {"cache_implementation": "static", "compile_config": on_any_device(), "num_speculative_tokens": 2}
    for speculator in ("ngram", medusa, "ngram", mtp, medusa):
        assert torch.equal(model.generate(ids, max_new_tokens=8, speculator=speculator, **options), text)
