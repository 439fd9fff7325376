"""Packed weights in compiled forwards: the text of eager ones, and graphs that hold no weights."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import environment
from layouts import take_layout
from test_static import on_any_device, with_a_cpp_compiler
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import hf_spec
from hf_spec import Eagle3SpeculatorConfig, SpeculationConfig
from hf_spec.packing import graphs as packing_graphs
from hf_spec.packing.float16 import Float16Weight
from hf_spec.packing.graphs import packed_in_graphs, packed_product
from hf_spec.packing.packing import _reordered, is_packed, multiplies, why_not_here
from hf_spec.packing.weight import BIG, NOT_TRACED
from hf_spec.scoring import compiled, graphs
from hf_spec.training import new_draft

pytestmark = pytest.mark.skipif(
    why_not_here(torch.float32, force=True) is not None, reason=str(why_not_here(torch.float32, force=True))
)
IDS = torch.arange(3, 35).view(2, 16)
WAYS = ("plain", "n-grams", "draft model", "draft model, trees", "EAGLE-3", "EAGLE-3, lent weights")


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the layout that the parameter names, or else oneDNN's, whatever this processor would take."""
    take_layout(next((one for one in ("kept", "float16") if one in request.param), "in blocks"), monkeypatch)
    return str(request.param)


def make(layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    given = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    given |= {"num_hidden_layers": layers, "vocab_size": 1024, "tie_word_embeddings": True, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**given | overrides)).eval().bfloat16().to(dtype)
    assert hf_spec.pack(model, force=True).packed or dtype != torch.float32
    return model


def compiling(backend: str = "eager", **options: Any) -> dict[str, Any]:
    return {"cache_implementation": "static", "compile_config": on_any_device(backend=backend, **options)}


def speculating(way: str, target: Any) -> dict[str, Any]:
    if way in ("plain", "n-grams"):
        return {"speculator": {"plain": "plain", "n-grams": "ngram"}[way]}
    if "EAGLE-3" in way:
        torch.manual_seed(2)
        shared = ["embed_tokens", "lm_head"] if "lent" in way else []
        config = Eagle3SpeculatorConfig.for_target(target.config, shared_with_target=shared)
        draft = new_draft(config, target).eval()
    else:
        draft = make(layers=1, seed=1)
    hf_spec.pack(draft, force=True)
    tree = {"tree": "dynamic", "num_tree_tokens": 6} if "trees" in way else {}
    return {"speculator": draft, "speculation_config": SpeculationConfig(num_speculative_tokens=3, **tree)}


def text(model: Any, ids: Tensor = IDS, **options: Any) -> Any:
    given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(ids, **given | options)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids).logits
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of forwards that run as they are."""
    lines: list[str] = []
    for part in (compiled, graphs):
        monkeypatch.setattr(part.logger, "warning", lines.append)
    return lines


@pytest.mark.parametrize("layout", ["tied", "untied", "tied, kept", "tied, float16"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_text_is_the_eager_one(way: str, layout: str, told: list[str]) -> None:
    model = make(tie_word_embeddings=layout != "untied")
    assert (model.lm_head.weight._storage.kept_for > 0) == ("kept" in layout)
    assert isinstance(model.lm_head.weight._storage.packed, Float16Weight) == ("float16" in layout)
    speculator = speculating(way, model)
    expected = text(model).sequences
    for call in range(2):
        out = text(model, **speculator, **compiling())
        assert torch.equal(out.sequences, expected)
        assert is_packed(model) and (out.speculation.graphs > 0) == (call == 0)
    assert torch.equal(text(model, IDS[:1], **speculator, **compiling()).sequences, expected[:1])
    assert not told


def test_a_seed_draws_the_same_compiled() -> None:
    model = make()
    draft = speculating("draft model", model)
    drawn = []
    for options in ({"cache_implementation": "static"}, compiling()):
        torch.manual_seed(5)
        drawn.append(text(model, do_sample=True, **draft, **options).sequences)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("layout", ["in blocks", "kept", "float16"], indirect=True)
def test_a_graph_holds_no_weights(layout: str) -> None:
    """It reads those of today: after training, and packing anew, the same graph writes another text."""
    torch._dynamo.reset()
    model = make()
    options = {"speculator": "plain"} | compiling()
    before = text(model, IDS[:1], **options).sequences
    hf_spec.unpack(model)
    plain = text(model, IDS[:1], **options)
    assert torch.equal(plain.sequences, before) and plain.speculation.graphs == 1  # of plain weights
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.add_(torch.randn_like(weight) / 10).copy_(weight.bfloat16())
    changed = text(model, IDS[:1]).sequences
    assert not torch.equal(changed, before)
    assert hf_spec.pack(model, force=True).packed
    out = text(model, IDS[:1], **options)
    assert torch.equal(out.sequences, changed) and out.speculation.graphs == 0


def test_prompts_in_chunks(told: list[str]) -> None:
    model = make()
    expected = text(model, IDS[:1]).sequences
    for way in ("n-grams", "EAGLE-3"):
        options = speculating(way, model) | compiling() | {"prefill_chunk_size": 6}
        assert torch.equal(text(model, IDS[:1], **options).sequences, expected)
    assert is_packed(model) and not told


def test_adapters_are_compiled(told: list[str]) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.mul_(10)
    model = adapted.base_model.model.eval()
    expected = text(model).sequences
    out = text(model, speculator="ngram", **compiling())
    assert torch.equal(out.sequences, expected) and out.speculation.graphs > 0 and is_packed(model)
    with adapted.disable_adapter():
        plain = text(model).sequences
        assert not torch.equal(plain, expected)
        assert torch.equal(text(model, speculator="ngram", **compiling()).sequences, plain)
    assert torch.equal(text(model, speculator="ngram", **compiling()).sequences, expected) and not told


def test_what_no_graph_can_hold_is_plain_or_refused() -> None:
    torch.manual_seed(0)
    layer, states = nn.Linear(256, 512), torch.randn(4, 256)
    weight = layer.weight.detach().clone()

    def asked(states: Tensor) -> Tensor:
        is_mine = layer.weight.is_floating_point() and layer.weight.dtype == states.dtype
        return functional.linear(states, layer.weight, layer.bias) * (is_mine * layer.weight.shape[1])

    def added(states: Tensor) -> Tensor:
        return functional.linear(states, layer.weight + 1)

    def converted(states: Tensor) -> Tensor:
        return layer(states.double())

    expected = asked(states).detach()
    assert hf_spec.pack(layer, force=True).packed
    with torch.no_grad(), packed_in_graphs():
        found = torch.compile(asked, backend="eager", fullgraph=True)(states)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3) and is_packed(layer)
        with pytest.raises(Exception, match="PackedWeight"):
            torch.compile(added, backend="eager", fullgraph=True)(states)
        assert is_packed(layer)
        found = torch.compile(added, backend="eager")(states)
        assert torch.allclose(found, functional.linear(states, weight + 1), rtol=1e-3, atol=1e-3)
    assert not is_packed(layer)
    assert hf_spec.pack(layer, force=True).packed
    for mode in (torch.no_grad(), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16)):
        with mode, packed_in_graphs(), pytest.raises(Exception, match=NOT_TRACED):
            torch.compile(converted, backend="eager", fullgraph=True)(states)
    assert is_packed(layer) and torch.equal(layer.weight.to(weight.dtype).detach(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 1), (3,), (9,), (65,)], ids=str)
@pytest.mark.parametrize("layout", ["in blocks", "kept", "float16"], indirect=True)
def test_the_product_in_graphs_has_the_bits_of_the_eager_one(
    dtype: torch.dtype, rows: tuple[int, ...], layout: str
) -> None:
    torch.manual_seed(0)
    if not multiplies(dtype):
        pytest.skip(f"oneDNN multiplies no {dtype} on this processor")
    wide = nn.Linear(256, BIG // 256 // dtype.itemsize)  # so large that few rows are computed as more
    layers = nn.Sequential(wide, nn.Linear(wide.out_features, 64, bias=False)).bfloat16().to(dtype)
    assert len(hf_spec.pack(layers, force=True).packed) == 2
    states = torch.randn(*rows, 256).to(dtype)
    with torch.no_grad(), packed_in_graphs():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layers, backend="aot_eager", fullgraph=True)(states), layers(states))
    assert is_packed(layers)


def test_a_product_without_values_has_its_shape() -> None:
    weight = torch.randn(64, 32)
    found = packed_product(torch.randn(2, 3, 32), _reordered(weight), torch.randn(64))
    bare = packed_product(torch.randn(2, 3, 32, device="meta"), weight.to("meta"), None)
    assert found.shape == bare.shape == (2, 3, 64) and bare.is_meta


@pytest.mark.slow
@with_a_cpp_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpp_wrapper", [False, True])
@pytest.mark.parametrize("layout", ["in blocks", "kept"], indirect=True)
def test_inductor_calls_the_product_itself(
    layout: str, cpp_wrapper: bool, dtype: torch.dtype, told: list[str]
) -> None:
    if reason := why_not_here(dtype, force=True):
        pytest.skip(reason)
    torch._dynamo.reset()
    model = make(dtype=dtype)
    options = compiling("inductor", options={"cpp_wrapper": cpp_wrapper})
    options |= speculating("draft model", model) | {"output_logits": True, "max_new_tokens": 6}
    least = 1e-4 if dtype == torch.float32 else 3e-2
    for ids in (IDS[:1], IDS[:1, :9]):
        out = text(model, ids, **options)
        asked = logits(model, out.sequences[:, :-1])[:, ids.shape[1] - 1 :]
        found = torch.stack(out.logits, dim=1)
        assert torch.allclose(found.float(), asked.float(), rtol=0, atol=least * float(asked.abs().max()))
    assert is_packed(model) and not told


ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[2:]
from test_packed_graphs import IDS, compiling, make, text, torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)
model = make(seed=int(sys.argv[1]))
out = text(model, IDS[:1], speculator="plain", **compiling("inductor"))
assert torch.equal(out.sequences, text(model, IDS[:1]).sequences)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@with_a_cpp_compiler
def test_another_process_finds_the_graph_and_reads_its_own_weights(tmp_path: Path) -> None:
    place = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    figures = []
    for seed in ("0", "1"):
        command = [sys.executable, "-c", ANOTHER_PROCESS, seed, str(Path(__file__).parent), *sys.path]
        done = subprocess.run(command, env=place, capture_output=True, text=True, check=True)
        figures.append(done.stdout.split())
    assert figures == [["1", "0"], ["0", "1"]]


def test_another_copy_of_the_code_takes_no_operator_away() -> None:
    """A draft that was published with its code brings one, and loads next to hf_spec.

    A copy that made the operator anew would free the memory of the first one, which may work for a while.
    """
    assert runpy.run_path(packing_graphs.__file__)["packed_product"] is packed_product
    torch.manual_seed(0)
    weight, states = torch.randn(64, 32), torch.randn(2, 32)
    assert torch.allclose(packed_product(states, _reordered(weight), None), states @ weight.T, atol=1e-4)
