"""Weights as float16 numbers: their products, and the bits they come back with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_spec
from hf_spec.invariance.rows import SIZES, agreeing_sizes
from hf_spec.packing import float16, kept, packing
from hf_spec.packing.float16 import WIDTH, Float16Weight, float16_weight, is_better_in_float16
from hf_spec.packing.graphs import packed_in_graphs
from hf_spec.packing.kept import CONVERTED, half_product
from hf_spec.packing.layout import same_bits
from hf_spec.packing.packing import is_packed

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch was built without FBGEMM"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY = (*DTYPES, "float16 in float32")


def made(dtype: torch.dtype | str, outputs: int = 48, inputs: int = 64, scale: float = 0.02) -> Tensor:
    """Draw values of ``dtype``; those in float32 are of bfloat16, or of float16 where it says so."""
    torch.manual_seed(0)
    values = torch.randn(outputs, inputs) * scale
    if dtype == "float16 in float32":
        return values.half().float()
    assert isinstance(dtype, torch.dtype)
    return values.bfloat16().float() if dtype is torch.float32 else values.to(dtype)


@pytest.mark.parametrize("is_looked_up", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 0.02, 3.0, 1e6])
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_values_come_back_with_their_bits(
    dtype: torch.dtype | str, scale: float, is_looked_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are too small for float16, or are zeros with a sign."""
    monkeypatch.setattr(float16, "AT_ONCE", 64 * WIDTH)  # three blocks
    weight = made(dtype, scale=scale)
    odd = torch.tensor([-0.0, scale * 2.0**-34, -scale * 2.0**-40, 0.0]).bfloat16().to(weight.dtype)
    weight[7, :2], weight[40, 3:5] = odd[:2], odd[2:]
    found = float16_weight(weight, is_looked_up)
    is_far_off = scale == 1e-30 and dtype is not torch.float16  # from its range
    has_no_table = dtype == "float16 in float32" and is_looked_up  # for the small ones
    if is_far_off or has_no_table or not weight.isfinite().all():
        assert found is None
        return
    assert found is not None
    assert same_bits(found.dense(), weight)
    if is_looked_up:
        ids = torch.tensor([[7, 0], [47, 40]])
        assert same_bits(found.rows(ids), weight[ids])
        with pytest.raises(IndexError):
            found.rows(torch.tensor([48]))
    assert found.nbytes == 2 * 48 * 512 + (2 * weight.numel() if is_looked_up else 0)  # FBGEMM pads to 512 inputs


@pytest.mark.parametrize(
    "value", [torch.nan, torch.inf, 1 + 2.0**-12, 1e-9], ids=["nan", "inf", "more digits", "many small ones"]
)
def test_values_that_float16_has_not_are_refused(value: float) -> None:
    weight = made(torch.float32)
    assert float16_weight(weight, False) is not None
    weight[3, :10] = value * (1 + 2.0**-7)
    assert float16_weight(weight, False) is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_number_of_rows_is_right(
    dtype: torch.dtype, blocks: int, bias: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = 200
    monkeypatch.setattr(float16, "AT_ONCE", (9600 // blocks) * inputs)
    weight, added = made(dtype, 9600, inputs), torch.randn(9600).to(dtype) if bias else None
    found = float16_weight(weight, False)
    assert found is not None and len(found._blocks) == blocks
    assert compare(lambda states: found.product(states, added), weight, added, threads)
    other = made(dtype, 9600, inputs) * 2
    assert not compare(lambda states: found.product(states, added), other, added, threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_that_is_kept_is_multiplied_in_float32(dtype: torch.dtype, bias: bool, threads: int) -> None:
    weight = made(dtype, 9601, 200)
    assert weight.numel() > 3 * CONVERTED
    added = torch.randn(9601).to(dtype) if bias else None
    assert compare(lambda states: half_product(states, weight, added), weight, added, threads)
    assert not compare(lambda states: half_product(states, weight * 2, added), weight, added, threads)


def compare(product: object, weight: Tensor, bias: Tensor | None, threads: int) -> bool:
    """Tell whether products are as close to those in double precision as their dtype allows.

    torch may round a product before it adds a bias, and then rounds again.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    close = True
    try:
        for shape in ((1,), (1, 1), (2,), (1, 3), (2, 2), (5,), (3, 17), (64,), (130,)):
            states = torch.randn(*shape, weight.shape[1]).to(weight.dtype)
            wanted = states.double() @ weight.double().T + (0 if bias is None else bias.double())
            for given in (states, states.repeat_interleave(2, -1)[..., ::2]):
                found = product(given)  # type: ignore[operator]
                assert found.shape == wanted.shape and found.dtype is weight.dtype and found.is_contiguous()
                most = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[weight.dtype]
                size = wanted.abs() + (0 if bias is None else bias.abs())
                close &= bool(((found.double() - wanted).abs() <= 2 * most * size + 2e-6).all())
    finally:
        torch.set_num_threads(before)
    return close


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_rows_have_the_bits_of_more(dtype: torch.dtype) -> None:
    """So the exact mode computes one row as three. Other processors have other kernels, with numbers of their own."""
    found = float16_weight(made(dtype, 512, 256), False)
    assert found is not None
    sizes = agreeing_sizes(lambda rows: found.product(rows, None), torch.randn(64, 256).to(dtype))
    assert sizes and set(sizes) <= set(SIZES)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert {3, 4, 5, 6, 8, 12, 16, 24, 48, 64} <= set(sizes)


def test_the_processor_the_dtype_and_the_memory_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    full, half = made(torch.float32, inputs=512), made(torch.bfloat16, inputs=512)
    for capability in ("AVX512", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert not is_better_in_float16(full, False, 0) and not is_better_in_float16(half, False, 0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert is_better_in_float16(full, False, 0) and is_better_in_float16(full, True, 0)
    assert is_better_in_float16(half, False, 0) and not is_better_in_float16(half, True, 0)  # it would be stored twice
    assert is_better_in_float16(half, True, half.nbytes)  # and others have saved as much
    assert not is_better_in_float16(half[:, :480], False, 0)  # FBGEMM would pad it
    assert is_better_in_float16(half[:, :500], False, 0)  # a little
    assert not is_better_in_float16(full[:40], False, 0) and not is_better_in_float16(full.double(), False, 0)
    engine = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "qnnpack"
        assert not is_better_in_float16(full, False, 0)
    finally:
        torch.backends.quantized.engine = engine


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this processor be one with AVX2 alone."""
    monkeypatch.setattr(packing, "multiplies", lambda dtype: dtype is torch.float32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def head_and_table(dtype: torch.dtype, is_tied: bool) -> nn.ModuleDict:
    head = nn.Linear(512, 256, bias=False)
    head.weight.data = made(dtype, 256, 512)
    model = nn.ModuleDict({"head": head, "table": nn.Embedding(256, 512)})
    if is_tied:
        model["table"].weight = head.weight
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_takes_it(dtype: torch.dtype, is_tied: bool, avx2: None) -> None:
    model = head_and_table(dtype, is_tied)
    head, states, ids = model["head"], torch.randn(6, 512).to(dtype), torch.arange(240, 256)
    plain = head.weight.detach().clone()
    for _ in range(2):
        report = hf_spec.pack(model)
        assert is_packed(head) and len(report.packed) == 1, report
        storage = head.weight._storage
        is_stored = isinstance(storage.packed, Float16Weight)
        assert is_stored == (dtype is torch.float32 or not is_tied) and (storage.kept_for > 0) == (not is_stored)
        assert report.bytes == storage.nbytes == plain.nbytes * (0.5 if dtype is torch.float32 and not is_tied else 1)
        with torch.no_grad():
            wanted = (states.double() @ plain.double().T).to(dtype)
            assert torch.allclose(head(states), wanted, rtol=2**-7, atol=1e-5)
            if is_tied:
                assert same_bits(model["table"](ids), plain[ids])
        assert is_packed(head)
        engine = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = "qnnpack"  # which makes no such layout, and need not undo it
            hf_spec.unpack(model)
        finally:
            torch.backends.quantized.engine = engine
        assert same_bits(head.weight.detach(), plain)


def test_a_tied_half_is_stored_twice_where_others_save_the_memory(avx2: None) -> None:
    model = head_and_table(torch.bfloat16, True)
    model["large"] = nn.Linear(512, 256, bias=False)
    model["large"].weight.data = made(torch.float32, 256, 512)
    size = sum(one.nbytes for one in model.parameters())
    report = hf_spec.pack(model)
    assert isinstance(model["head"].weight._storage.packed, Float16Weight)
    assert report.bytes == size and len(report.packed) == 2


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_has_the_bits_of_eager_products(dtype: torch.dtype, is_tied: bool, avx2: None) -> None:
    model = head_and_table(dtype, is_tied)
    head = model["head"]
    assert hf_spec.pack(model).packed
    with torch.no_grad(), packed_in_graphs():
        for shape in ((512,), (1, 512), (2, 3, 512), (65, 512)):
            states = torch.randn(shape).to(dtype)
            torch._dynamo.reset()
            found = torch.compile(head, backend="aot_eager", fullgraph=True)(states)
            assert torch.equal(found, head(states)) and found.shape == (*shape[:-1], 256), shape
    assert is_packed(head)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(default: torch.dtype, avx2: None) -> None:
    head, states = head_and_table(torch.bfloat16, False)["head"], torch.randn(3, 512).bfloat16()
    hf_spec.pack(head)
    with torch.no_grad():
        wanted = head(states)
        hf_spec.unpack(head)
        torch.set_default_dtype(default)
        try:
            assert hf_spec.pack(head).packed
            assert torch.equal(head(states), wanted)
        finally:
            torch.set_default_dtype(torch.float32)


def test_without_mkl_a_half_that_is_looked_up_is_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(packing, "multiplies", lambda dtype: False)
    monkeypatch.setattr(kept.torch.backends.mkl, "is_available", lambda: False)
    model = nn.ModuleDict({"head": nn.Linear(256, 512, bias=False).bfloat16(), "table": nn.Embedding(512, 256)})
    model["table"].weight = model["head"].weight
    assert "oneDNN multiplies no bfloat16" in str(hf_spec.pack(model))
    assert not is_packed(model)
