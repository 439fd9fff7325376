"""Encoder-decoder targets in the mode: a source alone or in a padded batch, a text with draft tokens or without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoder_decoders import build, generate, sources
from pairs import pairwise
from peft import LoraConfig, get_peft_model
from speech import sound, whisper
from test_invariance import DTYPES, OPTIONS, alone_differs, text_parts
from test_invariance import short_parts as short_parts
from torch import Tensor
from transformers import PreTrainedModel
from twins import SHAPES, Oracle, noisy

import hf_spec
from hf_spec import SpeculationConfig
from hf_spec.invariance import columns, mode
from hf_spec.scoring import relative_bias, runner
from hf_spec.scoring.plain import difference

CORE = ("t5", "bart", "whisper")
OTHERS = """bert+bert bert+gpt2 blenderbot m2m_100 marian mbart mt5 pegasus plbart pop2piano
    seamless_m4t seamless_m4t_v2 t5gemma umt5""".split()
LENGTHS = (40, 33, 9)  # of sources, the first longer than one block of keys


def model_of(name: str, **options: Any) -> PreTrainedModel:
    model = copy.deepcopy(build(name, **options))
    model.generation_config.eos_token_id = None
    return model


def row_of(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Take one source out of its batch, without padding."""
    one = {name: values[row : row + 1] for name, values in given.items()}
    if "attention_mask" in one:
        seen = one["attention_mask"][0].bool()
        one = {name: values[:, seen] for name, values in one.items()}
    return one


def same_bits(found: Any, wanted: Any, row: int = 0) -> bool:
    """Compare a row of ``found`` with the only row of ``wanted``: text, logits, scores, states of both sides."""
    parts = text_parts(found, wanted, row, "decoder_hidden_states")
    for state, own in zip(found.encoder_hidden_states, wanted.encoder_hidden_states, strict=True):
        parts.append((state[row, : own.shape[1]], own[0]))
    for side in ("self_attention_cache", "cross_attention_cache"):
        layers, own_layers = (getattr(one.cache, side).layers for one in (found, wanted))
        for layer, own_layer in zip(layers, own_layers, strict=True):
            for name in ("keys", "values"):
                own, states = getattr(own_layer, name)[0], getattr(layer, name)[row]
                count = own.shape[1]
                parts.append((states[:, :count] if "cross" in side else states[:, -count:], own))
    return all(torch.equal(one, other) for one, other in parts)


def drawn(model: PreTrainedModel, batch: int) -> dict[str, Tensor]:
    given = sources(model, batch, lengths=LENGTHS)
    return {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in given.items()}


def compare(model: PreTrainedModel, shape: str, batch: int) -> None:
    """Generate from each source alone, from all together, and with draft tokens; compare all that is returned."""
    given = drawn(model, batch)
    alone = [generate(model, **row_of(given, row), **OPTIONS) for row in range(batch)]
    text = torch.cat([one.sequences for one in alone])
    asked: dict[str, Any] = {"speculator": "ngram"}
    if shape != "ngram":
        asked = {"speculator": Oracle(text), "speculation_config": SHAPES[shape]}
    plain = generate(model, **given, **OPTIONS)
    fast = generate(model, **given, **OPTIONS, **asked)
    for row, one in enumerate(alone):
        assert same_bits(plain, one, row)
        assert same_bits(fast, one, row)
    speculation = hf_spec.last_speculation(model)
    assert speculation is not None and speculation.invariant
    assert shape == "ngram" or speculation.acceptance_rate > 0.2


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "batch"), pairwise(CORE, DTYPES, [*SHAPES, "ngram"], (1, 3)), ids=str
)
def test_everything_of_a_row_has_the_bits_of_its_source_alone(
    name: str, dtype: torch.dtype, shape: str, batch: int
) -> None:
    model = model_of(name, dtype=dtype)
    with hf_spec.invariant(model):
        compare(model, shape, batch)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SHAPES, "ngram"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_for_other_families(name: str, dtype: torch.dtype, shape: str) -> None:
    model = model_of(name, dtype=dtype)
    with hf_spec.invariant(model):
        compare(model, shape, 3)


def test_a_draft_model_and_a_seed_give_the_very_text_of_plain() -> None:
    model = model_of("t5", dtype=torch.bfloat16)
    draft, given = noisy(model), drawn(model, 3)
    options = OPTIONS | {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    exact = SpeculationConfig(verification="exact", tree="dynamic", num_tree_tokens=6)
    with hf_spec.invariant(model):
        torch.manual_seed(7)
        plain = generate(model, **given, **options)
        for _ in range(2):
            torch.manual_seed(7)
            fast = generate(model, **given, **options, speculator=draft, speculation_config=exact)
            assert torch.equal(plain.sequences, fast.sequences)
            assert all(torch.equal(one, other) for one, other in zip(plain.scores, fast.scores, strict=True))


@pytest.mark.parametrize("name", CORE)
def test_what_is_computed_is_that_of_transformers(name: str) -> None:
    model = model_of(name, attn_implementation="eager")
    given, ids = drawn(model, 3), torch.tensor([[1, 5, 6]] * 3)
    with torch.no_grad():
        wanted = model(**given, decoder_input_ids=ids)
    with hf_spec.invariant(model), torch.no_grad():
        found = model(**given, decoder_input_ids=ids)
    mask = given.get("attention_mask", torch.ones(wanted.encoder_last_hidden_state.shape[:2])).bool()
    states = found.encoder_last_hidden_state[mask], wanted.encoder_last_hidden_state[mask]
    torch.testing.assert_close(*states, rtol=0, atol=5e-3)  # T5's scores are large: eager is 5e-4 from float64
    assert difference(found.logits, wanted.logits).max() < 1e-2


def test_biases_without_gradients_are_said_to_have_none() -> None:
    model = model_of("t5")
    with hf_spec.invariant(model), pytest.raises(ValueError, match=r"position biases have no gradients.*no_grad"):
        model(**drawn(model, 1), decoder_input_ids=torch.tensor([[1]]))


def test_all_parts_attend_as_before_after_the_mode() -> None:
    model = model_of("t5")
    given, configs = drawn(model, 3), (model.config, model.encoder.config, model.decoder.config)
    before = generate(model, **given, **OPTIONS)
    with hf_spec.invariant(model):
        assert {one._attn_implementation for one in configs} == {"hf_spec_invariant"}
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="attention was set to 'sdpa'"):
            generate(model, **given, **OPTIONS)
    assert {one._attn_implementation for one in configs} == {"sdpa"}
    assert not any("forward" in vars(module) for module in model.modules())
    again = generate(model, **given, **OPTIONS, speculator="ngram")
    assert torch.equal(before.sequences, again.sequences)
    assert not again.speculation.invariant


def test_parts_of_a_config_attend_as_before_after_the_mode() -> None:
    """Here both sides read configs that are parts of the model's."""
    model = model_of("bert+bert")
    configs = model.config, model.encoder.config, model.decoder.config
    assert model.config.encoder is model.encoder.config
    model.decoder.set_attn_implementation("eager")
    before = [one._attn_implementation for one in configs]
    undo = mode._attend(model)
    assert {one._attn_implementation for one in configs} == {"hf_spec_invariant"}
    undo(lambda changed: changed)
    assert [one._attn_implementation for one in configs] == before


def test_sources_that_all_see_the_same_share_their_columns() -> None:
    tiling = columns.Tiling(3, (8, 16), 32, 16, copies=100)
    found = columns.columns_of_all(3, 2, 40, torch.device("cpu")).pieces(tiling, torch.float32)
    assert [[text.row for text in piece.texts] for piece in found] == [[0, 1, 2]]
    assert [(part.columns, part.mask.shape) for part in found[0].parts] == [
        ((16, 16, 16), (1, 1, 8, 32)),
        ((0, 0, 0), (1, 1, 1, 16)),
    ]
    of_many = columns.columns_of_all(3, 9, 40, torch.device("cpu")).pieces(tiling, torch.float32)
    assert [[text.row for text in piece.texts] for piece in of_many] == [[0], [1], [2]], "more queries than a tile has"
    assert all(piece.parts is of_many[0].parts for piece in of_many)


# -- what is refused, and mistakes that must be found -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit+gpt2", "its encoder reads pixel_values"),
        ("bigbird_pegasus", r"model\.encoder\.layers\.0\.self_attn"),
        ("mvp", r"layers\.0\.self_attn \(MvpAttention\) does not look its attention up"),
        ("longt5", r"LocalSelfAttention \(LongT5LocalAttention\) does not look its attention up"),
        ("nllb-moe", r"ffn \(NllbMoeSparseMLP\) is given more than rows"),
        ("switch_transformers", "SwitchTransformersAttention attends by a mask"),
        ("pegasus_x", "cannot be made invariant: a forward of it fails"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name: str, reason: str) -> None:
    model = model_of(name)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        hf_spec.invariant(model)
    assert not mode.is_invariant(model) and model.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_of_sources_that_is_not_hidden_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(*args: Any, **kwargs: Any) -> Tensor:
        source = kwargs.get("mask_function") is columns.bidirectional_mask_function
        return original(*args, **kwargs | ({"attention_mask": None} if source else {}))

    original = columns.mask_with_columns
    monkeypatch.setattr(columns, "mask_with_columns", unmasked)
    with pytest.raises(ValueError, match=r"encoder\..* computes other bits when its row is read in a batch"):
        hf_spec.invariant(model_of(name))


def test_biases_by_columns_of_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that knows the columns of the cache, and not those of a node's own text, differs in trees."""
    monkeypatch.setattr(runner, "hook_biases", lambda model: relative_bias.unhook_biases())
    with pytest.raises(ValueError, match=r"decoder\..*as a path of a tree"):
        hf_spec.invariant(model_of("t5"))


def test_one_row_of_a_source_that_is_not_padded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not alone_differs():
        pytest.skip("this processor multiplies one row as it does several")
    monkeypatch.setattr(mode, "in_sizes", lambda function, states, sizes: function(states))
    with pytest.raises(ValueError, match="computes other bits"):
        hf_spec.invariant(model_of("bart"))


# -- what else meets sources ------------------------------------------------------------------------------------------


def test_windows_of_sound_have_the_text_that_each_gets_alone() -> None:
    model = copy.deepcopy(whisper()).bfloat16()
    given = sound(model, 3, windows=2.3)
    given["input_features"] = given["input_features"].bfloat16()
    options: dict[str, Any] = {"max_new_tokens": 16, "return_timestamps": True}
    options["exponential_decay_length_penalty"] = (4, 1.25)  # ends windows at different lengths
    with hf_spec.invariant(model):
        plain = model.generate(**given, **options)
        fast = model.generate(**given, **options, speculator="ngram")
        for row, seen in enumerate(given["attention_mask"].bool()):
            alone = model.generate(given["input_features"][row : row + 1, :, seen], **options)
            assert torch.equal(alone[0], plain[row, : alone.shape[1]])
    assert torch.equal(fast, plain)


def test_a_row_with_a_seed_of_its_own_has_the_text_of_plain_alone() -> None:
    model, seeds = model_of("bart", dtype=torch.bfloat16), (5, 6, 5)
    given, options = drawn(model, 3), OPTIONS | {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    config = SpeculationConfig(verification="exact", num_speculative_tokens=3, row_seeds=seeds)
    with hf_spec.invariant(model):
        fast = generate(model, **given, **options, speculator=noisy(model), speculation_config=config)
        for row, seed in enumerate(seeds):
            torch.manual_seed(seed)
            assert same_bits(fast, generate(model, **row_of(given, row), **options), row)


def test_adapters_and_packed_weights_have_the_bits_of_a_source_alone() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "fc2"], init_lora_weights=False)
    model: Any = get_peft_model(model_of("bart", d_model=256), config).eval()
    with hf_spec.packed(model.get_base_model(), force=True) as packing, hf_spec.invariant(model):
        if not packing.packed:
            pytest.skip(str(packing))
        compare(model.get_base_model(), "tree", 3)
