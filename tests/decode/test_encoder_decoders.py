"""Encoder-decoder targets: the text is that of plain `generate`, whatever the source, the draft and the call.

Sources of a batch are padded to different lengths, so that a mask of cross-attention that is lost, or hidden like that
of the text, shows in the tokens.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from architectures import build as decoder_only
from architectures import redraw
from encoder_decoders import VOCABULARY, build, generate, sources
from pairs import each_value, usual
from test_exactness import flawed, noisy_copy
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SeamlessM4TConfig,
    SeamlessM4TForTextToSpeech,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

import hf_spec
from hf_spec import NgramSpeculator, SpeculationConfig
from hf_spec.drafts.source import Source
from hf_spec.scoring.cache import TreeKVCache
from hf_spec.scoring.names import CACHE
from hf_spec.scoring.relative_bias import unhook_biases
from hf_spec.scoring.runner import ModelRunner

NEW = 16
CORE = ("t5", "bart", "mbart", "marian", "pegasus", "m2m_100", "whisper")
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
SHAPES = {
    "chain": SpeculationConfig(num_speculative_tokens=4),
    "static tree": SpeculationConfig(tree=PATHS),
    "dynamic tree": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8),
}
CHAIN = SHAPES["chain"]


@functools.cache
def target(name: str) -> PreTrainedModel:
    return build(name)


@functools.cache
def smaller(name: str) -> PreTrainedModel:
    """Make a draft with an encoder of its own that is right about half of the time."""
    return noisy_copy(target(name), seed=0, noise=0.05)


@functools.cache
def plain(name: str, batch: int) -> Tensor:
    return generate(target(name), **sources(target(name), batch), max_new_tokens=NEW, do_sample=False)


def text(name: str, batch: int, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return generate(target(name), **sources(target(name), batch), **options)


# --- Greedy text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), each_value(CORE, SHAPES))
def test_same_text_as_plain_generate(name: str, shape: str) -> None:
    ngram = NgramSpeculator(corpus=flawed(plain(name, 3)))
    for kind, speculator in {"n-gram": ngram, "draft": smaller(name)}.items():
        accepted = proposed = 0
        for batch in (1, 3):
            got = text(name, batch, speculator=speculator, speculation_config=SHAPES[shape])
            assert torch.equal(got, plain(name, batch)), (kind, batch)
            counts = hf_spec.last_speculation(target(name)).counts  # type: ignore[union-attr]
            accepted += counts.accepted
            proposed += counts.proposed
        assert 0 < accepted < proposed, kind


@pytest.mark.parametrize("name", usual(["t5", "bart", "whisper"], ["t5", "whisper"]))
def test_eager_attention(name: str) -> None:
    model = build(name, attn_implementation="eager")
    given = sources(model, 3)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    want = generate(model, **given, **options)
    for shape in SHAPES.values():
        got = generate(model, **given, **options, speculator=smaller(name), speculation_config=shape)
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_sequences_that_end_at_different_times(name: str) -> None:
    """Rows leave the batch, and so do the rows of the source that only they read."""
    whole = plain(name, 3)
    ends = [int(whole[0, 5]), int(whole[1, 12])]
    for place, eos in enumerate((ends[:1], ends[1:], ends)):
        want = text(name, 3, eos_token_id=eos)
        assert len(set((want == 0).sum(1).tolist())) > 1  # else nobody leaves before the others
        turn = place + ["t5", "bart", "whisper"].index(name)  # each shape with other ends, and with each speculator
        speculator, shape = (smaller(name), "ngram")[turn % 2], list(SHAPES.values())[turn % len(SHAPES)]
        got = text(name, 3, eos_token_id=eos, speculator=speculator, speculation_config=shape)
        assert torch.equal(got, want), shape


PROCESSORS: dict[str, dict[str, Any]] = {
    "no repetition": {"no_repeat_ngram_size": 2},
    "penalty, length and first token": {"repetition_penalty": 1.3, "min_length": 6, "forced_bos_token_id": 7},
    "not from the source": {"encoder_no_repeat_ngram_size": 1},
    "from the source": {"encoder_repetition_penalty": 1.5},
    "in lockstep": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores / 2])},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors(case: str) -> None:
    options = PROCESSORS[case] | {"eos_token_id": [5, 60], "pad_token_id": 0}
    want = text("bart", 3, **options)
    ways = zip(SHAPES.values(), (smaller("bart"), "ngram", smaller("bart")), strict=True)
    for shape, speculator in ways:
        got = text("bart", 3, **options, speculator=speculator, speculation_config=shape)
        assert torch.equal(got, want), shape


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_half_precision(name: str) -> None:
    """The self-check passes, and the text goes on; which token wins a near-tie is not asked."""
    model = build(name, dtype=torch.bfloat16)
    draft = noisy_copy(model, seed=0, noise=0.05)
    for shape in SHAPES.values():
        out = generate(
            model,
            **sources(model, 3),
            max_new_tokens=NEW,
            do_sample=False,
            speculator=draft,
            speculation_config=shape,
            return_dict_in_generate=True,
        )
        assert out.sequences.shape == (3, 1 + NEW) and out.speculation.counts.accepted


# --- What a call may hand in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual(["t5", "bart", "whisper"], ["bart", "whisper"]))
def test_a_text_that_has_begun(name: str) -> None:
    """Texts of different lengths are padded on the left. Whisper then counts positions from the text, BART columns."""
    ids = torch.tensor([[1, 5, 9], [1, 7, 7], [1, 1, 4]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    for given in ({"decoder_input_ids": ids}, {"decoder_input_ids": ids, "decoder_attention_mask": mask}):
        want = text(name, 3, **given)
        for shape in SHAPES.values():
            assert torch.equal(text(name, 3, **given, speculator=smaller(name), speculation_config=shape), want)


def test_states_and_embeddings_handed_in() -> None:
    model, draft, given = target("t5"), smaller("t5"), sources(target("t5"), 3)
    mask = given["attention_mask"]
    states = model.get_encoder()(**given)
    embeds = model.get_input_embeddings()(given["input_ids"])
    for handed in ({"encoder_outputs": states}, {"inputs_embeds": embeds}):
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask, **handed}
        got = generate(model, **options, speculator="ngram")
        assert torch.equal(got, plain("t5", 3))
        with pytest.raises(ValueError, match=r"an encoder of its own, and .*, or use 'ngram'"):
            generate(model, **options, speculator=draft)
    states = model.get_encoder()(given["input_ids"][:1])
    options = {"max_new_tokens": NEW, "encoder_outputs": states, "do_sample": True, "num_return_sequences": 2}
    with pytest.raises(ValueError, match="an encoder of its own"):
        generate(model, **options, speculator=draft)
    hf_spec.set_speculator(model, draft)  # which cannot serve the call: it is made again, with the same states
    try:
        assert len(model.generate(**options)) == 2
    finally:
        hf_spec.set_speculator(model, None)
    states = model.get_encoder()(**given)
    both = generate(
        model, **given, encoder_outputs=states, max_new_tokens=NEW, do_sample=False, speculator=draft
    )  # the draft reads the inputs
    assert torch.equal(both, plain("t5", 3))


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_no_cache_waits_for_the_garbage_collector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target's nor the draft's: it holds what the encoder has read."""
    draft, alive, made = smaller(name), weakref.WeakSet[TreeKVCache](), TreeKVCache.__init__
    text(name, 3, speculator=draft)
    counted: list[int] = []

    def counting(self: TreeKVCache, *args: Any) -> None:
        made(self, *args)
        alive.add(self)
        counted.append(1)

    monkeypatch.setattr(TreeKVCache, "__init__", counting)
    gc.collect()
    gc.disable()
    try:
        text(name, 3, speculator=draft)
        assert len(counted) >= 2 and not alive
    finally:
        gc.enable()


def test_several_texts_of_a_source() -> None:
    options = {"do_sample": True, "num_return_sequences": 2, "top_k": 1}
    want = text("bart", 3, **options)
    got = text("bart", 3, **options, speculator=smaller("bart"), num_speculative_tokens=4)
    assert torch.equal(got, want) and len(got) == 6
    assert hf_spec.last_speculation(target("bart")).counts.accepted  # type: ignore[union-attr]


def test_the_source_of_a_draft_has_a_row_for_each_text() -> None:
    source = Source.of_call(torch.tensor([[3], [4]]), {"attention_mask": torch.ones(4, 1)}, 4)
    assert source.inputs is not None and source.inputs.tolist() == [[3], [3], [4], [4]]
    assert Source.of_call(torch.full((2, 3), -100), {}, 2).inputs is None


def test_a_cache_is_filled_and_continued() -> None:
    """The keys of the source stay as plain `generate` leaves them, for all rows, also of those that ended early."""
    eos = int(plain("bart", 3)[0, 5])
    options = {"eos_token_id": eos, "return_dict_in_generate": True}
    want = text("bart", 3, **options)
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())
    given = {"speculator": smaller("bart"), "num_speculative_tokens": 4}
    out = text("bart", 3, **options, **given, **{CACHE: own})
    assert torch.equal(out.sequences, want.sequences) and out[CACHE] is own
    lengths = [(row != 0).sum() - 1 for row in want.sequences]
    for mine, theirs in zip(own.self_attention_cache.layers, want[CACHE].self_attention_cache.layers, strict=True):
        for row, length in enumerate(lengths):
            assert torch.allclose(mine.keys[row, :, :length], theirs.keys[row, :, :length], atol=1e-4)
    for mine, theirs in zip(own.cross_attention_cache.layers, want[CACHE].cross_attention_cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)

    first = text("bart", 3, return_dict_in_generate=True, max_new_tokens=8, **given)
    ids = first.sequences
    more = {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids), "max_new_tokens": NEW - 8}
    assert torch.equal(text("bart", 3, **more, **given, **{CACHE: first[CACHE]}), plain("bart", 3))


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("a processor of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        text("bart", 3, speculator="ngram", logits_processor=LogitsProcessorList([fails]), **{CACHE: own})
    assert own.get_seq_length() == 0 and not own.cross_attention_cache.layers and not any(own.is_updated.values())
    assert torch.equal(text("bart", 3, speculator="ngram", **{CACHE: own}), plain("bart", 3))


# --- What it returns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), each_value(["t5", "whisper"], SHAPES))
def test_scores_logits_and_hidden_states(name: str, shape: str) -> None:
    asked = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    everything: dict[str, Any] = dict.fromkeys(asked, True)
    model = build(name, dtype=torch.float64)  # T5 does not scale its attention, which multiplies what rounding does
    draft, given = noisy_copy(model, seed=0, noise=0.05), sources(model, 3)
    given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    everything |= {"max_new_tokens": NEW, "do_sample": False}
    want = generate(model, **given, **everything)
    out = generate(model, **given, **everything, speculator=draft, speculation_config=SHAPES[shape])
    assert isinstance(out, hf_spec.SpeculativeEncoderDecoderOutput)
    cuts = name == "whisper"  # every field into rows, and so it gets no statistics
    assert set(out.keys()) == {*want.keys(), *([] if cuts else ["speculation"])}
    for field in ("scores", "logits", "encoder_hidden_states"):
        assert len(out[field]) == len(want[field])
        for mine, theirs in zip(out[field], want[field], strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
    for step, steps in zip(out.decoder_hidden_states, want.decoder_hidden_states, strict=True):
        for mine, theirs in zip(step, steps, strict=True):
            assert mine.shape == theirs.shape and torch.allclose(mine, theirs, atol=1e-5)
    assert cuts or hf_spec.last_speculation(model) is out.speculation


# --- What is refused -------------------------------------------------------------------------------------------------


def refused(cause: str, name: str = "t5", **options: Any) -> None:
    encoded = []
    hook = target(name).get_encoder().register_forward_hook(lambda *args: encoded.append(1))
    with hook, pytest.raises(ValueError, match=cause):
        generate(
            target(name),
            **sources(target(name), 2) | {"max_new_tokens": NEW, "do_sample": False, "speculator": "ngram"} | options,
        )
    assert not encoded, "the encoder ran first"


def test_beams() -> None:
    refused("pipelines ask for beams, too; pass num_beams=1", num_beams=2)
    model = build("t5")
    model.generation_config.num_beams = 4
    with pytest.raises(ValueError, match=r"num_beams=4: .* Saved generation configs"):
        generate(model, **sources(model, 1), max_new_tokens=4, speculator="ngram")
    got = generate(model, **sources(model, 1), max_new_tokens=4, do_sample=False, speculator="ngram", num_beams=1)
    assert torch.equal(got, plain("t5", 1)[:, :5])


def test_options_and_drafts_are_refused_before_the_source_is_read() -> None:
    refused("use_cache=False: draft tokens are scored over a cache", use_cache=False)
    refused("output_attentions: a block's attention", output_attentions=True, return_dict_in_generate=True)
    refused("penalty_alpha is another way of decoding", penalty_alpha=0.6, top_k=4)
    refused("early exit runs the first layers of decoder-only ones", speculator="early-exit")
    eagle = hf_spec.AutoDraftModel.from_pretrained(hf_spec.demo.path("draft-eagle3"))
    refused("reads hidden states of decoder-only targets", speculator=eagle)
    refused("the draft is the target itself", speculator=target("t5"))


def test_embeddings_for_a_draft_with_an_encoder_are_refused_before_they_are_read() -> None:
    embeds = target("t5").get_input_embeddings()(sources(target("t5"), 2)["input_ids"])
    handed = {"inputs_embeds": embeds, "input_ids": None}
    refused("the source are embeddings of the target; pass token ids", speculator=smaller("t5"), **handed)
    hf_spec.set_speculator(model := build("t5"), smaller("t5"))  # a default leaves such a call to plain generate
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    want = generate(target("t5"), inputs_embeds=embeds, **options)
    assert torch.equal(generate(model, inputs_embeds=embeds, **options), want)
    assert hf_spec.last_speculation(model) is None


def test_other_caches() -> None:
    refused("is static, which is served for decoder-only models alone", cache_implementation="static")
    static = EncoderDecoderCache(StaticCache(config=target("t5").config, max_cache_len=30), DynamicCache())
    for cache, cause in ((DynamicCache(), "a DynamicCache, in which the keys of the source"), (static, "is static")):
        with pytest.raises(ValueError, match=cause):
            text("t5", 1, speculator="ngram", **{CACHE: cache})


def test_drafts_that_cannot_serve() -> None:
    llama = decoder_only("llama")
    with pytest.raises(TypeError, match="for another of its kind alone"):
        llama.generate(torch.tensor([[3]]), max_new_tokens=4, speculator=target("t5"))
    with pytest.raises(ValueError, match="the target LlamaForCausalLM reads no source"):
        llama.generate(torch.tensor([[3]]), max_new_tokens=4, speculator=hf_spec.VanillaSpeculator(target("t5")))
    got = text("t5", 3, speculator=llama, num_speculative_tokens=3)  # it drafts from the text alone
    assert torch.equal(got, plain("t5", 3))


def test_a_draft_that_cannot_read_the_source() -> None:
    """It is known before anything runs, so that a default draft gives way to plain generation."""
    deaf, model = build("whisper", num_mel_bins=6), build("whisper")
    with pytest.raises(ValueError, match=r"it reads 6 bins of sound, not 8; use a draft of the target's generation"):
        text("whisper", 1, speculator=deaf)
    inputs, options = sources(model, 1), {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **options)
    hf_spec.set_speculator(model, deaf)
    assert torch.equal(model.generate(**inputs, **options), plain)
    with pytest.raises(ValueError, match=r"cannot read the source of this call .*; use a draft whose inputs"):
        Source.of_call(torch.randn(1, 5), {"encoder_outputs": None}, 1).states_for(deaf, model)


def test_a_vocabulary_is_the_decoders() -> None:
    assert target("t5").config.vocab_size == VOCABULARY


# --- What the self-check must find -----------------------------------------------------------------------------------


def no_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    unhook_biases()
    monkeypatch.setattr("hf_spec.scoring.runner.hook_biases", lambda model: None)


def no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_spec.scoring.positions._readers", lambda model: [])


def no_mask_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ModelRunner._inputs

    def lost(runner: ModelRunner, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in inputs(runner, *args).items() if name != "attention_mask"}

    monkeypatch.setattr(ModelRunner, "_inputs", lost)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("t5", no_biases), ("mbart", no_positions), ("whisper", no_positions), ("bart", no_mask_of_the_source)],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_mistakes_are_found_in_a_call_that_pads_nothing(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    given = sources(model, 1)
    mistake(monkeypatch)
    with pytest.raises(ValueError, match="differently from single steps"):
        generate(model, **given, max_new_tokens=4, do_sample=False, speculator="ngram")
    monkeypatch.undo()
    got = generate(model, **given, max_new_tokens=4, do_sample=False, speculator="ngram")
    assert torch.equal(got, plain(name, 1)[:, : got.shape[1]])


def test_a_model_with_a_way_of_its_own_returns_the_statistics() -> None:
    """As SeamlessM4T and Pop2Piano, whose ``generate`` calls that of transformers and keeps its fields."""

    class Own(T5ForConditionalGeneration):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    model = target("t5")
    own = Own(model.config).eval()
    own.load_state_dict(model.state_dict())
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    out = own.generate(**sources(own, 1), **options, speculator="ngram")
    assert out.speculation is not None and out.speculation == hf_spec.last_speculation(own)


@functools.cache
def speaker() -> Any:
    """Build a tiny model that translates a text, and speaks the translation by a second ``generate``."""
    of_a_part, sizes = {"attention_heads": 4, "layers": 1, "ffn_dim": 32}, dict[str, Any]()
    for part in ("encoder", "decoder", "t2u_encoder", "t2u_decoder"):
        sizes |= {f"{part}_{name}": size for name, size in of_a_part.items()}
    sizes |= {"vocab_size": 60, "t2u_vocab_size": 40, "hidden_size": 32, "speech_encoder_layers": 1}
    sizes |= {"unit_hifi_gan_vocab_size": 40, "unit_embed_dim": 16, "lang_embed_dim": 8, "spkr_embed_dim": 8}
    sizes |= {"upsample_initial_channel": 16, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]}
    torch.manual_seed(0)
    model = SeamlessM4TForTextToSpeech(SeamlessM4TConfig(**sizes, pad_token_id=0)).eval()
    redraw(model, seed=3)
    codes = {"text_decoder_lang_to_code_id": 5, "t2u_lang_code_to_id": 6, "vocoder_lang_code_to_id": 1}
    for name, code in codes.items():
        setattr(model.generation_config, name, {"eng": code})
    model.t2u_model.generation_config.update(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    return model


@pytest.mark.parametrize("asked", [{"speculator": "ngram"}, {}])
def test_what_is_asked_for_a_text_is_not_asked_for_its_sound(asked: dict[str, Any]) -> None:
    model, options = speaker(), asked | {"num_speculative_tokens": 3}
    given = {"input_ids": torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]]), "tgt_lang": "eng", "max_new_tokens": NEW}
    given |= {"num_beams": 1, "do_sample": False, "return_intermediate_token_ids": True}
    want = model.generate(**given)
    hf_spec.set_speculator(model, None if asked else NgramSpeculator())
    for _ in range(2):
        found = model.generate(**given, **options)
        assert torch.equal(found.sequences, want.sequences) and torch.equal(found.waveform, want.waveform)
        assert hf_spec.last_speculation(model) is not None and hf_spec.last_speculation(model.t2u_model) is None
    hf_spec.set_speculator(model, None)
