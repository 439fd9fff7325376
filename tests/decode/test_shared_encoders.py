"""Drafts that share the encoder of an encoder-decoder target: the source is encoded once, and the text is plain's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from encoder_decoders import build, generate, sources
from pairs import each_value, pairwise
from test_distribution_encoder_decoders import CASES, deviation, distribution, sample
from test_distribution_encoder_decoders import target as small_target
from test_encoder_decoders import NEW, SHAPES, plain, smaller, target, text
from test_verification import TOO_FAR
from transformers import PreTrainedModel, WhisperForCausalLM

import hf_spec
from hf_spec import HybridSpeculator, VanillaSpeculator
from hf_spec.drafts.encoders import shares_encoder


def other_decoder(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """Copy a model and shake the weights of its decoder, but none that its encoder has, too."""
    draft: Any = copy.deepcopy(model)
    shared = {id(weight) for weight in draft.get_encoder().parameters()}
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():
        if id(weight) not in shared and weight.numel() > 1:
            weight.data += torch.randn(weight.shape, generator=generator) * weight.std() * noise
    return draft


@functools.cache
def pair(name: str) -> PreTrainedModel:
    return other_decoder(target(name), 0.3 if name == "t5" else 0.05)


@functools.cache
def alone() -> PreTrainedModel:
    """Give the decoder of the draft for Whisper to a model without an encoder, as distil-whisper is loaded."""
    own: Any = pair("whisper")
    model = WhisperForCausalLM(copy.deepcopy(own.config)).eval()
    model.model.decoder.load_state_dict(own.model.decoder.state_dict())
    model.proj_out.load_state_dict(own.proj_out.state_dict())
    return model


def draft_for(name: str) -> tuple[str, PreTrainedModel]:
    return ("whisper", alone()) if name == "decoder alone" else (name, pair(name))


@contextmanager
def encodings(*models: Any) -> Iterator[list[int]]:
    """Count the forwards of each model's encoder."""
    counts = [0] * len(models)

    def count(place: int) -> Any:
        def hook(*given: Any) -> None:
            counts[place] += 1

        return hook

    hooks = [model.get_encoder().register_forward_hook(count(place)) for place, model in enumerate(models)]
    yield counts
    for hook in hooks:
        hook.remove()


# --- Text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), each_value(["t5", "bart", "whisper", "decoder alone"], SHAPES))
def test_the_source_is_encoded_once(kind: str, shape: str) -> None:
    name, draft = draft_for(kind)
    for batch in (1, 3):
        want = plain(name, batch)
        watched = [target(name)] if kind == "decoder alone" else [target(name), draft]
        with encodings(*watched) as counts:
            got = text(name, batch, speculator=draft, speculation_config=SHAPES[shape])
        assert torch.equal(got, want) and counts in ([1], [1, 0])
        stats: Any = hf_spec.last_speculation(target(name))
        assert 0 < stats.counts.accepted < stats.counts.proposed


def test_an_encoder_of_ones_own_encodes_too() -> None:
    with encodings(target("t5"), smaller("t5")) as counts:
        text("t5", 3, speculator=smaller("t5"))
    assert counts == [1, 1]


def test_the_states_are_those_that_the_draft_would_have_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sharing, an equal encoder gives the same draft tokens; so does a decoder that has none."""
    found = []
    options = {"speculation_config": SHAPES["chain"].merge(num_speculative_tokens=3)}
    for speculator in (pair("whisper"), alone()):
        text("whisper", 3, speculator=speculator, **options)
        found.append(hf_spec.last_speculation(target("whisper")).counts)  # type: ignore[union-attr]
    monkeypatch.setattr("hf_spec.drafts.source.shares_encoder", lambda draft, target: False)
    with encodings(pair("whisper")) as counts:
        text("whisper", 3, speculator=pair("whisper"), **options)
    found.append(hf_spec.last_speculation(target("whisper")).counts)  # type: ignore[union-attr]
    assert counts == [1] and len({(one.accepted, one.proposed) for one in found}) == 1


CALLS: dict[str, dict[str, Any]] = {
    "ends in mid-batch": {"eos_token_id": None},
    "several texts of a source": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "texts that have begun": {
        "decoder_input_ids": torch.tensor([[1, 5, 9], [1, 7, 7], [1, 1, 4]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]),
    },
}


@functools.cache
def wanted(name: str, call: str) -> Any:
    options = dict(CALLS[call])
    if "eos_token_id" in options:
        options["eos_token_id"] = int(plain(name, 3)[0, 5])
    return options, text(name, 3, **options)


@pytest.mark.parametrize(
    ("call", "wrapped", "shape", "kind"),
    pairwise(CALLS, [VanillaSpeculator, HybridSpeculator], ["chain", "dynamic tree"], ["t5", "decoder alone"]),
)
def test_calls_of_every_kind(call: str, wrapped: Any, shape: str, kind: str) -> None:
    name, draft = draft_for(kind)
    options, want = wanted(name, call)
    got = text(name, 3, **options, speculator=wrapped(draft), speculation_config=SHAPES[shape])
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["chain", "sampled tree"])
def test_sampled_text_has_the_distribution_of_the_target(case: str) -> None:
    draft = other_decoder(small_target("bart"), noise=0.2)
    with encodings(small_target("bart"), draft) as counts:
        texts = sample("bart", draft, CASES[case])
    assert counts == [1, 0] and deviation(texts, distribution("bart")) < TOO_FAR


@pytest.mark.parametrize("kind", ["t5", "whisper", "decoder alone"])
def test_states_that_were_handed_in_serve_the_draft(kind: str) -> None:
    name, draft = draft_for(kind)
    model, given = target(name), sources(target(name), 3)
    states = model.get_encoder()(**given)
    options = {"max_new_tokens": NEW, "do_sample": False, "encoder_outputs": states}
    options |= {key: value for key, value in given.items() if key == "attention_mask"}
    got = generate(model, **options, speculator=draft, num_speculative_tokens=3)
    assert torch.equal(got, plain(name, 3))


def test_a_draft_in_another_precision() -> None:
    draft = copy.deepcopy(pair("bart")).to(torch.bfloat16)
    with encodings(target("bart"), draft) as counts:
        assert torch.equal(text("bart", 3, speculator=draft), plain("bart", 3))
    assert counts == [1, 0]


# --- What is noticed -------------------------------------------------------------------------------------------------


def test_weights_are_compared_again_when_they_change() -> None:
    model: Any = build("bart")
    draft: Any = other_decoder(model)
    assert shares_encoder(draft, model) and shares_encoder(draft, model)
    weight = draft.get_encoder().layers[0].fc1.weight
    with torch.no_grad():
        weight[0, 0] += 1
    assert not shares_encoder(draft, model)
    with torch.no_grad():
        weight.copy_(model.get_encoder().layers[0].fc1.weight)
    assert shares_encoder(draft, model)
    assert not shares_encoder(draft, build("bart", seed=1)) and shares_encoder(draft, model)


def test_weights_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compared = build("bart"), []
    draft = other_decoder(model)
    monkeypatch.setattr("hf_spec.drafts.encoders._is_equal", lambda *given: not compared.append(1))
    for _ in range(3):
        assert shares_encoder(draft, model)
    assert len(compared) == 1


def test_what_weights_do_not_show_counts_too() -> None:
    model: Any = build("bart")
    draft: Any = other_decoder(model)
    draft.get_encoder().config.encoder_attention_heads += 1
    assert not shares_encoder(draft, model)
    draft = other_decoder(model)
    draft.get_encoder().config.decoder_attention_heads += 1  # the decoder's own
    assert shares_encoder(draft, model)


def test_one_module_may_serve_both() -> None:
    model: Any = build("whisper")
    draft: Any = other_decoder(model)
    draft.model.encoder = model.model.encoder
    with encodings(model) as counts:
        got = generate(model, **sources(model, 3), max_new_tokens=NEW, do_sample=False, speculator=draft)
    assert torch.equal(got, plain("whisper", 3)) and counts == [1]


# --- What is refused -------------------------------------------------------------------------------------------------


def test_states_of_another_width_are_refused() -> None:
    wide = build("whisper", d_model=48)
    with pytest.raises(ValueError, match=r"attends to states of width 48; those of .* have 32.* with its own encoder"):
        text("whisper", 1, speculator=WhisperForCausalLM(copy.deepcopy(wide.config)).eval())
