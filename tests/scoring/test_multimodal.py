"""Prompts with images: the text is that of plain `generate`, or the call is refused before anything runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, prompts
from sweep import inputs_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, PreTrainedModel
from twins import SHAPES, Oracle

import hf_spec
from hf_spec import NgramSpeculator
from hf_spec.checkpoints.language_models import load_language_model
from hf_spec.drafts.ngram.suffix_index import BREAK
from hf_spec.scoring.plain import placeholders
from hf_spec.scoring.prompts import Prompt
from hf_spec.scoring.selfcheck import reads_prompts_causally

IMAGE = 90  # the token that stands for a part of an image
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def pixels(model: PreTrainedModel, count: int) -> Tensor:
    size = model.config.vision_config.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def llava() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Build a model, and a padded batch of two prompts: one image and the beginning of its text again, two images."""
    model = build("vl:llava")
    model.config.image_token_id = IMAGE
    image = [IMAGE] * (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    rows = [[5, 6, *image, 7, 5, 6], [8, *image, 9, *image, 10]]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left")
    return model, {"input_ids": ids, "attention_mask": (ids > 0).long(), "pixel_values": pixels(model, 3)}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_different_numbers_of_images(shape: str) -> None:
    model, inputs = llava()
    plain = model.generate(**inputs, **OPTIONS)
    text = model.generate(**inputs, **OPTIONS, speculator=Oracle(plain), speculation_config=SHAPES[shape])
    assert torch.equal(text, plain)


def test_text_alone_is_no_content_of_images_and_a_small_model_is_read_by_its_path(tmp_path: Path) -> None:
    model, inputs = llava()
    assert Prompt.of_call(inputs["input_ids"], {"mm_encoder_outputs": {}}) is None
    assert Prompt.of_call(inputs["input_ids"], {"mm_encoder_outputs": {"image": torch.ones(2)}}) is not None
    model.save_pretrained(tmp_path)
    assert type(load_language_model(tmp_path, model)) is type(model)


def test_a_small_model_with_code_of_its_own_is_read_by_its_path(tmp_path: Path) -> None:
    """Its config is in no table of transformers."""
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(OWN_CODE, encoding="utf-8")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = load_language_model(tmp_path, build("llama"), trust_remote_code=True)
    assert type(found).__name__ == "OwnForCausalLM"


def test_a_call_that_a_default_cannot_serve_encodes_its_images_once() -> None:
    model, inputs = llava()
    encoded: list[Any] = []
    model.model.vision_tower.register_forward_hook(lambda *_: encoded.append(1))
    model.generate(**inputs, **OPTIONS, num_beams=2)
    once = len(encoded)
    hf_spec.set_speculator(model, "ngram")
    model.generate(**inputs, **OPTIONS, num_beams=2)
    assert len(encoded) == 2 * once


def test_guessing_an_image() -> None:
    """Only with the images themselves may the model not read such guesses."""
    model, inputs = llava()
    one = {name: value[:1, -54:] for name, value in inputs.items()} | {"pixel_values": inputs["pixel_values"][:1]}
    images = torch.cat([one["input_ids"], torch.full((1, 12), IMAGE)], dim=1)
    out = model.generate(**one, **OPTIONS, speculator=Oracle(images, wrong=99), return_dict_in_generate=True)
    assert out.speculation.proposed > 0
    assert torch.equal(out.sequences, model.generate(**one, **OPTIONS))


@pytest.mark.parametrize("size", [None, 500])
def test_n_grams_never_guess_an_image(size: int | None) -> None:
    """Phi-4-multimodal fails where it reads the token of an image as text."""
    model, inputs = llava()
    one = {name: value[:1, -54:] for name, value in inputs.items()} | {"pixel_values": inputs["pixel_values"][:1]}
    seen: list[Tensor] = []
    reading = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    speculator = NgramSpeculator(history_size=size)
    for _ in range(2):
        text = model.generate(**one, **OPTIONS, speculator=speculator, num_speculative_tokens=4)
        assert torch.equal(text, model.generate(**one, **OPTIONS))
    reading.remove()
    assert not any((ids == IMAGE).any() for ids in seen if ids.shape[1] < 50)
    if size:
        tokens = speculator.history.tokens()
        assert IMAGE not in tokens and tokens.count(BREAK) > (one["input_ids"] == IMAGE).sum() > 0


def test_tokens_of_images_are_known_by_the_settings_of_all_parts() -> None:
    config = CONFIG_MAPPING["phi4_multimodal"]()
    assert placeholders(config) == {config.vision_config.image_token_id, config.audio_config.audio_token_id}
    config = CONFIG_MAPPING["qwen2_5_omni"]()
    parts = config.thinker_config, config.talker_config
    known = ("image_token_id", "video_token_id", "audio_token_id")
    assert placeholders(config) >= {getattr(part, name) for part in parts for name in known}
    assert placeholders(CONFIG_MAPPING["llama"]()) == set()


@pytest.mark.parametrize("shape", SHAPES)
def test_images_that_stand_before_the_tokens(shape: str) -> None:
    """Git puts them into the cache without tokens of their own: a row's padding begins behind its image."""
    model, inputs = build("git"), prompts(3)
    images = pixels(model, 3)
    rows = [
        model.generate(input_ids=ids[seen > 0][None], pixel_values=image[None], **OPTIONS)[0, -12:]
        for ids, seen, image in zip(*inputs.values(), images, strict=True)
    ]
    plain = torch.cat([inputs["input_ids"], torch.stack(rows)], dim=1)
    options = OPTIONS | {"speculator": Oracle(plain), "speculation_config": SHAPES[shape]}
    assert torch.equal(model.generate(**inputs, pixel_values=images, **options), plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_that_look_at_all_of_themselves(attention: str) -> None:
    """A prefix language model must not see guesses while it reads the prompt."""
    model, inputs = build("vl:paligemma", attn_implementation=attention), prompts(1)
    for given in (inputs, *(images for _, images in inputs_of(model, inputs["input_ids"]))):
        plain = model.generate(**given, **OPTIONS)
        assert torch.equal(model.generate(**given, **OPTIONS, speculator=Oracle(plain)), plain)
    assert "pixel_values" in given
    assert reads_prompts_causally(model) == (attention == "eager")  # which always gets a causal mask
    assert reads_prompts_causally(build("llama", attn_implementation=attention))


def test_layers_that_attend_to_images_alone() -> None:
    model, inputs = build("vl:mllama"), prompts(1)
    mask = torch.ones(1, 13, 1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"attend to images alone.*pass no images"):
        model.generate(**inputs, cross_attention_mask=mask, speculator="ngram", **OPTIONS)


@pytest.mark.parametrize("name", ["vl:qwen3_vl", "vl:qwen3_5"])
def test_what_the_model_keeps_for_the_next_turn(name: str) -> None:
    """The checks of a target run it, and it notes how far positions lag behind images; here as if there were some."""
    model, inputs = build(name), prompts(1)
    for last in ({}, {"speculator": "ngram"}, {"speculator": "ngram", "speculation_config": SHAPES["tree"]}):
        first = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
        model.model.rope_deltas = lag = torch.tensor([[-3]])
        model.generate(input_ids=first.sequences, past_key_values=first.past_key_values, **OPTIONS, **last)
        assert model.model.rope_deltas is lag
    for _ in range(2):
        with hf_spec.invariant(model) if name == "vl:qwen3_vl" else contextlib.nullcontext():
            assert model.model.rope_deltas is lag
