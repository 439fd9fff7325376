"""Drafts for encoder-decoder targets by path: what the config says is loaded, and wrong pairs are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build as decoder_only
from encoder_decoders import VOCABULARY, build, generate, sources
from test_shared_encoders import alone, pair
from test_translated import tokenizer
from transformers import PreTrainedModel, WhisperForCausalLM

import hf_spec
from hf_spec import SpeculationConfig, TranslatedSpeculator, VanillaSpeculator, demo
from hf_spec.checkpoints.language_models import class_of
from hf_spec.checkpoints.resolve import load_draft, with_tokenizers
from hf_spec.cli import main
from hf_spec.training import DraftTrainer, DraftTrainingArguments

CHAIN = SpeculationConfig(num_speculative_tokens=3)


def saved(model: Any, place: Path) -> Path:
    model.save_pretrained(place)
    return place


@pytest.mark.parametrize("name", ["t5", "marian", "whisper", "bert+gpt2", "vit+gpt2"])
def test_a_path_is_enough(name: str, tmp_path: Path) -> None:
    model, other = build(name), build(name, seed=1)
    given = sources(model, 3)
    want = generate(model, **given, max_new_tokens=12, do_sample=False)
    for place in (str(saved(other, tmp_path)), tmp_path):
        got = generate(model, **given, max_new_tokens=12, do_sample=False, speculator=place, speculation_config=CHAIN)
        assert torch.equal(got, want)
    assert type(load_draft(tmp_path, model)) is type(other)


def test_a_decoder_without_an_encoder_is_loaded_as_one(tmp_path: Path) -> None:
    model: Any = pair("whisper")
    assert isinstance(load_draft(saved(alone(), tmp_path), model), WhisperForCausalLM)


@pytest.mark.parametrize("named", [None, ["NoSuchClass"], ["T5ForTokenClassification"], ["GenerationConfig"]])
def test_a_config_that_names_no_class_that_writes(named: Any) -> None:
    """The type of the model says enough."""
    for name in ("t5", "whisper", "vit+gpt2"):
        model = build(name)
        config = copy.deepcopy(model.config)
        config.architectures = named
        kind = class_of(config)
        assert kind is type(model) or kind._model_mapping[type(config)] is type(model)


def test_an_encoder_decoder_for_a_decoder_only_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(saved(build("t5"), tmp_path))
    with pytest.raises(ValueError, match=r"\(t5\), which drafts for others of its kind alone, and LlamaForCausalLM"):
        decoder_only("llama").generate(torch.tensor([[3]]), max_new_tokens=4, speculator=place)
    assert main(["generate", str(demo.path()), "--speculator", place, "--prompt", "Once"]) != 0
    assert "drafts for others of its kind alone" in capsys.readouterr().err


def test_other_wrong_pairs(tmp_path: Path) -> None:
    model = build("t5")
    place = str(saved(build("t5", vocab_size=VOCABULARY + 60), tmp_path))
    with pytest.raises(ValueError, match="has a vocabulary of 159 tokens and the target one of 99"):
        generate(model, **sources(model, 1), max_new_tokens=4, speculator=place)
    with pytest.raises(ValueError, match="no draft can be read at"):
        generate(model, **sources(model, 1), max_new_tokens=4, speculator=str(tmp_path / "nothing"))
    whisper = str(saved(build("whisper"), tmp_path / "whisper"))
    with pytest.raises(ValueError, match="cannot read the source of this call"):
        generate(model, **sources(model, 1), max_new_tokens=4, speculator=whisper)


def test_tokenizers_of_a_pair(tmp_path: Path) -> None:
    """Equal ones are no obstacle, as where transformers' words are passed anyway; others are."""
    words, others = tokenizer("sentencepiece"), tokenizer("byte-level")
    model, draft = (build("t5", vocab_size=len(words), seed=seed) for seed in range(2))
    given = sources(model, 3)
    want = generate(model, **given, max_new_tokens=12, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "tokenizer": words}
    for speculator in (draft, VanillaSpeculator(draft), str(saved(draft, tmp_path))):
        got = generate(model, **given, **options, speculator=speculator, assistant_tokenizer=copy.copy(words))
        assert torch.equal(got, want)
        with pytest.raises(ValueError, match="reads a source and has another tokenizer than the target"):
            generate(model, **given, **options, speculator=speculator, assistant_tokenizer=others)
    llama: Any = decoder_only("llama", vocab_size=len(others))
    assert isinstance(with_tokenizers(llama, decoder_only("llama"), others, words), TranslatedSpeculator)


# --- Drafts with weights of their own --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "dspark"])
def test_drafts_that_read_hidden_states_are_refused(kind: str) -> None:
    model: PreTrainedModel = build("t5")
    place = demo.path(f"draft-{kind}")
    draft = hf_spec.AutoDraftModel.from_pretrained(place)
    reason = r"reads hidden states of decoder-only targets, .* cannot attend to; use a smaller model .*, or 'ngram'"
    for speculator in (draft, hf_spec.HybridSpeculator(draft), str(place)):
        with pytest.raises(ValueError, match=reason):
            generate(model, **sources(model, 1), max_new_tokens=4, speculator=speculator)


@pytest.mark.parametrize("word", ["mtp", "early-exit"])
def test_words_for_parts_of_the_target(word: str) -> None:
    model = build("t5")
    with pytest.raises(ValueError, match="'ngram'"):
        generate(model, **sources(model, 1), max_new_tokens=4, speculator=word)


def test_training_is_refused(tmp_path: Path) -> None:
    draft = hf_spec.AutoDraftModel.from_pretrained(demo.path("draft-eagle3"))
    args = DraftTrainingArguments(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(ValueError, match="layers cannot attend to a source"):
        DraftTrainer(draft, build("t5"), args, train_dataset=[{"input_ids": [1, 2, 3]}])
