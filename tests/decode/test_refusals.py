"""What cannot work is refused before any forward, with cause and cure."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from architectures import LONG_ROPE, build, prompts
from groups import run_two
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from twins import TREE, draft, noisy, target

import hf_spec
from hf_spec import NgramSpeculator, SpeculationConfig, demo
from hf_spec.checkpoints import resolve
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel

INPUTS = prompts(2)
SAMPLED = SpeculationConfig(tree="sampled")


@pytest.fixture(autouse=True)
def no_forward() -> Iterator[None]:
    """Fail if any model runs."""
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(type(module).__name__) if isinstance(module, PreTrainedModel) else None
    )
    yield
    hook.remove()
    assert not seen


def refuse(
    cause: str, cure: str, model: PreTrainedModel | None = None, error: type[Exception] = ValueError, **options: Any
) -> None:
    options = {**INPUTS, "max_new_tokens": 5, "speculator": "ngram"} | options
    with pytest.raises(error, match=cause) as caught:
        (model or target()).generate(**options)
    assert cure in str(caught.value)


def static() -> StaticCache:
    return StaticCache(config=target().config, max_cache_len=30)


class Closed(BaseStreamer):
    """Is given nothing, and its end."""

    def end(self) -> None:
        """Let no consumer wait."""


OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "beams": ("num_beams=3", "num_beams=1", {"num_beams": 3}),
    "beams with a streamer": ("num_beams=3", "num_beams=1", {"num_beams": 3, "streamer": Closed()}),
    "no cache": ("use_cache=False", "True", {"use_cache": False}),
    "offloaded static cache": ("'offloaded_static'", "unset", {"cache_implementation": "offloaded_static"}),
    "offloaded cache": ("cache_implementation='offloaded'", "unset", {"cache_implementation": "offloaded"}),
    "quantised cache": ("cache_implementation='quantized'", "unset", {"cache_implementation": "quantized"}),
    "a short static cache": (
        "room for 30 tokens, and this call may put 32",
        "max_cache_len=32",
        {"past_key_values": static, "max_new_tokens": 20},
    ),
    "a static cache with offloading": (
        "a StaticCache with offloading",
        "leave the cache dynamic",
        {"past_key_values": lambda: StaticCache(config=target().config, max_cache_len=30, offloading=True)},
    ),
    "an offloaded cache": (
        "offloading",
        "without `speculator`",
        {"past_key_values": lambda: DynamicCache(offloading=True)},
    ),
    "an encoder's cache": (
        "EncoderDecoderCache",
        "without `speculator`",
        {"past_key_values": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())},
    ),
    "another model": ("assistant_model", "one of them", {"assistant_model": draft}),
    "another method": ("custom_generate", "one of them", {"custom_generate": lambda: print}),
    "several processes": ("synced_gpus", "without `speculator`", {"synced_gpus": True}),
    "prompt lookup": ("prompt_lookup_num_tokens", "drop", {"prompt_lookup_num_tokens": 3}),
    "contrastive search": ("penalty_alpha", "drop", {"penalty_alpha": 0.6, "top_k": 4}),
    "words that must occur": ("force_words_ids", "drop", {"force_words_ids": [[5]]}),
    "constraints": ("constraints", "drop", {"constraints": [object()]}),
    "layers as drafts": ("assistant_early_exit", "drop", {"assistant_early_exit": 1}),
    "attention weights": ("output_attentions", "False", {"output_attentions": True, "return_dict_in_generate": True}),
    "healing": ("token_healing", "heal_tokens", {"token_healing": True}),
    "strings without a tokenizer": ("stop_strings", "tokenizer=", {"stop_strings": "a"}),
    "target as its draft": ("the target itself", "smaller", {"speculator": target}),
    "a drawn tree of n-grams": ("'sampled'", "'dynamic'", {"speculation_config": SAMPLED}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option(case: str) -> None:
    cause, cure, options = OPTIONS[case]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    refuse(cause, cure, **options)
    if len(options) == 1 and "speculator" not in options:  # asked for in a configuration
        config = GenerationConfig(
            max_new_tokens=5, **{name: options[name] for name in options if name in GenerationConfig().to_dict()}
        )
        if set(options) <= set(config.to_dict()):
            refuse(cause, cure, generation_config=config, max_new_tokens=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_assistant_tokens", 5), ("assistant_ensemble_weight", 0.3), ("max_matching_ngram_size", 2)],
)
def test_options_of_assisted_generation_are_not_dropped(
    name: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(f"{name} is an option of transformers' assisted generation", "Drop it; ", **{name: value})
    config = GenerationConfig(**{name: value, "use_cache": False})
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    with caplog.at_level("WARNING", "transformers"):  # where hf_spec's messages go, too
        refuse("use_cache", "", generation_config=config)
    assert f"generation_config.{name} is for" in caplog.text


@pytest.mark.parametrize("field", ["verification", "acceptance", "tree"])
def test_a_field_of_the_settings_is_no_keyword(field: str) -> None:
    with pytest.raises(TypeError, match=rf"field of .*hf_spec\.SpeculationConfig\({field}='any'\)"):
        target().generate(**prompts(1, (4,)), speculator=draft(), max_new_tokens=2, **{field: "any"})


def test_encoder_decoder() -> None:
    config = BartConfig(
        vocab_size=99,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    model = BartForConditionalGeneration(config)
    refuse("is static", "leave cache_implementation unset", model, cache_implementation="static")
    refuse("num_beams=4: .*pipelines ask for beams, too", "pass num_beams=1", model, num_beams=4)
    refuse("speculator must be", "AutoModelForCausalLM", error=TypeError, speculator=model)
    refuse("speculator must be", "for another of its kind alone", error=TypeError, speculator=model)
    prophet = ProphetNetForConditionalGeneration(
        ProphetNetConfig(
            vocab_size=99,
            hidden_size=16,
            num_encoder_layers=1,
            num_decoder_layers=1,
            num_encoder_attention_heads=2,
            num_decoder_attention_heads=2,
        )
    )
    refuse("one token at a time only", "generate(..., assistant_model=...)", prophet)
    with pytest.raises(ValueError, match="generate_many pads prompts for decoder-only ones"):
        hf_spec.generate_many(model, [[3]], max_new_tokens=4)


def test_a_draft_given_as_an_assistant() -> None:
    eagle = hf_spec.AutoDraftModel.from_pretrained(demo.path("draft-eagle3"))
    for assistant in (eagle, NgramSpeculator(), hf_spec.VanillaSpeculator(draft())):
        refuse("assistant_model takes a language model", "speculator=", speculator=None, assistant_model=assistant)


def test_a_model_with_a_loop_of_its_own() -> None:
    class Own(LlamaForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("plain generate would call this")

    model = Own(target().config)
    refuse("decodes in a way of its own", "drop `speculator`", model)


@pytest.mark.parametrize("name", ["recurrent_gemma", "reformer"])
def test_targets_with_states_outside_the_cache(name: str) -> None:
    refuse("state|cache", "without `speculator`", build(name))


@pytest.mark.parametrize(("name", "reason"), [("rwkv", "rows"), ("xlstm", "own kind"), ("recurrent_gemma", "modules")])
def test_drafts_with_states_outside_the_cache(name: str, reason: str) -> None:
    refuse(reason, "'ngram'", speculator=build(name))


def test_a_model_without_weights() -> None:
    refuse("has no weights", "load them with from_pretrained", copy.deepcopy(target()).to("meta"))


@pytest.mark.parametrize("name", ["mamba", "lfm2", "qwen3_next"])
def test_recurrent_states_in_a_static_cache(name: str) -> None:
    model = build(name)
    cause, cure = "recurrent states .* cannot be taken back in a static cache", "cache_implementation unset"
    refuse(cause, cure, model, cache_implementation="static")
    if name != "mamba":  # has a cache of another name
        refuse(cause, cure, model, past_key_values=StaticCache(config=model.config, max_cache_len=30))


def test_flash_attention() -> None:
    model = noisy(target(), 0.0)
    model.config._attn_implementation = "flash_attention_2"
    one = prompts(1)
    refuse("flash_attention_2 takes no custom mask", "sdpa", model)
    refuse("flash_attention_2 takes no custom mask", "tree=None", model, speculation_config=TREE, **one)
    refuse("mask, which a static cache needs", "leave the cache dynamic", model, cache_implementation="static", **one)
    refuse("rows that advance", "sdpa", model, num_return_sequences=2, do_sample=True, **one)


@pytest.mark.parametrize("who", ["target", "draft", "small model"])
def test_an_attention_without_a_mask_function(who: str) -> None:
    AttentionInterface.register("mine", sdpa_attention_forward)
    model, cure = noisy(target()), r"AttentionMaskInterface\.register\('mine'"
    eagle = Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(model.config))
    guesser = eagle if who == "draft" else noisy(target())
    (model if who == "target" else guesser).set_attn_implementation("mine")
    refuse(rf"attends by 'mine', which has no mask function: .*{cure}", "sdpa", model, speculator=guesser)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("prompt", ["ids", "embeddings", "cache"])
def test_rotary_frequencies_that_change_with_the_length(kind: str, prompt: str) -> None:
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 20,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = target(max_position_embeddings=20 if kind == "dynamic" else 40, head_dim=8)
    model = type(model)(
        type(model.config)(
            **model.config.to_dict()
            | {"rope_parameters": rope, "max_position_embeddings": 20 if kind == "dynamic" else 40}
        )
    )
    inputs: dict[str, Any] = dict(INPUTS)
    if prompt == "embeddings":
        inputs = {
            "inputs_embeds": torch.zeros(2, 13, 32),
            "attention_mask": INPUTS["attention_mask"],
            "input_ids": None,
        }
    elif prompt == "cache":
        inputs = {"input_ids": INPUTS["input_ids"][:, -1:], "past_key_values": DynamicCache(config=model.config)}
        inputs["past_key_values"].update(torch.zeros(2, 2, 12, 8), torch.zeros(2, 2, 12, 8), 0)
    refuse(f"rope_type='{kind}'", "at most 7 new tokens", model, max_new_tokens=8, **inputs)


def test_rows_on_both_sides_of_the_length_where_frequencies_change() -> None:
    model = build("llama", rope_parameters=LONG_ROPE)
    refuse("longer than 10 tokens", "by themselves", model, **prompts(2, (13, 5)))  # the first may be done first


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_of_one_type_of_layer_that_change_with_the_length(kind: str) -> None:
    default = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": LONG_ROPE | {"rope_type": kind}, "sliding_attention": default}
    model = build("gemma3_text", rope_parameters=ropes, max_position_embeddings=20)
    limit = 20 if kind == "dynamic" else 10
    refuse(f"rope_type='{kind}'", f"longer than {limit} tokens", model, max_new_tokens=8, **prompts(2, (13, 5)))


def test_an_offloaded_target_lends_nothing() -> None:
    config = Eagle3SpeculatorConfig.for_target(target().config, shared_with_target=["embed_tokens"])
    offloaded = cpu_offload(noisy(target()), execution_device=torch.device("cpu"))
    refuse("target's embed_tokens is absent, offloaded", "load it", offloaded, speculator=Eagle3DraftModel(config))


def test_vocabularies_that_differ() -> None:
    refuse("vocabulary of 120", "of the target's family", speculator=target(vocab_size=120))
    refuse("vocabulary of 80", "'ngram'", speculator=target(vocab_size=80))
    refuse("vocabulary of 80", "assistant_tokenizer=", speculator=target(vocab_size=80))


def test_a_corpus_of_another_tokenizer() -> None:
    refuse("token 99", "Make the corpus with the target's", speculator=NgramSpeculator(corpus=[[5, 98], [99, 3]]))
    with pytest.raises(ValueError, match="-100"):
        NgramSpeculator(corpus=[[-100, -100, 5, 7]])


def test_a_draft_for_another_target_is_no_default() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        hf_spec.set_speculator(target(), target(vocab_size=80))
    assert hf_spec.get_speculator(target()) is None


def kind(value: Any) -> str:
    """Name a test after what it is given: addresses would differ between processes."""
    return value.__name__ if isinstance(value, type) else type(value).__name__


# --- Values of the keywords ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, True, object(), nn.Linear(2, 2), ["ngram"]], ids=kind)
def test_what_is_no_speculator(value: Any) -> None:
    refuse("speculator must be", "AutoModel.from_pretrained", error=TypeError, speculator=value)


def test_a_model_without_a_head() -> None:
    refuse("speculator must be", "AutoModelForCausalLM", error=TypeError, speculator=target().model)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        *((name, "did you mean 'ngram'?") for name in ("n-gram", "ngrams", "Ngram", "n_gram")),
        *((name, "did you mean 'mtp'?") for name in ("MTP", "mpt")),
        ("Plain", "did you mean 'plain'?"),
        ("history", "in Python, pass hf_spec.NgramSpeculator(history_size=100_000)"),
        ("history+draft", "in Python, pass hf_spec.HybridSpeculator(draft)"),
        *((name, "is a kind of draft with weights; pass the directory") for name in ("eagle", "eagle3", "Medusa")),
    ],
)
def test_a_name_that_is_nearly_right(name: str, cure: str) -> None:
    refuse(f"no draft can be read at '{re.escape(name)}'", cure, speculator=name)


def test_a_name_that_is_like_no_other() -> None:
    with pytest.raises(ValueError, match="no draft can be read at 'org/quantum': "):
        target().generate(**INPUTS, speculator="org/quantum")


@pytest.mark.parametrize("name", [name for name in demo.MODELS if name not in ("target", "draft-vanilla")])
def test_a_draft_is_no_language_model(name: str) -> None:
    with pytest.raises(ValueError, match=r"is a draft.*generate\(..., speculator=draft\)"):
        AutoModelForCausalLM.from_pretrained(demo.path(name))
    with pytest.raises(ValueError, match="is a draft"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo.path(name)))


def local(path: Path, seed: int, names: str) -> PreTrainedModel:
    """Save a model with a tokenizer that knows the letters of ``names`` in this order."""
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    words.save(str(path / "tokenizer.json"))
    noisy(target(), 0.01, seed).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(("names", "warns"), [("abcdefghij", False), ("abcdefghiz", False), ("jihgfedcba", True)])
def test_a_tokenizer_of_the_same_size(
    names: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(resolve.logger, "warning", lambda text, *args: found.append(text))
    places = [tmp_path / name for name in ("target", "draft")]
    for place in places:
        place.mkdir()
    model = local(places[0], 1, "abcdefghij")
    for guesses in (local(places[1], 2, names), str(places[1])):
        for _ in range(2):
            hf_spec.as_speculator(guesses, model)
    of_words = [text for text in found if "of the tokens" in text]  # beside that of a path that is read twice
    assert len(of_words) == warns
    if warns:
        assert "only 0% of the tokens" in of_words[0] and "assistant_tokenizer=" in of_words[0]


@pytest.mark.parametrize("count", [0, -1, 2.5, "many", True])
def test_number_of_tokens(count: Any) -> None:
    refuse("num_speculative_tokens", "at least 1", num_speculative_tokens=count)


@pytest.mark.parametrize("config", [{"tree": "dynamic"}, "dynamic", 4, SpeculationConfig], ids=kind)
def test_what_is_no_configuration(config: Any) -> None:
    refuse("speculation_config", "SpeculationConfig", error=TypeError, speculation_config=config)


@pytest.mark.parametrize("speculator", [None, False])
@pytest.mark.parametrize("setting", [{"num_speculative_tokens": 3}, {"speculation_config": SpeculationConfig()}])
def test_settings_without_a_speculator(setting: dict[str, Any], speculator: Any) -> None:
    refuse("need a speculator", "speculator=", speculator=speculator, **setting)


def test_misspelt_keywords_are_still_refused_by_transformers() -> None:
    refuse("speculater", "", speculator="ngram", speculater="ngram")


@pytest.mark.parametrize("arguments", [{"max_ngram": 2, "min_ngram": 3}, {"match": "nearest"}])
def test_ngram_arguments(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"ngram|match"):
        NgramSpeculator(**arguments)


SPREAD = """
import torch
from architectures import build, prompts
from groups import leave
from torch.distributed.fsdp import fully_shard
import hf_spec
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model, prompt = build("llama"), prompts(1)
fully_shard(model)
plain = model.generate(**prompt, max_new_tokens=5)  # transformers keeps the processes in step
try:
    model.generate(**prompt, max_new_tokens=5, speculator="ngram")
except ValueError as error:
    assert "FSDP" in str(error) and "without `speculator`" in str(error)
else:
    raise AssertionError("not refused")
same = model.generate(**prompt, max_new_tokens=5, speculator="ngram", synced_gpus=False)  # both read the same text
assert torch.equal(same, plain)
leave()
"""


def test_models_spread_over_processes(tmp_path: Path) -> None:
    run_two(tmp_path, SPREAD)
