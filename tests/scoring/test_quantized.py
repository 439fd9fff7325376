"""Heads that mask tokens, and quantized modules: the self-check sees through them, and nothing breaks halfway."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import each_value, pairwise
from test_chaos import draft
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from twins import BATCHES, SHAPES, noisy

from hf_spec.scoring.kv_view import KVView
from hf_spec.scoring.plain import coarsest_precision, difference
from hf_spec.scoring.selfcheck import CHAIN, check_target, difference_from_plain

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
VALUES = {"-inf": -torch.inf, "lowest": torch.finfo(torch.float32).min, "-1e9": -1e9, "-100": -100.0}


def masked(value: float) -> PreTrainedModel:
    """Let the head forbid most tokens."""
    model = build("llama")

    def mask(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        forbidden = torch.arange(logits.shape[-1]) % 4 != 0
        return logits.masked_fill(forbidden, value)

    model.get_output_embeddings().register_forward_hook(mask)
    return model


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_that_masks_tokens_is_no_reason_to_refuse(shape: str, value: str) -> None:
    model, given = masked(VALUES[value]), prompts(2, (9, 6))
    plain = model.generate(**given, **GREEDY)
    out = model.generate(**given, **GREEDY, speculator="ngram", speculation_config=SHAPES[shape])
    assert torch.equal(out, plain)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("trees", [False, True])
def test_a_head_that_masks_tokens_hides_no_mistake(trees: bool, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = KVView.positions
    monkeypatch.setattr(KVView, "positions", lambda slots, first, block: positions(slots, first, block) + 1)
    with pytest.raises(ValueError, match="scores a chain of draft tokens differently from single steps"):
        check_target(masked(VALUES[value]), trees)


def test_the_difference_is_a_share_of_the_spread_of_free_tokens() -> None:
    expected = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = expected + 0.1 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    wanted = (found - expected).abs().amax(-1) / expected.std(-1)
    torch.testing.assert_close(difference(found, expected), wanted)
    for value in VALUES.values():
        more = [torch.nn.functional.pad(logits, (0, 40), value=value) for logits in (found, expected)]
        torch.testing.assert_close(difference(*more), wanted)
    assert difference(found.index_fill(1, torch.tensor([4]), -torch.inf), expected).isinf().all(), "masked in one only"
    assert difference(found, expected.index_fill(1, torch.tensor([4]), -torch.inf)).isinf().all()
    assert difference(found.index_fill(1, torch.tensor([4]), torch.nan), expected).isnan().all()


# --- Quantized modules -----------------------------------------------------------------------------------------------


def dynamic(model: Any) -> Any:
    """Quantize with torch.ao, whose modules show a method where the weight was, and no parameters."""
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def torchao(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = copy.deepcopy(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def bitsandbytes(model: Any) -> Any:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                sizes = child.in_features, child.out_features, child.bias is not None
                packed = library.nn.Linear4bit(*sizes, quant_type="nf4", compute_dtype=torch.float32)
                packed.load_state_dict(child.state_dict())
                setattr(module, name, packed)
    return model.to("cpu")


ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device_map": "cpu"}  # bitsandbytes would choose an accelerator


def through_a_file(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, **ON_CPU, **options)


def loaded_torchao(model: PreTrainedModel) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return through_a_file(model, quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def loaded_4bit(model: PreTrainedModel) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return through_a_file(model, quantization_config=BitsAndBytesConfig(load_in_4bit=True, **options))


def loaded_8bit(model: PreTrainedModel) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return through_a_file(model, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a Llama with matrices in blocks of 8 bits (Q8_0) and vectors in float32."""
    library, config = pytest.importorskip("gguf", reason="gguf is not installed"), model.config
    writer = library.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for kind in ("pad", "bos", "eos"):
        getattr(writer, f"add_{kind}_token_id")(getattr(config, f"{kind}_token_id"))
    names = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        for part, heads in {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.items():
            if part in name:  # the format keeps the two numbers that RoPE turns side by side
                weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = library.GGMLQuantizationType.Q8_0 if weight.ndim > 1 else library.GGMLQuantizationType.F32
        data = library.quantize(weight.contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf(model: PreTrainedModel) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(model, Path(folder, "model.gguf"))
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", **ON_CPU)


MODULES: tuple[Callable[[Any], Any], ...] = (dynamic, torchao, bitsandbytes)  # quantize any module where it is
LOADED: tuple[Callable[[Any], Any], ...] = (loaded_torchao, loaded_4bit, loaded_8bit, gguf)  # models of transformers
DRAFTS = ("vanilla", "medusa", "mtp", "eagle3", "eagle", "dflash", "dspark")
BORROWERS = ("medusa", "dflash", "dspark")  # of the head


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("way", "kind"), each_value(MODULES, DRAFTS))
def test_quantized_drafts_guess(way: Callable[[Any], Any], kind: str) -> None:
    model, given = build("llama"), prompts(2, (9, 6))
    quantized = way(draft("llama", kind))
    plain = model.generate(**given, **GREEDY)
    for config in SHAPES.values():
        out = model.generate(
            **given, **GREEDY, speculator=quantized, speculation_config=config, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        assert out.speculation.proposed > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("way", "kind"), each_value(MODULES, ["ngram", *DRAFTS]))
def test_quantized_targets_write_what_plain_generate_writes_or_are_refused(
    way: Callable[[Any], Any], kind: str
) -> None:
    """torch.ao scales the activations of a whole block alike, so that a block differs from single steps."""
    model, given = way(build("llama")), prompts(2, (9, 6))
    plain = model.generate(**given, **GREEDY)
    speculator = "ngram" if kind == "ngram" else draft("llama", kind)
    if way in (dynamic, bitsandbytes) and kind in BORROWERS:
        with pytest.raises(ValueError, match="lm_head is absent, offloaded or quantized"):
            model.generate(**given, **GREEDY, speculator=speculator)
    elif way is dynamic:
        with pytest.raises(ValueError, match="differently from single steps"):
            model.generate(**given, **GREEDY, speculator=speculator)
    else:
        assert torch.equal(model.generate(**given, **GREEDY, speculator=speculator), plain)


def wide() -> PreTrainedModel:
    """Build a Llama whose rows fill the blocks of 64 numbers that bitsandbytes scales together."""
    return build("llama", hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.mark.parametrize("way", LOADED)
def test_loaded_models_are_quantized_and_near_the_ones_that_were_saved(way: Callable[[Any], Any]) -> None:
    model, given = wide(), prompts(2, (9, 6))
    quantized = way(model)
    with torch.no_grad():
        before, after = (one(**given).logits[:, -1] for one in (model, quantized))  # (rows, vocabulary)
    alike = torch.cosine_similarity(before - before.mean(-1, True), after - after.mean(-1, True), dim=-1)  # (rows,)
    assert (alike > 0.7).all() and (alike < 0.9999).all()


@pytest.mark.parametrize(("way", "batch"), each_value(LOADED, ["one", "ragged"]))
def test_loaded_drafts_guess(way: Callable[[Any], Any], batch: str) -> None:
    model, given = wide(), prompts(*BATCHES[batch])
    quantized, plain = way(model), model.generate(**given, **GREEDY)
    for config in SHAPES.values():
        out = model.generate(
            **given, **GREEDY, speculator=quantized, speculation_config=config, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        assert out.speculation.accepted > 0


@pytest.mark.parametrize(
    ("way", "kind", "batch", "shape"), pairwise(LOADED, ["ngram", "vanilla"], ["one", "ragged"], SHAPES)
)
def test_loaded_targets_write_what_plain_generate_writes_or_are_refused(
    way: Callable[[Any], Any], kind: str, batch: str, shape: str
) -> None:
    """LLM.int8 treats a column apart if any token of the block is large there: a block differs from single steps."""
    model, given = way(wide()), prompts(*BATCHES[batch])
    speculator = "ngram" if kind == "ngram" else noisy(wide())
    options: dict[str, Any] = GREEDY | {"speculator": speculator, "speculation_config": SHAPES[shape]}
    if way is loaded_8bit:
        with pytest.raises(ValueError, match=r"differently from single steps .*: try bfloat16 compute \(dtype="):
            model.generate(**given, **options)
    else:
        assert torch.equal(model.generate(**given, **options), model.generate(**given, **GREEDY))


def test_products_of_quantised_weights_may_be_coarser_than_the_rest() -> None:
    """As in QLoRA: norms, embeddings and head in float32, compute in bfloat16."""
    model = bitsandbytes(wide())
    assert coarsest_precision(model) is torch.float32
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.bfloat16
    assert model.dtype is torch.float32 and coarsest_precision(model) is torch.bfloat16
    assert difference_from_plain(model, CHAIN)[1] > 0.03


@pytest.mark.parametrize("way", [loaded_4bit, bitsandbytes])
def test_a_quantised_target_that_is_refused_in_float32_is_told_of_bfloat16(
    way: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it computes in bfloat16, or where nothing is quantised."""
    positions = KVView.positions
    monkeypatch.setattr(KVView, "positions", lambda slots, first, block: positions(slots, first, block) + 1)
    with pytest.raises(ValueError, match="multiplied in float32: try bfloat16 compute"):
        check_target(way(wide()), trees=False)
    halved = way(wide())
    for module in halved.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.bfloat16
    for model in (halved, wide()):
        with pytest.raises(ValueError, match="differently from single steps") as caught:
            check_target(model, trees=False)
        assert "bfloat16" not in str(caught.value)


def test_a_head_that_is_split_over_processes_is_not_lent() -> None:
    """A draft's own computation would mix it with plain tensors."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build("llama")
        model.lm_head.weight = nn.Parameter(
            distribute_tensor(model.lm_head.weight.data, init_device_mesh("cpu", (1,)))
        )
        with pytest.raises(ValueError, match=r"lm_head is split over processes: .*--self-contained"):
            draft("llama", "medusa").bind(model)
    finally:
        distributed.destroy_process_group()


def test_a_head_that_cannot_be_lent_is_named() -> None:
    model = dynamic(build("llama"))
    with pytest.raises(ValueError, match="lm_head is absent, offloaded or quantized"):
        draft("llama", "medusa").bind(model)
