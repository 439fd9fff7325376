"""N-grams of an encoder-decoder's source: a model that copies its source, with a few edits, takes fewer forwards."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from encoder_decoders import build, generate, sources
from pairs import pairwise
from test_distribution_encoder_decoders import CASES, deviation, distribution, sample
from test_encoder_decoders import target, text
from test_verification import TOO_FAR
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

from hf_spec import HybridSpeculator, NgramSpeculator, SpeculationConfig
from hf_spec.drafts.base import DraftContext
from hf_spec.drafts.ngram.beginnings import beginnings
from hf_spec.drafts.ngram.suffix_index import BREAK
from hf_spec.drafts.source import Source

WORDS, PLACES = 48, 40
PAD, START, END = 0, 1, 2
EDITED = {5: 6, 17: 18}  # what the copy has instead
LENGTHS = (38, 30, 21)
SHAPES = {
    "chain": SpeculationConfig(num_speculative_tokens=5),
    "tree": SpeculationConfig(num_speculative_tokens=4, tree="dynamic", tree_topk=2, num_tree_tokens=8),
}


@functools.cache
def copier() -> Any:
    """Make a BART by hand that writes its source, token by token, with some of them ``EDITED``.

    Hidden states are a token and a place, one number for each. The cross-attention looks at the place that the text
    has reached, and takes the token from there.
    """
    width = WORDS + PLACES
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    ffn = {"encoder_ffn_dim": 2, "decoder_ffn_dim": 2, "max_position_embeddings": PLACES}
    names = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    model = BartForConditionalGeneration(BartConfig(vocab_size=WORDS, d_model=width, **sizes, **ffn, **names)).eval()
    place = torch.cat([torch.zeros(WORDS), torch.ones(PLACES)]).diag()
    word = torch.cat([torch.ones(WORDS), torch.zeros(PLACES)]).diag()
    edited = word.clone()
    for old, new in EDITED.items():
        edited[:, old] = torch.eye(width)[new]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            if "norm" in name and name.endswith("weight"):
                weight.fill_(1)
        model.model.shared.weight.copy_(torch.eye(WORDS, width))
        for half in (model.model.encoder, model.model.decoder):
            half.embed_positions.weight[2 : 2 + PLACES, WORDS:] = torch.eye(PLACES)
        crossing = model.model.decoder.layers[0].encoder_attn
        for linear, value in (("q_proj", 5 * place), ("k_proj", place), ("v_proj", word), ("out_proj", 5 * edited)):
            getattr(crossing, linear).weight.copy_(value)
    model.generation_config = GenerationConfig(**names)
    return model


@functools.cache
def given(batch: int) -> dict[str, Tensor]:
    """Draw sources that say several things twice, with their ends, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS[:batch]:
        row = torch.randint(3, WORDS, (length,), generator=generator)
        row[12:16] = row[2:6]
        row[9] = 5
        rows.append(row.tolist() + [END] + [PAD] * (LENGTHS[0] - length))
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@functools.cache
def copied(batch: int) -> Tensor:
    return generate(copier(), **given(batch), max_new_tokens=PLACES, do_sample=False)


def forwards(batch: int, config: SpeculationConfig | None = None, **options: Any) -> tuple[Tensor, int]:
    """Generate, and count the forwards of the decoder, without those of a self-check."""
    count = []
    if "speculator" in options:
        options["speculation_config"] = (config or SpeculationConfig()).merge(self_check=False)
    hook = copier().get_decoder().register_forward_hook(lambda *given: count.append(1))
    with hook:
        found = generate(copier(), **{**given(batch), "max_new_tokens": PLACES, "do_sample": False} | options)
    return found, len(count)


def test_the_model_copies() -> None:
    for row, source in zip(copied(3).tolist(), given(3)["input_ids"].tolist(), strict=True):
        length = source.index(END) + 1
        assert row[1 : 1 + length] == [EDITED.get(token, token) for token in source[:length]]


KINDS = {"n-grams": NgramSpeculator, "history": functools.partial(NgramSpeculator, history_size=1000)}


@pytest.mark.parametrize(("kind", "shape", "batch"), pairwise(KINDS, SHAPES, [1, 3]))
def test_a_copy_takes_fewer_forwards(kind: str, shape: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = forwards(batch, SHAPES[shape], speculator=KINDS[kind]())
    assert torch.equal(found, copied(batch))
    monkeypatch.setattr(Source, "tokens", lambda self, target: None)
    found, without = forwards(batch, SHAPES[shape], speculator=KINDS[kind]())
    assert torch.equal(found, copied(batch)) and count < 0.5 * without


def test_default_settings_and_second_calls() -> None:
    speculator = NgramSpeculator()
    for options in ({}, {"num_speculative_tokens": 5}) * 2:  # at first the draft length depends on the clock
        found, count = forwards(1, speculator=speculator, **options)
        assert torch.equal(found, copied(1)) and (not options or count < 0.6 * LENGTHS[0])


def test_a_history_with_a_draft() -> None:
    draft = build("bart", vocab_size=WORDS)
    found, count = forwards(3, SHAPES["chain"], speculator=HybridSpeculator(draft))
    assert torch.equal(found, copied(3)) and count < 0.6 * LENGTHS[0]


def test_padding_is_never_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, drafter = [], NgramSpeculator.drafter

    def watched(self: NgramSpeculator, request: DraftContext) -> Any:
        started = drafter(self, request)
        propose = started.propose

        def note(*args: Any) -> Any:
            proposal = propose(*args)
            seen.extend(proposal.tokens[:, 1:][proposal.present[:, 1:]].tolist())
            return proposal

        monkeypatch.setattr(started, "propose", note)
        return started

    monkeypatch.setattr(NgramSpeculator, "drafter", watched)
    flipped = {name: value.flip(1) for name, value in given(3).items()}  # padded on the left, and read backwards
    for source in (given(3), flipped):
        for speculator in (NgramSpeculator(), NgramSpeculator(history_size=1000)):
            want = forwards(3, **source)[0]
            got = forwards(3, SHAPES["tree"], **source, speculator=speculator)[0]
            assert torch.equal(got, want)
    assert len(seen) > 50 and PAD not in seen


# --- What is looked in -----------------------------------------------------------------------------------------------


def context(model: Any, source: Source | None, rows: int = 1) -> DraftContext:
    ids = torch.full((rows, 1), START)
    config = SpeculationConfig(num_speculative_tokens=3)
    return DraftContext(model, ids, torch.ones_like(ids), None, config, lambda logits: logits, False, source=source)


def test_the_source_stands_before_the_text() -> None:
    ids = torch.tensor([[7, 8, END, PAD], [PAD, 9, 70, END]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    source = Source.of_call(ids, {"attention_mask": mask}, 2)
    request = context(copier(), source, rows=2)
    assert beginnings(request) == [[7, 8, END, BREAK, START], [9, BREAK, END, BREAK, START]]
    assert beginnings(context(copier(), Source.of_call(ids[:1], {}, 1))) == [[7, 8, END, PAD, BREAK, START]]
    for nothing in (None, Source.of_call(None, {}, 1), Source.of_call(torch.full((1, 2), -100), {}, 1)):
        assert beginnings(context(copier(), nothing)) == [[START]]
        picture = replace(
            context(copier(), nothing), input_ids=torch.tensor([[5, WORDS, 6]]), attention_mask=torch.ones(1, 3)
        )
        assert beginnings(picture) == [[5, BREAK, 6]]  # a token of pictures, which the target cannot write


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "bert+gpt2", "vit+gpt2", "marian"])
def test_sources_that_are_text_in_the_same_tokens(name: str) -> None:
    model = target(name) if "+" not in name else build(name)
    inputs, *_ = sources(model, 1).values()
    source = Source.of_call(inputs, {}, 1)
    assert (source.tokens(model) is not None) == (name in ("t5", "bart", "bert+gpt2", "marian"))


def test_other_vocabularies_are_not_looked_in() -> None:
    ids = torch.tensor([[5, 6, 7]])
    apart = build("marian", vocab_size=90, decoder_vocab_size=80, share_encoder_decoder_embeddings=False)
    same = build("marian", share_encoder_decoder_embeddings=False)  # as many tokens, but others
    for model in (apart, same):
        assert Source.of_call(ids, {}, 1).tokens(model) is None
    pair = build("bert+gpt2")
    pair.get_encoder().resize_token_embeddings(120)
    assert Source.of_call(ids, {}, 1).tokens(pair) is None


def test_states_and_embeddings_leave_the_text_alone() -> None:
    states = copier().get_encoder()(**given(3))
    embeds = copier().get_input_embeddings()(given(3)["input_ids"])
    mask = given(3)["attention_mask"]
    for handed in ({"encoder_outputs": states}, {"inputs_embeds": embeds}):
        options = {"attention_mask": mask, "max_new_tokens": PLACES, "do_sample": False, **handed}
        got = generate(copier(), **options, speculator="ngram", num_speculative_tokens=4)
        assert torch.equal(got, copied(3))
    found, count = forwards(3, encoder_outputs=states, speculator="ngram", num_speculative_tokens=4)
    assert torch.equal(found, copied(3)) and count < 0.6 * LENGTHS[0]  # the ids are there, too


def test_several_texts_of_a_source() -> None:
    options = {"do_sample": True, "num_return_sequences": 2, "top_k": 1}
    want = text("bart", 3, **options)
    assert torch.equal(text("bart", 3, **options, speculator="ngram", num_speculative_tokens=4), want)


def test_sampled_text_has_the_distribution_of_the_target() -> None:
    assert deviation(sample("bart", "ngram", CASES["dynamic tree"]), distribution("bart")) < TOO_FAR
