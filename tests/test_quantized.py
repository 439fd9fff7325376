"""Heads that mask tokens, and quantized modules: the self-check sees through them, and nothing breaks halfway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build, prompts
from test_chaos import draft
from torch import Tensor, nn
from transformers import PreTrainedModel
from twins import SHAPES

from hf_spec.scoring.plain import difference
from hf_spec.scoring.selfcheck import check_target
from hf_spec.scoring.slots import Slots

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
    advance = Slots.advance
    monkeypatch.setattr(Slots, "advance", lambda slots, block: advance(slots, block) + 1)
    with pytest.raises(ValueError, match="scores a chain of guesses differently from single steps"):
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


WAYS: tuple[Callable[[Any], Any], ...] = (dynamic, torchao, bitsandbytes)
DRAFTS = ("vanilla", "medusa", "mtp", "eagle3", "eagle", "dflash", "dspark")
BORROWERS = ("medusa", "dflash", "dspark")  # of the head


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("way", WAYS)
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
@pytest.mark.parametrize("kind", ["ngram", *DRAFTS])
@pytest.mark.parametrize("way", WAYS)
def test_quantized_targets_write_what_plain_generate_writes_or_are_refused(
    way: Callable[[Any], Any], kind: str
) -> None:
    """torch.ao scales the activations of a whole block alike, so that a block differs from single steps."""
    model, given = way(build("llama")), prompts(2, (9, 6))
    plain = model.generate(**given, **GREEDY)
    speculator = "ngram" if kind == "ngram" else draft("llama", kind)
    if way is dynamic:
        with pytest.raises(ValueError, match="differently from single steps"):
            model.generate(**given, **GREEDY, speculator=speculator)
    elif way is bitsandbytes and kind in BORROWERS:
        with pytest.raises(ValueError, match="lm_head is absent, offloaded or quantized"):
            model.generate(**given, **GREEDY, speculator=speculator)
    else:
        assert torch.equal(model.generate(**given, **GREEDY, speculator=speculator), plain)


def test_a_head_that_cannot_be_lent_is_named() -> None:
    model = dynamic(build("llama"))
    with pytest.raises(ValueError, match="lm_head is absent, offloaded or quantized"):
        draft("llama", "medusa").bind(model)
