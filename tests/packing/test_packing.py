"""Packed weights: the same numbers as plain ones whatever is done with the model, and the same bits once undone."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import environment
from layouts import take_layout
from pairs import each_value
from test_static import on_any_device
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_spec
from hf_spec.invariance.known import State
from hf_spec.packing import packing
from hf_spec.packing.float16 import Float16Weight
from hf_spec.packing.kept import is_better_kept, number_of_parts
from hf_spec.packing.layout import RowReader, memory_of, row_reader, same_bits
from hf_spec.packing.packing import _reordered, is_packed, multiplies, why_not_here
from hf_spec.packing.weight import BIG, PackedWeight, values_of
from hf_spec.scoring.changes import way_of_forward

pytestmark = pytest.mark.skipif(
    why_not_here(torch.float32, force=True) is not None, reason=str(why_not_here(torch.float32, force=True))
)
IDS = torch.arange(3, 35).view(2, 16)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
LARGE = 15  # weights of the model: embeddings and head, tied, and seven in each of two layers


@pytest.fixture(params=["in blocks", "kept", "float16"], autouse=True)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with oneDNN's layout, torch's own, and FBGEMM's, whatever this processor would take."""
    if request.param in ("in blocks", "kept", "float16"):
        take_layout(request.param, monkeypatch)
    return str(request.param)


def make(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Make a model whose weights have values that half precision holds."""
    torch.manual_seed(0)
    given = SHAPE | {"num_hidden_layers": 2, "vocab_size": 1024, "tie_word_embeddings": True} | overrides
    model = LlamaForCausalLM(LlamaConfig(**given)).eval()
    return model.bfloat16().to(dtype)


@pytest.fixture
def model() -> Any:
    return make()


@pytest.fixture
def packed(model: Any) -> Any:
    assert len(hf_spec.pack(model, force=True).packed) == LARGE
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    found: Tensor = model(ids).logits
    return found


def close(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def same_state(model: Any, other: Any) -> bool:
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(one, states[1][name]) for name, one in states[0].items()
    )


# -- numbers, bits and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_logits_are_those_of_plain_weights(options: dict[str, Any]) -> None:
    model, twin = make(**options), make(**options)
    report = hf_spec.pack(model, force=True)
    assert not report.left and str(report).startswith(f"{len(report.packed)} of {len(report.packed)} large")
    for width in (1, 2, 6, 16, 64):
        ids = torch.arange(2 * width).view(2, width)
        assert close(logits(model, ids), logits(twin, ids)), width
    assert is_packed(model) and not is_packed(twin)


def test_a_product_with_another_weight_is_found(packed: Any) -> None:
    mlp = packed.model.layers[0].mlp
    storages = mlp.gate_proj.weight._storage, mlp.up_proj.weight._storage
    storages[0].packed, storages[1].packed = storages[1].packed, storages[0].packed
    assert not close(logits(packed), logits(make()))


@pytest.mark.parametrize("layout", ["in blocks"], indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_rows_have_the_bits_of_several(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not multiplies(dtype):
        pytest.skip(f"oneDNN multiplies no {dtype} on this processor; products were not compared")
    monkeypatch.setattr("hf_spec.packing.weight.FEWEST", 4)
    layer = nn.Linear(2048, 1024, bias=bias).to(dtype)
    assert layer.weight.nbytes >= BIG
    states = torch.randn(5, 2048).to(dtype)
    with torch.no_grad():
        wanted = layer(states)
        hf_spec.pack(layer, force=True)
        several = layer(states[:4])
        rows = {
            "one": (layer(states[1]), several[1]),
            "one of a batch": (layer(states[1:2, None]), several[1:2, None]),
            "none": (layer(states[:0]), several[:0]),
            "two": (layer(states[1:3]), several[1:3]),
            "two, not in order": (layer(states[[2, 0]].T.contiguous().T), several[[2, 0]]),
            "three of a batch": (layer(states[None, :3]), several[None, :3]),
            "every second number": (layer(states.repeat_interleave(2, 1)[2:3, ::2]), several[2:3]),
        }
        with pytest.raises(RuntimeError, match=r"\(1024, 2048\) cannot multiply states of \(1, 2047\)"):
            layer(states[:1, :-1])
    assert is_packed(layer)
    assert all(torch.equal(found, part) and found.is_contiguous() for found, part in rows.values()), rows
    assert torch.allclose(several, wanted[:4], rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [200, 1040])
@pytest.mark.parametrize("outputs", [600, 601], ids=["in parts", "whole"])
@pytest.mark.parametrize("layout", ["kept"], indirect=True)
def test_each_number_of_rows_is_right(outputs: int, inputs: int, threads: int, bias: bool) -> None:
    """A weight in torch's layout is multiplied in five ways."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    values, address = layer.weight.detach().double(), layer.weight.data_ptr()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            hf_spec.pack(layer, force=True)
            for shape in ((0,), (1,), (1, 1), (2,), (1, 3), (3, 1), (2, 2), (5,), (3, 17), (64,), (5, 13)):
                states = torch.randn(*shape, inputs)
                for given in (states, states.repeat_interleave(2, -1)[..., ::2]):
                    found = layer(given)
                    wanted = states.double() @ values.T + (layer.bias.double() if bias else 0)
                    assert found.shape == wanted.shape and found.is_contiguous()
                    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5), shape
            with pytest.raises(RuntimeError, match=rf"\({outputs}, {inputs}\) cannot multiply states of \(2, 199\)"):
                layer(torch.randn(2, 199))
    finally:
        torch.set_num_threads(before)
    assert is_packed(layer) and layer.weight._storage.packed.data_ptr() == address  # no copy was made


def test_nothing_is_packed_unasked(model: Any) -> None:
    model.generate(IDS, max_new_tokens=4, speculator="ngram", do_sample=False)
    assert not is_packed(model)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_undone_the_bits_are_the_old_ones(options: dict[str, Any]) -> None:
    model, twin = make(**options), make(**options)
    odd = torch.tensor([-0.0, torch.nan, torch.inf, 1e-45, -torch.inf, 3.4e38])
    for one in (model, twin):
        one.model.layers[0].mlp.up_proj.weight.data[7, :6] = odd
    hf_spec.pack(model, force=True)
    hf_spec.unpack(model)
    assert not is_packed(model)
    pairs = list(zip(model.named_parameters(), twin.named_parameters(), strict=True))
    assert all(name == other and same_bits(one.data, two.data) for (name, one), (other, two) in pairs)
    assert {type(one) for one in model.parameters()} == {nn.Parameter}
    del pairs  # which hold the weights
    hf_spec.unpack(model)  # again: nothing to do
    assert len(hf_spec.pack(model, force=True).packed) >= LARGE
    assert len(hf_spec.pack(model, force=True).packed) >= LARGE  # a second call changes nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_packed_where_this_processor_multiplies_it(dtype: torch.dtype) -> None:
    """Where each product has the same bits, the logits have; otherwise they are close."""
    model, twin = make(dtype), make(dtype)
    reason = why_not_here(dtype, force=True)
    report = hf_spec.pack(model, force=True)
    if reason is not None:
        assert not is_packed(model) and str(report) == f"nothing is packed: {reason}"
        assert torch.equal(logits(model), logits(twin))
        pytest.skip(f"{dtype}: {reason}; products were not compared")
    layers = [one for one in twin.modules() if isinstance(one, nn.Linear)]
    equal = [multiplies(dtype) and same_product(one, IDS.numel()) for one in layers]
    print(f"{dtype}: {sum(equal)} of {len(equal)} products have the same bits on this processor")
    if all(equal):
        assert torch.equal(logits(model), logits(twin))
    assert (logits(model) - logits(twin)).abs().max() <= 0.05 * logits(twin).std()


def same_product(layer: nn.Linear, rows: int) -> bool:
    """Tell whether this processor gives the same bits packed, for a few inputs of this many rows."""
    with torch.no_grad():
        for _ in range(4):
            states = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
            found = torch.ops.mkldnn._linear_pointwise(states, _reordered(layer.weight), layer.bias, "none", [], "")
            if not torch.equal(found, layer(states)):
                return False
    return True


def test_the_plain_weights_are_let_go(model: Any) -> None:
    old = [weakref.ref(one) for one in model.parameters() if one.ndim == 2]
    size = model.get_memory_footprint()
    report = hf_spec.pack(model, force=True)
    assert [one() for one in old] == [None] * LARGE
    storages = {id(one._storage): one._storage for one in model.parameters() if isinstance(one, PackedWeight)}
    taken = sum(
        one.packed.nbytes
        if one.kept_for or isinstance(one.packed, Float16Weight)
        else torch.ops.mkldnn._nbytes(one.packed)
        for one in storages.values()
    )
    tables = sum(
        reader._row_starts.nbytes + reader._column_offsets.nbytes
        for one in storages.values()
        if isinstance(reader := one.rows, RowReader)
    )
    others = sum(one.nbytes for one in model.parameters() if not isinstance(one, PackedWeight))
    assert taken + tables + others <= 1.05 * size and report.bytes == taken + tables


PEAK = """
import sys
from pathlib import Path
from torch import nn
import hf_spec

def memory(field):  # of this process, in MiB
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) / 1024

layers = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(6))).eval()  # 32 MiB each
if sys.argv[1] == "float16":  # values that it holds
    for weight in layers.parameters():
        weight.data.copy_(weight.data.bfloat16())
hf_spec.pack(nn.Linear(512, 512, bias=False).eval(), force=True)  # what is imported for it is not counted
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
hf_spec.pack(layers, force=True)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of the memory can be read here")
def test_one_layer_at_a_time_is_in_memory_twice(layout: str) -> None:
    """In a process of its own: what earlier tests have freed may be taken for new layers, and then stays."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, layout], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    peak, rest = map(float, run.stdout.split())
    # All layers twice would be 192 MiB more, or 96 as float16. What is freed is not always given back at once.
    assert peak < 88 and rest < 40, run.stdout


# -- tied embeddings and the layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1024, 256), (1000, 256), (4100, 640), (130, 520), (100, 700)], ids=str)
def test_rows_are_read_from_the_packed_layout(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    reader = row_reader(weight, packed := _reordered(weight), _reordered)
    assert reader is not None
    ids = torch.randint(0, shape[0], (3, 5))
    assert torch.equal(reader(ids), weight[ids]) and reader(ids[:0]).shape == (0, 5, shape[1])
    assert torch.equal(reader(ids.int()), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            reader(torch.tensor([0, wrong]))
    other = weight.clone()
    other[-1, -1] += 1
    assert row_reader(other, packed, _reordered) is None  # all of it is compared
    assert len(memory_of(packed)) >= weight.numel()


@pytest.mark.parametrize("layout", ["in blocks"], indirect=True)
def test_a_layout_that_is_not_understood_stays_plain(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_spec.packing.packing.row_reader", lambda *_: None)
    report = hf_spec.pack(model, force=True)
    assert list(report.left) == ["LlamaForCausalLM.model.embed_tokens.weight"] and "layout" in str(report)
    assert close(logits(model), logits(make())) and model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_stay_tied(packed: Any) -> None:
    embedding, head = packed.get_input_embeddings(), packed.get_output_embeddings()
    assert embedding.weight is head.weight and isinstance(head.weight, PackedWeight)
    twin = make().get_input_embeddings()
    for padding in (None, 5):
        embedding.padding_idx = padding
        with torch.no_grad():
            assert torch.equal(embedding(IDS), twin(IDS))
    assert is_packed(packed)
    with torch.no_grad(), pytest.raises(IndexError):
        embedding(torch.tensor([[1024]]))
    hf_spec.unpack(packed)
    assert embedding.weight is head.weight and type(head.weight) is nn.Parameter


def test_an_embedding_that_changes_its_weights_is_left_alone(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.1
    assert (
        "Embedding uses it otherwise"
        in hf_spec.pack(model, force=True).left["LlamaForCausalLM.model.embed_tokens.weight"]
    )


# -- what is left plain, and why --------------------------------------------------------------------------------------


def test_weights_that_others_hold_stay_plain(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = hf_spec.pack(model, force=True)
    assert not is_packed(model) and len(report.left) == LARGE and "something else holds" in str(report)
    del optimizer
    mine = model.model.layers[1].mlp.up_proj.weight
    report = hf_spec.pack(model, force=True)
    assert list(report.left) == ["LlamaForCausalLM.model.layers.1.mlp.up_proj.weight"]
    assert model.model.layers[1].mlp.up_proj.weight is mine and close(logits(model), logits(make()))
    with torch.no_grad():
        mine.zero_()
    changed = make()
    changed.model.layers[1].mlp.up_proj.weight.data.zero_()
    assert close(logits(model), logits(changed))


@pytest.mark.parametrize("layout", ["in blocks"], indirect=True)
def test_each_weight_that_is_left_is_named_with_the_reason() -> None:
    layer = nn.Linear(256, 512)
    cases: dict[str, nn.Module] = {
        "device meta": nn.Linear(256, 512, device="meta"),
        "float64": nn.Linear(256, 512, dtype=torch.float64),
        "memory": nn.Linear(1030, 65),
        "gradient": layer,
    }
    layer(torch.ones(256)).sum().backward()
    for words, module in cases.items():
        report = hf_spec.pack(module, force=True)
        assert (
            words in report.left["Linear.weight"]
            and str(report) == f"nothing is packed: {report.left['Linear.weight']}"
        )
    assert str(hf_spec.pack(nn.Linear(8, 8), force=True)) == "nothing is packed: there is no large linear layer"
    with pytest.raises(TypeError, match="int is no model"):
        hf_spec.pack(3)


def test_without_onednn_nothing_is_packed(model: Any) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert "switched off" in str(hf_spec.pack(model, force=True))
    assert not is_packed(model)


@pytest.mark.parametrize("layout", ["as this processor takes it"], indirect=True)
@pytest.mark.parametrize(
    ("capability", "threads", "shape", "is_kept", "reason"),
    [
        ("AVX512", 1, (1024, 2048), False, None),
        ("AVX2", 1, (1024, 4096), True, None),
        ("AVX2", 2, (1024, 4096), True, None),
        ("AVX2", 1, (1008, 1024), True, None),
        ("AVX2", 2, (1008, 4096), False, None),  # large, with few inputs
        ("DEFAULT", 2, (1024, 2048), False, "not measured on this kind of processor"),
    ],
)
def test_the_processor_and_the_shape_decide(
    capability: str,
    threads: int,
    shape: tuple[int, int],
    is_kept: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer = nn.Linear(*shape)
    for force in (False, True):
        report = hf_spec.pack(layer, force=force)
        is_left = reason is not None and not force
        assert is_packed(layer) is not is_left and (str(reason) if is_left else "are packed") in str(report)
    assert layer.weight._storage.kept_for == is_kept * threads


@pytest.mark.parametrize(
    ("outputs", "threads", "parts"),
    [(192, 1, 2), (192, 2, 4), (2048, 2, 8), (2016, 2, 8), (576, 16, 12), (151_936, 2, 1187), (601, 2, 0), (40, 2, 0)],
)
def test_a_weight_is_divided_into_equal_parts(outputs: int, threads: int, parts: int) -> None:
    assert number_of_parts(outputs, threads) == parts
    assert not parts or outputs % parts == 0


@pytest.mark.parametrize("layout", ["as this processor takes it"], indirect=True)
def test_other_dtypes_and_turned_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    weight = torch.empty(2048, 1024)
    assert is_better_kept(weight) and not is_better_kept(weight.double()) and not is_better_kept(weight.t())
    assert is_better_kept(torch.empty(8192, 256, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not is_better_kept(weight)


def test_quantized_layers_are_left_alone() -> None:
    model, twin = (
        torch.ao.quantization.quantize_dynamic(make(), {nn.Linear}, torch.qint8, inplace=True) for _ in range(2)
    )
    assert "no large linear layer" in str(hf_spec.pack(model, force=True))
    assert torch.equal(logits(model), logits(twin))


def test_quantized_tensors_are_left_alone() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = make(tie_word_embeddings=False)
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    before = logits(model)
    report = hf_spec.pack(model, force=True)
    assert report.packed == ["LlamaForCausalLM.lm_head.weight"] and len(report.left) == LARGE - 1
    assert close(logits(model), before)


def test_parametrized_weights_are_left_alone() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(256, 512))
    assert not hf_spec.pack(layer, force=True).packed


# -- what is done with a packed model ---------------------------------------------------------------------------------


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_state(model: Any) -> Any:
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    other = make()
    other.load_state_dict(torch.load(file))
    return other


def by_assigning(model: Any) -> Any:
    other = make(num_attention_heads=4)
    other.load_state_dict(model.state_dict(), assign=True)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch, by_state, by_assigning])
def test_copies_and_files_hold_the_plain_weights(packed: Any, copied: Callable[[Any], Any]) -> None:
    other = copied(packed)
    assert is_packed(packed) and (copied is by_assigning or not is_packed(other))
    assert close(logits(other), logits(make()))
    assert same_state(other, make())
    if copied is not by_assigning:
        assert other.lm_head.weight is other.model.embed_tokens.weight


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
def test_what_was_packed_once_is_copied_as_any_other_model(packed: Any, copied: Callable[[Any], Any]) -> None:
    hf_spec.unpack(packed)
    other = copied(packed)
    assert same_state(other, make()) and other.lm_head.weight is other.model.embed_tokens.weight
    assert hf_spec.pack(other, force=True).packed and not is_packed(packed)
    assert same_state(copied(other), make())


def test_what_was_packed_once_is_saved_without_a_trace(packed: Any) -> None:
    """torch.load takes nothing but tensors by default, and other places may lack hf_spec."""
    held = list(packed.parameters())
    hf_spec.unpack(packed)
    torch.save(packed.state_dict(keep_vars=True), file := io.BytesIO())
    assert b"hf_spec" not in file.getvalue()
    file.seek(0)
    other = make()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same_state(other, make()) and held


def test_copies_are_made_after_the_main_thread_has_ended() -> None:
    script = """
import copy, threading, torch, hf_spec
layer = torch.nn.Linear(512, 512).eval()
wanted = layer.weight.detach().clone()
assert hf_spec.pack(layer, force=True).packed
def late():
    threading.main_thread().join()
    print(torch.equal(copy.deepcopy(layer).weight, wanted))
threading.Thread(target=late).start()
"""
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip() == "True", run.stderr


def test_saved_files_hold_the_plain_weights(packed: Any, tmp_path: Path) -> None:
    packed.save_pretrained(tmp_path)
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path), make())
    assert close(logits(packed), logits(make()))


def test_what_is_asked_about_a_weight_is_answered_without_undoing(packed: Any) -> None:
    twin = make()
    for (name, one), (other, two) in zip(packed.named_parameters(), twin.named_parameters(), strict=True):
        assert (name, one.shape, one.dtype, one.device, one.requires_grad) == (
            other, two.shape, two.dtype, two.device, two.requires_grad)  # fmt: skip
        assert isinstance(one, nn.Parameter) and one.numel() == two.numel() and one.is_leaf and one.grad is None
    assert packed.num_parameters() == twin.num_parameters() and packed.dtype == torch.float32
    assert packed.get_memory_footprint() == twin.get_memory_footprint() and packed.device.type == "cpu"
    assert repr(packed.lm_head.weight) == repr(twin.lm_head.weight)
    with torch.no_grad():  # as Gemma 4 in every forward
        for index in (3, (-1, slice(None))):
            row = packed.lm_head.weight[index]
            assert torch.equal(row, twin.lm_head.weight[index]) and torch.equal(row.view(1, -1) + 0, row[None])
        with pytest.raises(RuntimeError, match="inference tensor"):
            row.zero_()
    packed.requires_grad_(False)
    packed.to("cpu")
    packed.to(torch.float32)
    packed.cpu().float()
    packed.eval()
    packed.train()
    packed.zero_grad()
    assert is_packed(packed)
    hf_spec.unpack(packed)
    assert not any(one.requires_grad for one in packed.parameters())


def test_moved_it_is_plain(packed: Any) -> None:
    twin = make().to(torch.bfloat16)
    packed.to(torch.bfloat16)
    assert not is_packed(packed) and torch.equal(logits(packed), logits(twin))
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert hf_spec.pack(make(), force=True).packed
    packed.to("meta")
    assert {one.device.type for one in packed.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: weight.t()[3].mul_(5),
        lambda weight: weight.__setitem__((0, 0), 9.0),
        lambda weight: nn.init.ones_(weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: torch.from_numpy(weight.detach().numpy()).mul_(2),
    ],
)
def test_changes_of_a_weight_count(packed: Any, change: Callable[[Any], Any]) -> None:
    """Held references count too: from before the change and after it."""
    twin, weight = make(), packed.model.layers[0].mlp.up_proj.weight
    alias = weight.detach()
    for one in (weight, twin.model.layers[0].mlp.up_proj.weight):
        with torch.no_grad():
            change(one)
    assert close(logits(packed), logits(twin)) and not close(logits(packed), logits(make()))
    expected = twin.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight + 0, expected) and torch.equal(alias + 0, expected)


@pytest.mark.parametrize(
    ("use", "named"), [(lambda weight: weight.T, "T"), (lambda weight: weight.data, "data"), (torch.exp, "exp")]
)
def test_what_undoes_packing_is_named(packed: Any, use: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("hf_spec.packing.weight.logger.warning_once", told.append)
    use(packed.lm_head.weight)
    assert told == [f"packed weights are made plain again, because {named} needs the plain ones"]


def test_packed_again_with_references_of_the_first_time(packed: Any) -> None:
    weight = packed.model.layers[0].mlp.up_proj.weight
    hf_spec.unpack(packed)
    assert len(hf_spec.pack(packed, force=True).packed) == LARGE
    assert packed.model.layers[0].mlp.up_proj.weight is weight
    with torch.no_grad():
        weight.mul_(2)
    assert not close(logits(packed), logits(make()))


def resized(model: Any) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(1100, mean_resizing=False)


def cast(model: Any) -> None:
    model.bfloat16()


@pytest.mark.parametrize("change", [resized, cast])
def test_packed_again_with_references_to_what_had_another_shape_or_dtype(packed: Any, change: Any) -> None:
    held, plain = list(packed.parameters()), make()
    change(packed)
    change(plain)
    if not multiplies(packed.dtype):
        pytest.skip("oneDNN multiplies no bfloat16 on this processor")
    hf_spec.pack(packed, force=True)
    assert is_packed(packed)
    assert [(one.shape, one.dtype) for one in packed.parameters()] == [
        (one.shape, one.dtype) for one in plain.parameters()
    ]
    assert packed.dtype is plain.dtype and same_state(packed, plain)
    found, wanted = logits(packed), logits(plain)
    assert (found - wanted).abs().max() <= 0.02 * wanted.std()
    packed.resize_token_embeddings(1200, mean_resizing=False)
    kept = plain.lm_head.weight.shape[0]
    assert torch.equal(packed.lm_head.weight[:kept], plain.lm_head.weight)
    assert held[0].shape == packed.get_input_embeddings().weight.shape  # as of the parameter that it stands for


def test_the_exact_mode_sees_that_a_weight_was_packed_otherwise(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make().model.layers[0].mlp.up_proj
    hf_spec.pack(layer, force=True)
    held, before = layer.weight, State(layer)  # held, so that it stands for the weight again
    assert State(layer) == before
    hf_spec.unpack(layer)
    take_layout("in blocks" if layout == "kept" else "kept", monkeypatch)
    assert hf_spec.pack(layer, force=True).packed and layer.weight is held
    assert State(layer) != before


def test_hooks_on_gradients_stay(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(torch.zeros_like)
    del weight
    assert list(hf_spec.pack(model, force=True).left.values()) == ["it has hooks on its gradient"]
    assert is_packed(model)
    hf_spec.unpack(model)
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.count_nonzero() == 0
    assert model.model.layers[0].mlp.down_proj.weight.grad.count_nonzero() > 0


def test_attributes_of_a_weight_stay(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.before = 1
    hf_spec.pack(model, force=True)
    layer.weight.between = layer.weight.before + 1
    hf_spec.unpack(model)
    layer.weight.after = layer.weight.between + 1
    with hf_spec.packed(model, force=True):
        assert layer.weight.after == 3
    assert (layer.weight.before, layer.weight.between, layer.weight.after) == (1, 2, 3)


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_parameter_made_of_a_packed_one_gets_gradients_of_its_own(packed: Any, is_undone: bool) -> None:
    layer = packed.model.layers[0].mlp.up_proj
    held, wanted = layer.weight, values_of(layer.weight)
    if is_undone:
        hf_spec.unpack(packed)
    other = nn.Linear(layer.in_features, layer.out_features, bias=False)
    other.weight = nn.Parameter(held)
    assert is_packed(packed) is not is_undone
    other(torch.ones(1, layer.in_features)).sum().backward()
    assert other.weight.grad.shape == wanted.shape and layer.weight.grad is None
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert torch.equal(other.weight, wanted - 1)
    assert torch.equal(layer.weight, other.weight)  # they share memory, as of plain parameters


def test_reparametrised_and_pruned_layers_can_be_packed_again(packed: Any) -> None:
    layer, plain = packed.model.layers[0].mlp.up_proj, make().model.layers[0].mlp.up_proj
    for one in (layer, plain):
        nn.utils.parametrizations.weight_norm(one)
        nn.utils.parametrize.remove_parametrizations(one, "weight")
    assert torch.equal(layer.weight, plain.weight)
    hf_spec.pack(packed, force=True)
    for one in (layer, plain):
        prune.l1_unstructured(one, "weight", 0.5)
        prune.remove(one, "weight")
    assert torch.equal(layer.weight, plain.weight)
    assert not hf_spec.pack(packed, force=True).left and torch.equal(layer.weight, plain.weight)


def test_loaded_states_count(packed: Any) -> None:
    other = make(rms_norm_eps=1e-6)
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(1.5)
    packed.load_state_dict(other.state_dict())
    assert same_state(packed, other)
    packed.tie_weights()
    packed.resize_token_embeddings(1032)
    assert packed.lm_head.weight.shape == (1032, 256)


def test_hooks_and_replaced_forwards_work(packed: Any) -> None:
    twin = make()
    for one in (packed, twin):
        layers = one.model.layers
        layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
        layers[0].mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        plain = layers[1].mlp.up_proj.forward
        layers[1].mlp.up_proj.forward = lambda states, plain=plain: plain(states) + 1
        inner = layers[1].mlp.down_proj
        inner.forward = lambda states, inner=inner: states @ inner.weight.T
    assert close(logits(packed), logits(twin)) and not close(logits(packed), logits(make()))
    assert is_packed(packed) and type(packed.model.layers[1].mlp.down_proj.weight) is nn.Parameter


def test_accelerate_hooks_work(packed: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    for module in packed.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    assert close(logits(packed), logits(make()))


# -- gradients, other precisions, modes -------------------------------------------------------------------------------


def test_gradients_are_those_of_plain_weights(packed: Any) -> None:
    twin, steps = make(), []
    for one in (packed, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(2):
            one(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(one.state_dict())
    assert all(torch.allclose(one, steps[1][name], atol=1e-5) for name, one in steps[0].items())
    assert not is_packed(packed) and not torch.equal(steps[1]["lm_head.weight"], make().lm_head.weight)


def test_gradients_pass_through_a_frozen_model(packed: Any) -> None:
    twin, found = make(), []
    for one in (packed, twin):
        one.requires_grad_(False)
        states = torch.ones(1, 3, 256, requires_grad=True)
        one(inputs_embeds=states).logits.sum().backward()
        found.append(states.grad)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def of_autocast(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return layer(states)


def of_forward_mode(layer: nn.Module, states: Tensor) -> Tensor:
    return torch.func.jvp(layer, (states,), (torch.ones_like(states),))[1]


def of_vmap(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.vmap(layer)(states)


def of_fake_tensors(layer: nn.Module, states: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        shape = layer(states).shape
    with torch.no_grad():
        return layer(states).expand(2, *shape)


def of_trace(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.jit.trace(layer.requires_grad_(False), (states,), check_trace=False)(states)


def of_double(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        layer(states.double())
    return states


def of_inference(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.inference_mode():
        found = layer(states).clone()
        layer.weight.sum()  # makes it plain here
    layer(states).sum().backward()  # which later training must not notice
    assert layer.weight.grad is not None
    return found


def of_keywords(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        return functional.linear(states, weight=layer.weight, bias=layer.bias)


def of_views(layer: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [
            states[0],
            states[:0],
            states.t().contiguous().t(),
            states[::2],
            states[:1].expand(4, -1),
            states[None],
        ]
        return torch.cat([layer(one).reshape(-1, 512) for one in parts])


@pytest.mark.parametrize(
    "run",
    [of_autocast, of_forward_mode, of_vmap, of_fake_tensors, of_trace, of_double, of_inference, of_keywords, of_views],
)
def test_a_layer_alone_is_right_in_every_mode(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, states = nn.Linear(256, 512).eval(), torch.randn(4, 256)
    twin = copy.deepcopy(layer)
    assert hf_spec.pack(layer, force=True).packed
    found, expected = run(layer, states), run(twin, states)
    assert found.dtype == expected.dtype and torch.allclose(found, expected, atol=1e-5)
    hf_spec.unpack(layer)
    assert torch.equal(layer.weight, twin.weight)


def test_torch_compile_is_refused_by_name(packed: Any) -> None:
    refused = r"torch\.compile reads no packed weights: call hf_spec\.unpack"
    with torch.no_grad(), pytest.raises(Exception, match=refused):
        torch.compile(packed, dynamic=False)(IDS)
    with pytest.raises(Exception, match=refused):  # by transformers' own loop
        packed.generate(IDS[:1], max_new_tokens=8, cache_implementation="static", compile_config=on_any_device())
    assert close(logits(packed), logits(make()))
    compiled = make()
    compiled.compile()
    for one in (compiled, torch.compile(make())):
        with pytest.raises(ValueError, match=r"is compiled, and torch\.compile reads no packed"):
            hf_spec.pack(one, force=True)


def test_continuous_batching_reads_packed_weights(packed: Any) -> None:
    prompts = IDS.tolist()
    call = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2, "eos_token_id": None}
    answers = {}
    for name, model in {"packed": packed, "plain": make()}.items():
        found = hf_spec.generate_many(model, prompts, speculator="ngram", engine="generate_batch", **call)
        answers[name] = {one.index: one.tokens for one in found}
    assert answers["packed"] == answers["plain"] and is_packed(packed)


def test_other_threads_see_right_numbers_all_the_time(model: Any) -> None:
    expected, wrong, stop = logits(make()), [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            if not close(logits(model), expected):
                wrong.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    packings = 0
    for _ in range(12):
        packings += bool(hf_spec.pack(model, force=True).packed)
        hf_spec.unpack(model)
    stop.set()
    thread.join()
    assert not wrong and packings


# -- PEFT -------------------------------------------------------------------------------------------------------------


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["up_proj", "q_proj"], init_lora_weights=False)
    ).eval()


@pytest.mark.parametrize("before", [True, False], ids=["packed first", "adapted first"])
def test_adapters_work_merged_or_not(before: bool) -> None:
    model, twin = make(), with_adapter(make())
    if before:
        hf_spec.pack(model, force=True)
    model = with_adapter(model)
    assert is_packed(model) == before
    hf_spec.pack(model, force=True)
    assert close(logits(model), logits(twin)) and is_packed(model)
    assert not close(logits(model), logits(make()))
    with model.disable_adapter():
        assert close(logits(model), logits(make()))
    model.merge_adapter()
    assert close(logits(model), logits(twin))
    hf_spec.pack(model, force=True)  # merged
    assert close(logits(model), logits(twin))
    model.unmerge_adapter()
    assert close(logits(model), logits(twin))
    assert close(logits(model.merge_and_unload()), logits(twin))


# -- speculation ------------------------------------------------------------------------------------------------------


def drafts(target: Any) -> Iterator[Any]:
    for vocabulary in (1024, 600):
        torch.manual_seed(2)
        layers = target.config.to_dict() | {"num_hidden_layers": 1}
        config = hf_spec.Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=vocabulary,
            shared_with_target=["embed_tokens", "lm_head"],
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        )
        draft = hf_spec.Eagle3DraftModel(config).eval()
        if vocabulary < 1024:
            draft.set_vocabulary(torch.arange(vocabulary))
        yield draft
    yield make(num_hidden_layers=1)
    yield hf_spec.HybridSpeculator(make(num_hidden_layers=1))
    yield "ngram"


@pytest.mark.parametrize(("number", "bound"), each_value(range(5), [True, False]))
def test_drafts_are_packed_with_their_target(number: int, bound: bool) -> None:
    target = make()
    speculator = hf_spec.as_speculator(list(drafts(target))[number], target)
    call = {"max_new_tokens": 12, "do_sample": False, "speculator": speculator, "return_dict_in_generate": True}
    if bound:
        target.generate(IDS[:1], **call)
    report = hf_spec.pack(target, speculator, force=True)
    assert not report.left and len(report.packed) >= LARGE
    plain = target.generate(IDS[:1], max_new_tokens=12, do_sample=False)
    out = target.generate(IDS[:1], **call)
    assert torch.equal(out.sequences, plain)
    assert target.lm_head.weight._storage.packed is not None  # a shared head is read as it is
    twin = make()
    other = twin.generate(IDS[:1], **call | {"speculator": hf_spec.as_speculator(list(drafts(twin))[number], twin)})
    assert torch.equal(out.sequences, other.sequences)
    if not bound:  # otherwise a memory knows the text by now
        assert out.speculation.accepted == other.speculation.accepted
    hf_spec.unpack(target, speculator)
    assert not is_packed(target) and torch.equal(target.generate(IDS[:1], **call).sequences, plain)
    assert len(hf_spec.pack(target, speculator, force=True).packed) == len(report.packed)


def test_a_draft_that_borrows_leaves_the_target_packed() -> None:
    target = make()
    draft = next(drafts(target))
    hf_spec.pack(target, draft, force=True)
    draft.bind(target)
    hf_spec.unpack(draft)
    assert target.lm_head.weight._storage.packed is not None
    assert "borrows" in str(hf_spec.pack(bound_target(draft), force=True))


def bound_target(draft: Any) -> Any:
    target = make()
    draft.bind(target)
    return target


def test_the_way_of_the_forward_shows_packing(model: Any) -> None:
    before = way_of_forward(model)
    with hf_spec.packed(model, force=True):
        inside = way_of_forward(model)
        assert inside != before and way_of_forward(model) == inside
    assert way_of_forward(model) == before
    with hf_spec.packed(model.model.layers[0], force=True):
        assert way_of_forward(model) not in (before, inside)


def test_the_context_undoes_what_it_did(model: Any) -> None:
    hf_spec.pack(model.model.layers[0], force=True)
    with contextlib.suppress(KeyError), hf_spec.packed(model, force=True) as report:
        assert len(report.packed) == LARGE and is_packed(model.model.layers[1])
        raise KeyError
    assert is_packed(model.model.layers[0]) and not is_packed(model.model.layers[1])
    assert not isinstance(model.lm_head.weight, PackedWeight)


def test_a_model_is_packed_until_the_last_context_ends(model: Any) -> None:
    first, second = hf_spec.packed(model, force=True), hf_spec.packed(model, force=True)
    with first:
        second.__enter__()
    assert is_packed(model)
    second.__exit__(None, None, None)
    assert not is_packed(model) and same_state(model, make())
    hf_spec.pack(model, force=True)
    with hf_spec.packed(model, force=True), hf_spec.packed(model, force=True):
        pass
    assert is_packed(model)  # as it was before
    hf_spec.unpack(model)
    with hf_spec.packed(model, force=True):
        hf_spec.pack(model, force=True)
    assert is_packed(model)  # as was asked for inside


def test_a_context_that_is_interrupted_while_it_packs_leaves_nothing_packed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_weight, calls = packing._pack_weight, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return pack_weight(*args)

    monkeypatch.setattr(packing, "_pack_weight", interrupted)
    with pytest.raises(KeyboardInterrupt), hf_spec.packed(model, force=True):
        pass
    assert len(calls) == 3 and not is_packed(model)


def test_the_report_tells_models_of_one_class_apart(model: Any) -> None:
    report = hf_spec.pack(model, make(), force=True)
    assert len(set(report.packed)) == len(report.packed) == 2 * LARGE
    assert sum(name.startswith("LlamaForCausalLM 2.") for name in report.packed) == LARGE


def test_modules_that_are_gone_do_not_stay(model: Any) -> None:
    hf_spec.pack(model, force=True)
    layer = weakref.ref(model.model.layers[1].mlp.up_proj)
    storage = weakref.ref(layer().weight._storage)  # type: ignore[union-attr]
    del model.model.layers[1]
    gc.collect()
    assert layer() is None and storage() is None and sys.getrefcount(model) < 12
