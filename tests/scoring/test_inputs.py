"""The model's own preparation decides what a step is given besides tokens, and the text is plain `generate`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architectures import build, prompts, redraw, shrink
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from twins import SHAPES, Oracle

import hf_spec
from hf_spec import SpeculationConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dspark.modeling import DSparkDraftModel
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.scoring.architectures import why_no_trees
from hf_spec.scoring.names import CACHE

Inputs = dict[str, Any]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
PLACEHOLDER = 90  # the token that stands for a part of an image or of sound


def tiny(name: str, kind: str = "ForConditionalGeneration", **overrides: dict[str, Any]) -> PreTrainedModel:
    """Build a tiny random model of a class of transformers; ``overrides`` go to its configurations, by their names."""
    config = shrink(getattr(transformers, f"{name}Config"), 99)
    for part, values in overrides.items():
        for key, value in values.items():
            setattr(config if part == "own" else getattr(config, part), key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, f"{name}{kind}")(config)
    redraw(model, 0)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ctrl() -> tuple[PreTrainedModel, Inputs]:
    """Its own preparation leaves the types of tokens out."""
    inputs = prompts(3)
    return build("ctrl"), {**inputs, "token_type_ids": torch.full_like(inputs["input_ids"], 5)}


def typed() -> tuple[PreTrainedModel, Inputs]:
    """New tokens are of the type of the prompt's last one, which is another one in each row."""
    inputs = prompts(3)
    types = torch.randint(3, 60, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    return build("gpt2"), {**inputs, "token_type_ids": types}


class Colored(transformers.LlamaForCausalLM):
    """A model of somebody's own, with an argument per token; a new token has the color of the last one."""

    def forward(self, input_ids: Tensor, colors: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        embeds = self.get_input_embeddings()(torch.stack([input_ids, colors])).sum(0)  # (batch, tokens, hidden)
        return super().forward(inputs_embeds=embeds, attention_mask=attention_mask, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Tensor, colors: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        count = inputs["input_ids"].shape[1]
        return {**inputs, "colors": colors if count == colors.shape[1] else colors[:, -1:].expand(-1, count)}


def colored() -> tuple[PreTrainedModel, Inputs]:
    """An argument per token that transformers does not know."""
    inputs, model = prompts(3), build("llama")
    model.__class__ = Colored
    colors = torch.randint(3, 60, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    return model, {**inputs, "colors": colors}


def glm_image() -> tuple[PreTrainedModel, Inputs]:
    """Its positions run through the picture that it paints, line by line."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    model = tiny("GlmImage", text_config={"rope_parameters": rope, "vision_vocab_size": 80})
    return model, {"input_ids": prompts(1)["input_ids"], "image_grid_thw": torch.tensor([[1, 4, 4]])}


def pictures() -> tuple[PreTrainedModel, Inputs]:
    """Of two rows each paints a picture of its own shape, and the second one is done first."""
    model, inputs = glm_image()
    model.generation_config.eos_token_id = 42
    grids = {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 8]]), "images_per_sample": torch.tensor([1, 1])}
    return model, {"input_ids": torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)]), **grids}


def inkling() -> tuple[PreTrainedModel, Inputs]:
    sound = {"n_mel_bins": 2, "mel_vocab_size": 8, "text_hidden_size": 32}
    model = tiny("Inkling", audio_config=sound, vision_config={"patch_size": 2}, own={"audio_token_id": PLACEHOLDER})
    ids = torch.tensor([[5, 6, *[PLACEHOLDER] * 3, 7, 8, 9]])
    return model, {"input_ids": ids, "audio_input_ids": torch.arange(6).view(1, 3, 2) % 8}


def phi4_multimodal() -> tuple[PreTrainedModel, Inputs]:
    sight = {"image_size": 56, "crop_size": 56, "patch_size": 14, "image_token_id": PLACEHOLDER}
    model = tiny("Phi4Multimodal", "ForCausalLM", vision_config=sight)
    ids = torch.tensor([[5, 6, *[PLACEHOLDER] * 13, 7, 8]])
    sizes, seen = torch.tensor([[56, 56]]), torch.ones(1, 2, 4, 4)
    image = {"image_pixel_values": drawn(1, 2, 3, 56, 56), "image_sizes": sizes, "image_attention_mask": seen}
    return model, {"input_ids": ids, **image}


def kosmos2_5() -> tuple[PreTrainedModel, Inputs]:
    model = tiny("Kosmos2_5", own={"latent_query_num": 4})
    ids = torch.tensor([[5, *[PLACEHOLDER] * 4, 7, 8, 9]])
    patches = torch.cat([torch.arange(9)[None, :, None].expand(1, 9, 2) + 1, drawn(1, 9, 768)], dim=2)
    place = (ids == PLACEHOLDER).long()
    return model, {"input_ids": ids, "flattened_patches": patches, "image_embeds_position_mask": place}


CASES: dict[str, Callable[[], tuple[PreTrainedModel, Inputs]]] = {
    one.__name__: one for one in (ctrl, typed, colored, glm_image, pictures, inkling, phi4_multimodal, kosmos2_5)
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_what_only_the_first_forward_is_given(case: str, shape: str) -> None:
    """After a plain call, too, which leaves traces on some models."""
    model, inputs = CASES[case]()
    if shape == "tree" and why_no_trees(model):
        pytest.skip("no trees")
    plain = model.generate(**inputs, **OPTIONS)
    assert len(plain[0, -12:].unique()) > 2
    oracle = Oracle(plain, vocab_size=50)
    for _ in range(2):
        text = model.generate(**inputs, **OPTIONS, speculator=oracle, speculation_config=SHAPES[shape])
        assert torch.equal(text, plain)


@pytest.mark.parametrize("shape", ["none", *SHAPES])
def test_the_check_of_a_target_is_told_what_the_call_passes(shape: str) -> None:
    """After a call with a picture GLM-Image cannot read text alone, nor could its check."""
    model, inputs = glm_image()
    plain = model.generate(**inputs, **OPTIONS)
    config = SHAPES.get(shape, SpeculationConfig())
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *args: seen.append("image_grid_thw" in args[2]), with_kwargs=True)
    text = model.generate(**inputs, **OPTIONS, speculator=Oracle(plain, vocab_size=50), speculation_config=config)
    hook.remove()
    assert torch.equal(text, plain)
    assert all(seen)


def pressed(model: PreTrainedModel) -> list[Any]:
    """Thin the keys and values of every prompt, as presses of caches do."""

    def thin(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs[CACHE].layers[module.layer_idx]
        if layer.get_seq_length() == kwargs["hidden_states"].shape[1]:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

    return [layer.self_attn.register_forward_hook(thin, with_kwargs=True) for layer in model.model.layers]


@pytest.mark.parametrize("kind", ["oracle", "model", "ngram"])
def test_no_draft_token_is_read_with_a_prompt_that_a_hook_acts_on(kind: str) -> None:
    model, inputs = build("llama"), {"input_ids": prompts(1)["input_ids"].repeat(1, 2)}
    before = model.generate(**inputs, **OPTIONS)
    hooks = pressed(model)
    plain = model.generate(**inputs, **OPTIONS)
    assert not torch.equal(plain, before)
    speculator = {"oracle": Oracle(plain), "model": build("llama", num_hidden_layers=1), "ngram": "ngram"}[kind]
    for _ in range(2):
        out = model.generate(**inputs, **OPTIONS, speculator=speculator, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
    for hook in hooks:
        hook.remove()
    text = model.generate(**inputs, **OPTIONS, speculator=Oracle(before), num_speculative_tokens=4)
    assert torch.equal(text, before)


# --- Vocabularies and tables -----------------------------------------------------------------------------------------


def test_a_head_that_is_narrower_than_the_vocabulary() -> None:
    """A picture begins with a token that ImageGPT's head does not know, and the draft guesses now and then."""
    model, draft = tiny("ImageGPT", "ForCausalImageModeling"), build("llama", num_hidden_layers=1)
    assert model.config.vocab_size == draft.config.vocab_size == 99
    start = torch.tensor([[98, 5, 6]])
    options = {"max_new_tokens": 8, "speculator": draft, "num_speculative_tokens": 3}
    plain = model.generate(start, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(start, do_sample=False, **options), plain)
    out = model.generate(start, do_sample=True, **options, return_dict_in_generate=True)
    assert out.speculation.proposed > 0
    assert int(out.sequences[:, 3:].max()) < 98


def test_a_vocabulary_that_is_padded() -> None:
    """Inkling's head knows tokens that its logits leave out."""
    model, draft = build("inkling_text", unpadded_vocab_size=90), build("llama", num_hidden_layers=1)
    start = torch.tensor([[5, 6, 7]])
    assert model(start).logits.shape[-1] == 90
    out = model.generate(start, max_new_tokens=8, do_sample=True, speculator=draft, num_speculative_tokens=3)
    assert out.shape == (1, 11)
    assert int(out.max()) < 90


def drafts_of(model: PreTrainedModel) -> dict[str, Any]:
    """Make a draft of each kind that looks tokens of the prompt up in a table."""
    text, size = model.config.get_text_config(), {"intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    return {
        "model": build("llama", num_hidden_layers=1),
        "eagle": EagleDraftModel(EagleSpeculatorConfig.for_target(text, size)).eval(),
        "eagle3": Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(text, size)).eval(),
        "mtp": MTPDraftModel(MTPSpeculatorConfig.for_target(text, size)).eval(),
    }


@pytest.mark.parametrize("static", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", ["model", "eagle", "eagle3", "mtp"])
def test_placeholders_that_are_in_no_table(kind: str, static: dict[str, str]) -> None:
    """PaliGemma's token for a part of an image stands after all those that it has embeddings for."""
    sight = {"image_size": 28, "patch_size": 14, "projection_dim": 32}
    model = tiny("PaliGemma", vision_config=sight, own={"image_token_id": 150, "projection_dim": 32})
    inputs = {"input_ids": torch.tensor([[150] * 4 + [1, 5, 6, 7]]), "pixel_values": drawn(1, 3, 28, 28)}
    plain = model.generate(**inputs, **OPTIONS, **static)
    draft = drafts_of(model)[kind]
    out = model.generate(
        **inputs, **OPTIONS, **static, speculator=draft, num_speculative_tokens=2, return_dict_in_generate=True
    )
    assert out.speculation.proposed > 0
    assert torch.equal(out.sequences, plain)


def test_an_encoder_to_attend_to_is_refused_by_name() -> None:
    model = tiny("Whisper", "ForCausalLM")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "encoder_outputs": (drawn(1, 9, model.config.d_model),)}
    model.generate(**inputs, **OPTIONS)
    with pytest.raises(ValueError, match="WhisperForCausalLM attends to the output of an encoder"):
        model.generate(**inputs, **OPTIONS, speculator="ngram")


@pytest.mark.parametrize("kind", [DFlashDraftModel, DSparkDraftModel])
def test_blocks_without_any_context(kind: Any) -> None:
    """The root is the first token of the text: nothing stands before it."""
    model = build("llama")
    torch.manual_seed(0)
    draft = kind(kind.config_class.for_target(model.config, mask_token_id=3)).eval()
    draft.bind(model)
    width = len(draft.feature_layers(model)) * model.config.hidden_size
    root = torch.tensor([[5], [6]])
    empty = draft(root, features=torch.zeros(2, 0, width))
    assert torch.equal(empty.logits, draft(root).logits)


# --- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Blip2", "InstructBlip"])
def test_statistics_of_a_model_that_lets_another_one_generate(name: str) -> None:
    model = tiny(name, own={"image_token_id": PLACEHOLDER, "image_token_index": PLACEHOLDER})
    ids = torch.tensor([[PLACEHOLDER] * model.config.num_query_tokens + [5, 6, 7]])
    inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": drawn(1, 3, 224, 224)}
    if name == "InstructBlip":
        inputs["qformer_input_ids"] = torch.tensor([[5, 6]])
    model.language_model.generation_config = GenerationConfig(pad_token_id=0)
    plain = model.generate(**inputs, **OPTIONS)
    assert hf_spec.last_speculation(model) is None
    for _ in range(2):
        out = model.generate(**inputs, **OPTIONS, speculator="ngram", return_dict_in_generate=True)
        assert torch.equal(out.sequences[:, -12:], plain[:, -12:])
        assert hf_spec.last_speculation(model) is out.speculation is hf_spec.last_speculation(model.language_model)
    for one in (model.language_model, model):
        hf_spec.set_speculator(one, "ngram")
        assert torch.equal(model.generate(**inputs, **OPTIONS), plain)
        assert hf_spec.last_speculation(model) is not None
        model.generate(**inputs, **OPTIONS, num_beams=2)  # which no speculator can serve
        assert hf_spec.last_speculation(model) is None
        hf_spec.set_speculator(one, None)


def test_the_last_call_of_several_models_inside_one_counts() -> None:
    pair = nn.ModuleList([build("llama", num_hidden_layers=1, seed=seed) for seed in (0, 1)])
    for which in (0, 1, 0):
        options = OPTIONS | {"speculator": "ngram", "return_dict_in_generate": True}
        out = pair[which].generate(torch.tensor([[5, 6, 7, 5, 6]]), **options)
        assert hf_spec.last_speculation(pair) is out.speculation
