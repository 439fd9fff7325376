"""In the mode of ``hf_spec.invariant`` the bits of a row are plain's, alone or in a batch, with chains and trees."""

from __future__ import annotations

import copy
import gc
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import build, prompts
from layouts import take_layout
from pairs import pairwise
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3VLMoeConfig
from twins import SHAPES, Oracle, draft

import hf_spec
from hf_spec import SpeculationConfig
from hf_spec.invariance import attention, columns, mode, rows
from hf_spec.invariance.attention import attend_part
from hf_spec.invariance.mixtures import BATCHED, GROUPED, WAY
from hf_spec.invariance.rows import SIZES, agreeing_sizes, cancelling, in_sizes, with_float32
from hf_spec.invariance.shared_configs import change, is_changed
from hf_spec.scoring import selfcheck
from hf_spec.scoring.prompts import Prompt

# Families with one thing each that others lack: biases, norms of heads, parallel blocks, Conv1D, joined projections.
NAMES = ["llama", "qwen2:swa", "qwen3", "gemma3_text", "phi", "gpt2", "gpt_neox", "olmo2"]
OTHERS = ["qwen2", "mistral", "gemma", "phi3", "olmo", "smollm3", "opt", "granite", "cohere", "stablelm"]
OTHERS += ["gemma2", "mixtral", "qwen3_moe", "gpt_oss"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = {"one": (28,), "three": (28, 26, 9), "eight": (28, 3, 21, 1)}
NEW = 9
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
}


@pytest.fixture(autouse=True)
def short_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let late keys begin at a multiple of 16 places, so that short texts have early ones, and forget the models."""
    monkeypatch.setattr(mode, "_found", weakref.WeakKeyDictionary())
    if "real" not in request.node.name:
        monkeypatch.setattr(columns, "PLACES", 16)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def target(name: str = "llama", **overrides: Any) -> PreTrainedModel:
    model = build(name, **overrides)
    model.generation_config.eos_token_id = None
    return model


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Take one row out of its batch, without padding."""
    real = inputs["attention_mask"][row].bool()
    return {name: values[row : row + 1, real] for name, values in inputs.items()}


def text_parts(found: Any, wanted: Any, row: int, hidden: str = "hidden_states") -> list[tuple[Tensor, Tensor]]:
    """Pair a row of ``found`` with the only row of ``wanted``: text, logits, scores, and ``hidden`` states."""
    parts = [(found.sequences[row, -NEW:], wanted.sequences[0, -NEW:])]
    for one, other in ((found.logits, wanted.logits), (found.scores, wanted.scores)):
        parts += [(step[row], own[0]) for step, own in zip(one, other, strict=True)]
    for step, own_step in zip(getattr(found, hidden), getattr(wanted, hidden), strict=True):
        parts += [(state[row, -own.shape[1] :], own[0]) for state, own in zip(step, own_step, strict=True)]
    return parts


def same_bits(found: Any, wanted: Any, row: int = 0) -> bool:
    """Compare a row of ``found`` with the only row of ``wanted``: text, logits, scores, hidden states, and cache."""
    parts = text_parts(found, wanted, row)
    for layer, own_layer in zip(found.cache.layers, wanted.cache.layers, strict=True):
        for name in ("keys", "values") if hasattr(own_layer, "values") else ():
            own_states = getattr(own_layer, name)[0]
            parts.append((getattr(layer, name)[row, :, -own_states.shape[1] :], own_states))
    return all(torch.equal(one, other) for one, other in parts)


def compare(model: PreTrainedModel, shape: str, batch: str) -> None:
    """Generate each row alone, all together, and all with draft tokens, and compare all that is returned."""
    inputs = prompts({"one": 1, "three": 3, "eight": 8}[batch], LENGTHS[batch])
    alone = [model.generate(**row_of(inputs, row), **OPTIONS) for row in range(len(inputs["input_ids"]))]
    text = torch.cat([inputs["input_ids"], torch.cat([one.sequences[:, -NEW:] for one in alone])], dim=1)
    given: dict[str, Any] = {"speculator": "ngram"}
    if shape != "ngram":
        given = {"speculator": Oracle(text), "speculation_config": SHAPES[shape]}
    plain = model.generate(**inputs, **OPTIONS)
    fast = model.generate(**inputs, **OPTIONS, **given)
    assert all(same_bits(plain, one, row) for row, one in enumerate(alone))
    assert all(same_bits(fast, one, row) for row, one in enumerate(alone))
    assert fast.speculation.invariant
    assert shape == "ngram" or fast.speculation.acceptance_rate > 0.2


@pytest.mark.parametrize("name", NAMES)
def test_everything_of_a_row_has_the_bits_of_plain_alone(name: str) -> None:
    model = target(name)
    with hf_spec.invariant(model):
        compare(model, "tree", "three")


@pytest.mark.parametrize(("dtype", "shape", "batch"), pairwise(DTYPES, [*SHAPES, "ngram"], LENGTHS))
def test_so_it_is_in_half_precision_and_with_any_draft(dtype: torch.dtype, shape: str, batch: str) -> None:
    model = target(dtype=dtype, num_hidden_layers=2)
    with hf_spec.invariant(model):
        compare(model, shape, batch)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SHAPES, "ngram"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_so_it_is_for_all_families(name: str, dtype: torch.dtype, shape: str) -> None:
    model = target(name, dtype=dtype)
    with hf_spec.invariant(model):
        compare(model, shape, "eight")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_it_is_with_two_threads(dtype: torch.dtype, two_threads: None) -> None:
    model = target(dtype=dtype, num_hidden_layers=2)
    with hf_spec.invariant(model):
        compare(model, "tree", "three")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["in blocks", "kept", "float16"])
def test_so_it_is_with_packed_weights_and_one_plain_one_among_them(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is torch.float32:
        take_layout(layout, monkeypatch)  # else the layout of this processor
    model = target(dtype=dtype, num_hidden_layers=2, hidden_size=256, intermediate_size=512, vocab_size=512)
    model = model.bfloat16().to(dtype)
    with hf_spec.packed(model, force=True) as report:
        if not report.packed:
            pytest.skip(str(report))
        hf_spec.unpack(model.model.layers[1].mlp.up_proj)
        with hf_spec.invariant(model) as invariance:
            compare(model, "tree", "three")
        assert sum(invariance.products.values()) == 15


def test_weights_of_one_shape_in_two_layouts_are_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in oneDNN's blocks has the bits of several, and one in float16 numbers has not."""
    take_layout("float16", monkeypatch)
    model = target(num_hidden_layers=2, hidden_size=256, intermediate_size=512, vocab_size=512).bfloat16().float()
    with torch.no_grad():
        for weight in model.model.layers[0].parameters():
            weight.mul_(1 + 2.0**-12)  # more digits than float16 has
    with hf_spec.packed(model, force=True):
        first, second = (one.mlp.up_proj.weight._storage.packed for one in model.model.layers)
        assert type(first) is not type(second)
        with hf_spec.invariant(model):
            compare(model, "tree", "three")


def test_real_blocks_of_keys_make_no_difference() -> None:
    model, inputs = target(num_hidden_layers=2), prompts(2, (124, 90))
    with hf_spec.invariant(model):
        alone = [model.generate(**row_of(inputs, row), **OPTIONS) for row in (0, 1)]
        fast = model.generate(**inputs, **OPTIONS, speculator="ngram")
    assert all(same_bits(fast, one, row) for row, one in enumerate(alone))


def test_a_prompt_in_pieces_has_the_bits_of_one_read_at_once() -> None:
    model, inputs = target(num_hidden_layers=2), prompts(2, (28, 9))
    with hf_spec.invariant(model):
        whole = model.generate(**inputs, **OPTIONS)
        pieces = model.generate(**inputs, **OPTIONS, prefill_chunk_size=5, speculator="ngram")
    assert all(torch.equal(one, other) for one, other in zip(whole.logits, pieces.logits, strict=True))


def test_sampling_with_a_seed_gives_the_very_text_of_plain() -> None:
    model, inputs = target(num_hidden_layers=2, dtype=torch.bfloat16), prompts(3, (28, 9, 21))
    options = OPTIONS | {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    exact = SpeculationConfig(verification="exact", num_speculative_tokens=3)
    with hf_spec.invariant(model):
        torch.manual_seed(7)
        plain = model.generate(**inputs, **options)
        torch.manual_seed(7)
        fast = model.generate(**inputs, **options, speculator=draft(), speculation_config=exact)
    assert torch.equal(plain.sequences, fast.sequences)
    assert all(torch.equal(one, other) for one, other in zip(plain.scores, fast.scores, strict=True))


@pytest.mark.parametrize("drafted", [False, True])
def test_a_row_with_a_seed_of_its_own_has_the_text_of_plain_alone(drafted: bool) -> None:
    model, inputs, seeds = target(num_hidden_layers=2, dtype=torch.bfloat16), prompts(3, (28, 9, 21)), (5, 6, 5)
    options = OPTIONS | {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    config = SpeculationConfig(verification="exact", num_speculative_tokens=3, row_seeds=seeds)
    with hf_spec.invariant(model):
        alone = []
        for row, seed in enumerate(seeds):
            torch.manual_seed(seed)
            alone.append(model.generate(**row_of(inputs, row), **options))
        given = {"speculator": draft() if drafted else "plain", "speculation_config": config}
        for _ in range(2):
            fast = model.generate(**inputs, **options, **given)
            assert all(same_bits(fast, one, row) for row, one in enumerate(alone))
        given["speculation_config"] = config.merge(row_seeds=(1, 2))
        with pytest.raises(ValueError, match="2 seeds for 3 rows"):
            model.generate(**inputs, **options, **given)


def test_seeds_of_rows_are_checked() -> None:
    with pytest.raises(ValueError, match="need verification='exact'"):
        SpeculationConfig(row_seeds=(1,))
    with pytest.raises(ValueError, match="whole numbers"):
        SpeculationConfig(verification="exact", row_seeds=(1, 2.5))
    model, config = target(num_hidden_layers=1), SpeculationConfig(verification="exact", row_seeds=(1, 2))
    given = {"speculator": "ngram", "speculation_config": config, "max_new_tokens": 3}
    for engine in ("generate", "generate_batch"):
        with pytest.raises(ValueError, match="row_seeds is not for generate_many"):
            list(hf_spec.generate_many(model, [[1, 2], [3]], engine=engine, **given))
    with pytest.raises(ValueError, match="row_seeds: all requests draw from one generator"):
        model.generate_batch([[1, 2]], speculator="ngram", speculation_config=config)
    for sampled in (False, True):
        with pytest.raises(
            ValueError, match="Cannot generate with a speculator: row_seeds has 2 seeds for 3 rows; pass"
        ):
            model.generate(**prompts(3, (5,)), **given, do_sample=sampled)


def test_many_prompts_in_batches_get_the_text_that_each_gets_alone() -> None:
    model = target(num_hidden_layers=2, dtype=torch.bfloat16)
    inputs = prompts(4, (28, 9, 21, 3))
    rows_alone = [row_of(inputs, row) for row in range(4)]
    with hf_spec.invariant(model):
        alone = [model.generate(**one, max_new_tokens=NEW, do_sample=False)[0, -NEW:] for one in rows_alone]
        asked = [one["input_ids"][0].tolist() for one in rows_alone]
        options = {"max_new_tokens": NEW, "do_sample": False}
        found = list(hf_spec.generate_many(model, asked, speculator="ngram", batch_size=3, **options))
    assert [one.tokens for one in sorted(found, key=lambda one: one.index)] == [text.tolist() for text in alone]


@pytest.mark.parametrize("lengths", [(28, 9, 21), (28, 28, 28), (28,)], ids=["padded", "equal", "one"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_static_caches_give_the_same_bits(name: str, lengths: tuple[int, ...]) -> None:
    model, inputs = target(name), prompts(len(lengths), lengths)
    with hf_spec.invariant(model):
        dynamic = model.generate(**inputs, **OPTIONS)
        static = model.generate(**inputs, **OPTIONS, cache_implementation="static")
        fast = model.generate(**inputs, **OPTIONS, cache_implementation="static", speculator="ngram")
    for found in (static, fast):
        assert torch.equal(found.sequences, dynamic.sequences)
        assert all(torch.equal(one, other) for one, other in zip(found.logits, dynamic.logits, strict=True))


def test_masked_tokens_within_a_row_make_no_difference() -> None:
    """A second turn after answers of unequal lengths is masked so."""
    model, inputs = target(num_hidden_layers=2), prompts(2, (60, 60))
    inputs["attention_mask"][0, 10:15] = 0
    inputs["attention_mask"][1, :3] = inputs["attention_mask"][1, 40:59] = 0
    with hf_spec.invariant(model):
        alone = [model.generate(**row_of(inputs, row), **OPTIONS) for row in range(2)]
        plain = model.generate(**inputs, **OPTIONS)
        fast = model.generate(**inputs, **OPTIONS, speculator="ngram")
        for found, row in itertools.product((plain, fast), range(2)):
            assert torch.equal(found.sequences[row, -NEW:], alone[row].sequences[0, -NEW:])
            assert all(torch.equal(one[row], own[0]) for one, own in zip(found.logits, alone[row].logits, strict=True))


# -- the mode begins and ends -----------------------------------------------------------------------------------------


def test_outside_of_the_mode_nothing_changes() -> None:
    model, inputs = target(num_hidden_layers=2), prompts(2, (28, 9))
    before = model.generate(**inputs, **OPTIONS)
    kept = model.config._attn_implementation
    with hf_spec.invariant(model) as outer:
        with hf_spec.invariant(model) as inner:  # a second one changes nothing, and ends nothing
            assert str(inner) == str(outer)
        assert mode.is_invariant(model)
        inside = model.generate(**inputs, **OPTIONS, speculator="ngram")
    assert not mode.is_invariant(model)
    after = model.generate(**inputs, **OPTIONS, speculator="ngram")
    assert model.config._attn_implementation == kept
    assert not any("forward" in vars(module) for module in model.modules())
    assert inside.speculation.invariant and not after.speculation.invariant
    again = model.generate(**inputs, **OPTIONS)
    assert all(torch.equal(one, other) for one, other in zip(before.logits, again.logits, strict=True))


def test_a_copy_is_outside_of_the_mode() -> None:
    model, inputs = target(num_hidden_layers=2), prompts(2, (28, 9))
    before = model.generate(**inputs, **OPTIONS)
    with hf_spec.invariant(model):
        inside = model.generate(**inputs, **OPTIONS)
        duplicate = copy.deepcopy({"model": model})["model"]
        assert mode.is_invariant(model) and not mode.is_invariant(duplicate)
        assert duplicate.lm_head.weight is not model.lm_head.weight
        assert duplicate.config._attn_implementation == "sdpa"
        assert not any("forward" in vars(module) for module in duplicate.modules())
        assert type(duplicate) is type(model) and vars(duplicate).keys() == vars(copy.deepcopy(duplicate)).keys()
        copied = duplicate.generate(**inputs, **OPTIONS)
        again = model.generate(**inputs, **OPTIONS)
        with hf_spec.invariant(duplicate):
            of_copy = duplicate.generate(**inputs, **OPTIONS)
    assert not hasattr(model, "__deepcopy__")
    for found, wanted in ((copied, before), (again, inside), (of_copy, inside)):
        assert all(torch.equal(one, other) for one, other in zip(found.logits, wanted.logits, strict=True))


def test_a_copy_keeps_forwards_that_others_replaced() -> None:
    model, counted = target(num_hidden_layers=1), []
    layer = model.lm_head

    def counting(self: Any, states: Tensor) -> Tensor:
        counted.append(self)
        return nn.functional.linear(states, self.weight)

    layer.forward = types.MethodType(counting, layer)
    model.lm_head.requires_grad_(False)
    with hf_spec.invariant(model):
        duplicate = copy.deepcopy(model)
    counted.clear()
    duplicate(**prompts(1))
    assert counted == [duplicate.lm_head]


def test_the_mode_can_begin_again_and_gives_the_same_bits() -> None:
    model, inputs = target(num_hidden_layers=2), prompts(2, (28, 9))
    found = []
    for _ in range(2):
        invariance = hf_spec.invariant(model)
        found.append(model.generate(**inputs, **OPTIONS, speculator="ngram"))
        invariance.close()
        invariance.close()
    assert all(torch.equal(one, other) for one, other in zip(found[0].logits, found[1].logits, strict=True))


def test_a_mode_that_nobody_ends_does_not_keep_the_model() -> None:
    model = target(num_hidden_layers=1)
    hf_spec.invariant(model)
    is_there = weakref.ref(model)
    del model
    gc.collect()
    assert is_there() is None


def test_weights_and_threads_stay_as_they_were_tried() -> None:
    model = target(num_hidden_layers=2, hidden_size=256, intermediate_size=512, vocab_size=512)
    inputs, before = prompts(1), torch.get_num_threads()
    with hf_spec.invariant(model):
        if hf_spec.pack(model, force=True).packed:
            with pytest.raises(ValueError, match="packed or unpacked"):
                model.generate(**inputs, **OPTIONS)
            hf_spec.unpack(model)
        torch.set_num_threads(before + 1)
        try:
            with pytest.raises(ValueError, match="threads"):
                model.generate(**inputs, **OPTIONS)
        finally:
            torch.set_num_threads(before)
        model.generate(**inputs, **OPTIONS)
        model.bfloat16()
        with pytest.raises(ValueError, match=r"torch.float32 became torch.bfloat16"):
            model.generate(**inputs, **OPTIONS)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_next", r"layers\.0\.linear_attn"),
        ("jamba", r"layers\.0\.mamba\."),
        ("mamba2", r"layers\.0\.mixer"),
        ("rwkv", "does not look its attention up"),
        ("deepseek_v32", "DeepseekV32Attention attends with indices"),
        ("xglm", r"layers\.0\.self_attn \(XGLMAttention\) does not look its attention up"),
        ("falcon:alibi", "FalconAttention attends by a mask"),
    ],
)
def test_what_depends_on_other_rows_is_refused_by_name(name: str, reason: str) -> None:
    model = build(name)
    with pytest.raises(ValueError, match=reason):
        hf_spec.invariant(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not mode.is_invariant(model)
    model.generate(**prompts(2, (5, 3)), max_new_tokens=3, do_sample=False)  # as before


def test_models_that_train_or_are_compiled_are_refused() -> None:
    model = target(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"train mode; call model\.eval"):
        hf_spec.invariant(model.train())
    model.eval().compile()
    with pytest.raises(ValueError, match="compiled"):
        hf_spec.invariant(model)


def test_offloaded_models_are_refused() -> None:
    with pytest.raises(ValueError, match="several devices, or offloaded: meta"):
        hf_spec.invariant(target(num_hidden_layers=2).to("meta"))
    model = target(num_hidden_layers=2)
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match="offloaded: cpu, meta"):
        hf_spec.invariant(model)


def test_transformers_own_engine_is_refused() -> None:
    model = target(num_hidden_layers=2)
    with hf_spec.invariant(model):
        with pytest.raises(ValueError, match=r"pass speculator='plain'"):
            model.generate_batch(inputs=[[5, 6, 7]])
        with pytest.raises(ValueError, match=r"pass speculator='plain'"):
            list(hf_spec.generate_many(model, [[5, 6, 7]], engine="generate_batch", max_new_tokens=3))


def test_another_attention_is_noticed() -> None:
    model = target(num_hidden_layers=2)
    with hf_spec.invariant(model):
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="attention was set to 'sdpa'") as plain:
            model.generate(**prompts(1), **OPTIONS)
        with pytest.raises(
            ValueError, match="attention was set to 'sdpa'"
        ) as fast:  # without advice of the self-check
            model.generate(**prompts(1), **OPTIONS, speculator="ngram")
        assert str(fast.value) == str(plain.value)


def test_what_cannot_be_attended_to_is_said_without_other_advice() -> None:
    model, ids = target(num_hidden_layers=2), prompts(1)["input_ids"]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    with hf_spec.invariant(model), pytest.raises(ValueError, match="a mask that") as raised:
        selfcheck.check_target(
            model, trees=False, prompt=Prompt(ids, None, {"attention_mask": mask}, ("attention_mask",))
        )
    assert str(raised.value).endswith("which hf_spec.invariant does not compute")


def test_attention_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_sinks(*args: Any, s_aux: Tensor, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    original = attention.attention
    monkeypatch.setattr(mode, "attention", without_sinks)
    model = target("gpt_oss")
    with pytest.raises(ValueError, match="its logits would differ from transformers' by"):
        hf_spec.invariant(model)
    assert not mode.is_invariant(model)


# -- controls: mistakes that must be found ----------------------------------------------------------------------------


def alone_differs() -> bool:
    """Ask the processor whether one row alone is summed in another order than several, in float32."""
    layer = nn.Linear(64, 64)
    return agreeing_sizes(layer, torch.randn(SIZES[-1], 64)) != SIZES


def test_one_row_that_is_not_padded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not alone_differs():
        pytest.skip("this processor multiplies one row as it does several")
    monkeypatch.setattr(mode, "in_sizes", lambda function, states, sizes: function(states))
    with pytest.raises(ValueError, match=r"_proj .*computes other bits"):
        hf_spec.invariant(target(num_hidden_layers=2))


def test_keys_that_padding_shifts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_place", lambda column, mask: column)
    with pytest.raises(ValueError, match="in a batch, with padding"):
        hf_spec.invariant(target(num_hidden_layers=2))


def test_keys_at_scattered_columns_have_other_bits() -> None:
    size, width = columns.PLACES, 64
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, count, width, generator=generator) for count in (1, size, size))
    seen = torch.arange(size) < size // 2
    scattered = torch.cat([torch.arange(0, size - size % 2, 2), torch.arange(1, size, 2)])[:size]
    mask = torch.zeros(1, 1, 1, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    moved = [torch.zeros_like(states).index_copy(2, scattered, states) for states in (key, value)]
    moved_mask = torch.zeros_like(mask).index_copy(3, scattered, mask)
    wanted = attend_part(query, key, value, mask, 0.125)[0]
    found = attend_part(query, *moved, moved_mask, 0.125)[0]
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(found, wanted)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_sizes_are_those_that_agree() -> None:
    def one_alone(states: Tensor) -> Tensor:
        return states * (2 if len(states) == 1 else 1)

    def by_place(states: Tensor) -> Tensor:
        return states + torch.arange(len(states))[:, None]

    def in_fours(states: Tensor) -> Tensor:
        return states * (1 if len(states) % 4 == 0 else 2)

    def in_pairs(states: Tensor) -> Tensor:
        return states * (1 + torch.arange(len(states))[:, None] % 2)

    sample = torch.randn(SIZES[-1], 3)
    assert agreeing_sizes(lambda states: states * 2, sample) == SIZES
    assert agreeing_sizes(in_pairs, sample) == (1,)
    assert agreeing_sizes(one_alone, sample) == SIZES[1:]
    assert agreeing_sizes(by_place, sample) == (1,)
    assert agreeing_sizes(in_fours, sample) == tuple(size for size in SIZES if size % 4 == 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (32, 99), (64, 32), (16, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trials_see_an_order_that_rounding_hides(
    dtype: torch.dtype, inputs: int, outputs: int, bias: bool, seeded: None
) -> None:
    """One row alone is added up in two halves, which shows in few of its outputs if they are as large as usual."""
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype)

    def halves(states: Tensor) -> Tensor:
        weight, states = layer.weight.float(), states.float()
        parts = (slice(0, inputs // 2), slice(inputs // 2, inputs)) if len(states) == 1 else (slice(0, inputs),)
        found = sum(states[:, part] @ weight[:, part].T for part in parts)
        return (found + (0 if layer.bias is None else layer.bias.float())).to(dtype)

    rows = cancelling(layer, torch.randn(SIZES[-1], inputs).to(dtype))
    alone, together = torch.cat([halves(row[None]) for row in rows]), halves(rows)
    assert rows.dtype == dtype and (alone != together).any(1).float().mean() > 0.8
    found = agreeing_sizes(halves, rows)
    assert len(found) > 1 and 1 not in found


def test_trials_see_an_order_in_the_last_outputs_alone(seeded: None) -> None:
    layer = nn.Linear(64, 515).bfloat16()

    def halves_at_last(states: Tensor) -> Tensor:
        found, states, weight = layer(states), states.float(), layer.weight[-3:].float()
        if len(states) == 1:
            first, second = (states[:, part] @ weight[:, part].T for part in (slice(32), slice(32, 64)))
            found[:, -3:] = (first + second + layer.bias[-3:].float()).bfloat16()
        return found

    rows = cancelling(layer, torch.randn(SIZES[-1], 64).bfloat16())
    assert 1 not in agreeing_sizes(halves_at_last, rows)


def test_trials_see_what_norms_hide() -> None:
    class Norm(nn.LayerNorm):
        def forward(self, states: Tensor) -> Tensor:
            found = super().forward(states.float())
            return (found * (1 + 2**-22 * (len(states) == 1))).to(states.dtype)

    # Of few numbers: each one has a chance of 1 in 16,000 to be rounded otherwise.
    norm, rows = Norm(4), torch.randn(SIZES[-1], 4, generator=torch.Generator().manual_seed(0))
    assert agreeing_sizes(norm, rows.bfloat16()) == SIZES
    assert agreeing_sizes(with_float32(norm), rows.bfloat16()) == SIZES[1:]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 9, 64, 65, 200])
def test_rows_are_padded_and_split(count: int) -> None:
    called: list[int] = []

    def double(states: Tensor) -> Tensor:
        called.append(len(states))
        assert states.is_contiguous(), "some activations compute a part of a wider tensor otherwise"
        return states * 2

    whole = torch.randn(1, count, 16)
    for states in (whole, whole[..., :5]):
        assert torch.equal(in_sizes(double, states, (4, 16, 64)), states * 2)
    assert count == 0 or set(called) <= {4, 16, 64}
    assert rows.SIZES[-1] == 64


def test_the_mode_lasts_until_the_last_of_several_closes_it() -> None:
    model = target()
    first, second = hf_spec.invariant(model), hf_spec.invariant(model)
    first.close()
    first.close()
    assert mode.is_invariant(model), "another thread may be in the middle of a call"
    with pytest.raises(ValueError, match="this mode was closed"), first:
        pass
    second.close()
    assert not mode.is_invariant(model) and not any("forward" in vars(one) for one in model.modules())
    first, dropped = hf_spec.invariant(model), hf_spec.invariant(model)
    del dropped
    gc.collect()
    first.close()
    assert not mode.is_invariant(model), "one that was never closed holds up nobody"


def test_one_that_was_dropped_holds_up_nobody() -> None:
    model = target(num_hidden_layers=2)
    before = model.config._attn_implementation
    hf_spec.invariant(model)
    gc.collect()
    assert mode.is_invariant(model)
    with hf_spec.invariant(model):
        assert mode.is_invariant(model)
    assert not mode.is_invariant(model) and model.config._attn_implementation == before


def test_models_of_one_config_end_their_modes_in_any_order() -> None:
    one = target(num_hidden_layers=2)
    other = type(one)(one.config).eval()
    assert other.config is one.config
    before, inputs = one.config._attn_implementation, prompts(1, (9,))
    wanted = other.generate(**inputs, **OPTIONS).sequences
    for first in (0, 1):
        modes = [hf_spec.invariant(one), hf_spec.invariant(other)]
        modes[first].close()
        assert [mode.is_invariant(one), mode.is_invariant(other)] == [first == 1, first == 0]
        assert torch.equal(other.generate(**inputs, **OPTIONS).sequences, wanted)
        modes[1 - first].close()
        assert one.config._attn_implementation == before and not is_changed(one.config, "_attn_implementation")
    with hf_spec.invariant(one):  # the other reads what this one's config says, and computes right
        assert torch.equal(other.generate(**inputs, **OPTIONS, cache_implementation="static").sequences, wanted)
    assert torch.equal(other.generate(**inputs, **OPTIONS).sequences, wanted)


@pytest.mark.parametrize("first", [0, 1])
def test_modes_of_a_config_and_of_a_part_of_it_end_in_any_order(first: int) -> None:
    config, before = Qwen3VLMoeConfig(), {"": GROUPED, "text_config": GROUPED, "vision_config": "eager"}
    config._experts_implementation = before
    text = config.text_config
    ends = [change([config, text], WAY, BATCHED), change([text], WAY, BATCHED)]
    assert {config._experts_implementation, text._experts_implementation} == {BATCHED}
    ends[first](lambda changed: changed)
    assert text._experts_implementation == BATCHED and is_changed(config, WAY) == (first == 1)
    ends[1 - first](lambda changed: changed)
    found = [one._experts_implementation for one in (config, text, config.vision_config)]
    assert found == list(before.values()) and not is_changed(text, WAY)


def test_models_that_share_modules_are_refused_together() -> None:
    one = target(num_hidden_layers=2)
    other = type(one)(one.config).eval()
    other.model = one.model
    with hf_spec.invariant(one), pytest.raises(ValueError, match=r"shares modules with a .* in the mode; end that"):
        hf_spec.invariant(other)
    with hf_spec.invariant(other):
        assert mode.is_invariant(other)
    assert not any("forward" in vars(module) for module in other.modules())


@pytest.mark.parametrize("given", [{}, {"speculator": "ngram"}], ids=["plain", "ngram"])
def test_autocast_is_refused_by_name(given: dict[str, Any]) -> None:
    model, inputs = target(num_hidden_layers=2), prompts(1, (9,))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"invariant: torch\.autocast chooses"):
        hf_spec.invariant(model)
    with hf_spec.invariant(model):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="cannot run in autocast"):
            model.generate(**inputs, **OPTIONS, **given)
        model.generate(**inputs, **OPTIONS, **given)  # and after it


@pytest.mark.parametrize(
    "given", [3, None, nn.Linear(3, 3), hf_spec.NgramSpeculator()], ids=lambda one: type(one).__name__
)
def test_what_is_no_model_is_refused_by_name(given: Any) -> None:
    with pytest.raises(TypeError, match=f"takes a model of transformers.* a {type(given).__name__}"):
        hf_spec.invariant(given)
