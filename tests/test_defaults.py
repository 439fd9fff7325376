"""What guesses where a call does not say: stored for a model, or named in its generation config."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LONG_ROPE, build, prompts
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    TextIteratorStreamer,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
    pipeline,
)
from transformers.utils import logging
from twins import CHAIN, TREE, draft, noisy, target, tokenizer

import hf_spec
from hf_spec import SpeculationConfig, as_speculator, demo
from hf_spec.checkpoints import resolve
from hf_spec.defaults import default_speculator
from hf_spec.drafts.base import network_of

NEW = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Copy the target, so that its generation config is our own."""
    logging.warning_once.cache_clear()
    model = copy.deepcopy(target())
    yield model
    hf_spec.set_speculator(model, None)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the warnings that are given."""
    found: list[str] = []
    for module in (hf_spec.integration, resolve):
        monkeypatch.setattr(module.logger, "warning", lambda text, *args: found.append(text))
    return found


# --- set_speculator --------------------------------------------------------------------------------------------------


def test_what_is_stored_is_given_back(model: PreTrainedModel) -> None:
    assert hf_spec.get_speculator(model) is None
    eagle = hf_spec.NgramSpeculator()
    hf_spec.set_speculator(model, eagle)
    assert hf_spec.get_speculator(model) is eagle
    hf_spec.set_speculator(model, draft())
    assert isinstance(hf_spec.get_speculator(model), hf_spec.VanillaSpeculator)
    hf_spec.set_speculator(model, None)
    assert hf_spec.get_speculator(model) is None


def test_settings_of_another_type_are_refused(model: PreTrainedModel) -> None:
    for settings in ({"tree": "dynamic"}, "dynamic", 3):
        with pytest.raises(TypeError, match=r"config must be a hf_spec\.SpeculationConfig, got "):
            hf_spec.set_speculator(model, "ngram", settings)  # type: ignore[arg-type]
    assert hf_spec.get_speculator(model) is None


def test_a_default_is_for_a_model(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="model is a str, no model of transformers"):
        hf_spec.set_speculator("x", "ngram")  # type: ignore[arg-type]


def test_a_path_is_read_once(model: PreTrainedModel, tmp_path: Path) -> None:
    draft().save_pretrained(tmp_path)
    hf_spec.set_speculator(model, str(tmp_path))
    for file in tmp_path.iterdir():
        file.unlink()
    assert torch.equal(model.generate(**prompts(3), **NEW), target().generate(**prompts(3), **NEW))
    assert hf_spec.last_speculation(model).accepted > 0


def test_a_model_with_a_default_is_not_kept_alive() -> None:
    model = noisy(target(), 0.0)
    hf_spec.set_speculator(model, draft())
    model.generation_config.speculator = "ngram"
    model.generate(**prompts(1), **NEW)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Be a process group of one, for `synced_gpus`."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


REFUSED: dict[str, tuple[str, Callable[[PreTrainedModel], dict[str, Any]]]] = {
    "beams": ("num_beams=3", lambda model: {"num_beams": 3}),
    "no cache": ("use_cache=False", lambda model: {"use_cache": False}),
    "several processes": ("synced_gpus", lambda model: {"synced_gpus": True}),
    "prompt lookup": ("prompt_lookup_num_tokens", lambda model: {"prompt_lookup_num_tokens": 2}),
    "attention weights": ("output_attentions", lambda model: {"output_attentions": True}),
}


class Nothing(LogitsProcessor):
    """Do nothing, which nobody knows from outside."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_rule_that_a_call_cannot_follow_is_no_error_of_a_default(model: PreTrainedModel, warned: list[str]) -> None:
    options = NEW | {"do_sample": True, "logits_processor": LogitsProcessorList([Nothing()])}
    torch.manual_seed(0)
    plain = model.generate(**prompts(1), **options)
    hf_spec.set_speculator(model, draft(), SpeculationConfig(acceptance="typical"))
    torch.manual_seed(0)
    assert torch.equal(model.generate(**prompts(1), **options), plain)
    assert len(warned) == 1 and "token by token" in warned[0] and "generated plainly" in warned[0]


def test_one_warning_whatever_lengths_a_refusal_names(warned: list[str]) -> None:
    model = build("llama", rope_parameters=LONG_ROPE | {"original_max_position_embeddings": 12})
    hf_spec.set_speculator(model, "ngram")
    for length in (9, 10, 11):
        model.generate(**prompts(1, (length,)), **NEW)
    assert len(warned) == 1 and "changes its frequencies" in warned[0]


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_a_default_cannot_serve_is_plain(case: str, model: PreTrainedModel, warned: list[str]) -> None:
    cause, options = REFUSED[case]
    plain = model.generate(**prompts(1), **NEW, **options(model))
    hf_spec.set_speculator(model, draft())
    model.generate(**prompts(1), **NEW)
    assert hf_spec.last_speculation(model)
    for _ in range(2):
        out = model.generate(**prompts(1), **NEW, **options(model))
        assert torch.equal(out, plain)
        assert hf_spec.last_speculation(model) is None
    assert len(warned) == 1, "more than one warning"
    assert cause in warned[0] and "generated plainly" in warned[0]
    for own in ({"speculator": draft()}, {"num_speculative_tokens": 3}, {"speculation_config": CHAIN}):
        with pytest.raises(ValueError, match=cause.split("=")[0]):
            model.generate(**prompts(1), **NEW, **options(model), **own)


def test_a_live_stream_of_sound_loses_nothing(warned: list[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sound = {**sizes, "num_mel_bins": 8, "head_dim": 8}
    text = {**sizes, "num_key_value_heads": 2, "vocab_size": 99, "eos_token_id": None}
    torch.manual_seed(0)
    model = VoxtralRealtimeForConditionalGeneration(VoxtralRealtimeConfig(audio_config=sound, text_config=text)).eval()
    chunks = torch.randn(1, 8, 80).split([24] + [8] * 7, dim=-1)

    def write(**options: Any) -> torch.Tensor:
        options = {"input_features": (one for one in chunks), "num_delay_tokens": 2, "do_sample": False} | options
        return model.generate(torch.tensor([[1, 5, 6]]), **options)  # type: ignore[operator, no-any-return]

    plain = write()
    hf_spec.set_speculator(model, "ngram")
    assert torch.equal(write(), plain) and plain.shape[1] == 3 + 8
    assert len(warned) == 1 and "input_features is a generator" in warned[0]
    with pytest.raises(ValueError, match="sound of that moment"):
        write(speculator="ngram", input_features=torch.cat(chunks, dim=-1))


@pytest.mark.parametrize("named", [False, True])
def test_a_static_cache_is_served(named: bool, model: PreTrainedModel, warned: list[str]) -> None:
    def options() -> dict[str, Any]:
        cache = None if named else StaticCache(config=model.config, max_cache_len=30)
        return {"cache_implementation": "static"} if named else {"past_key_values": cache}

    plain = model.generate(**prompts(1), **NEW, **options())
    hf_spec.set_speculator(model, draft())
    assert torch.equal(model.generate(**prompts(1), **NEW, **options()), plain)
    assert hf_spec.last_speculation(model) is not None
    assert warned == []


def test_the_stream_of_a_call_that_falls_back_is_plain_generates(model: PreTrainedModel) -> None:
    hf_spec.set_speculator(model, draft())
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    text = model.generate(**prompts(1), **NEW, streamer=streamer, use_cache=False)
    assert "".join(streamer) == tokenizer().decode(text[0])
    assert streamer.text_queue.empty()


def test_mistakes_of_a_call_are_not_hidden_by_a_default(model: PreTrainedModel, warned: list[str]) -> None:
    hf_spec.set_speculator(model, draft())
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(**prompts(1), **NEW, no_such_option=3)
    assert warned == []


# --- Generation configs ----------------------------------------------------------------------------------------------


def test_a_generation_config_names_a_speculator_and_is_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    plain = model.generate(**prompts(3), **NEW)
    draft().save_pretrained(tmp_path / "draft")
    model.generation_config.speculator = str(tmp_path / "draft")
    model.generation_config.speculation_config = TREE
    model.save_pretrained(tmp_path / "target")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert loaded.generation_config.speculation_config == TREE.to_dict()
    for one in (model, loaded):
        assert torch.equal(one.generate(**prompts(3), **NEW), plain)
        stats = hf_spec.last_speculation(one)
        assert stats is not None and stats.proposed > 3 * stats.row_steps, "not the tree"
    assert hf_spec.get_speculator(loaded) is None  # which is what set_speculator stored
    before = default_speculator(model, None)[0]
    assert default_speculator(model, None)[0] is before
    after = default_speculator(model.to(torch.bfloat16), None)[0]
    assert before is not None and after is not None
    networks = [network_of(one) for one in (before, after)]
    assert [next(one.parameters()).dtype for one in networks if one] == [torch.float32, torch.bfloat16]


def test_the_config_of_a_call_comes_first_then_what_is_stored(model: PreTrainedModel) -> None:
    def deepest(**options: Any) -> int:
        model.generate(**prompts(3), do_sample=False, **options)
        stats = hf_spec.last_speculation(model)
        return len(stats.acceptance_by_position) if stats else 0

    model.generation_config.speculator, model.generation_config.num_speculative_tokens = "ngram", 2
    assert deepest(max_new_tokens=16) <= 2
    hf_spec.set_speculator(model, draft(), SpeculationConfig(num_speculative_tokens=3))
    assert deepest(max_new_tokens=16) == 3
    own = GenerationConfig(max_new_tokens=16, speculator="ngram", num_speculative_tokens=1)
    assert deepest(generation_config=own) == 1
    assert deepest(generation_config=own, speculator=draft(), num_speculative_tokens=4) == 4
    assert deepest(generation_config=own, speculator=draft()) == 1
    off = GenerationConfig(max_new_tokens=16, speculator=False)
    before = hf_spec.last_speculation(model)
    assert torch.equal(
        model.generate(**prompts(3), generation_config=off, do_sample=False),
        target().generate(**prompts(3), max_new_tokens=16, do_sample=False),
    )
    assert hf_spec.last_speculation(model) is before
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(**prompts(3), generation_config=own, num_beams=2, speculator=draft())


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"speculator": 3}, "speculator is a int"),
        ({"speculator": "ngram", "speculation_config": "tree"}, "write a hf_spec.SpeculationConfig or a dict"),
        ({"speculator": "ngram", "speculation_config": {"shape": 3}}, "has no .'shape'"),
    ],
)
def test_what_no_generation_config_can_hold_is_refused(model: PreTrainedModel, options: Any, cause: str) -> None:
    with pytest.raises(TypeError, match=cause):
        model.generate(**prompts(1), generation_config=GenerationConfig(**NEW, **options))


def test_a_model_that_transformers_lets_draft_takes_no_default(model: PreTrainedModel) -> None:
    """Its call has a copy of the target's generation config, which names a speculator for the target."""
    small, plain = copy.deepcopy(draft()), model.generate(**prompts(1), **NEW)
    model.generation_config.speculator = "mtp"  # of which it has none
    assert torch.equal(model.generate(**prompts(1), **NEW, assistant_model=small), plain)
    hf_spec.set_speculator(small, "ngram")
    assert torch.equal(model.generate(**prompts(1), **NEW, assistant_model=small), plain)
    assert hf_spec.last_speculation(small) is None


def test_a_named_draft_is_read_again_once_it_is_named_again(model: PreTrainedModel, tmp_path: Path) -> None:
    draft().save_pretrained(tmp_path)
    model.generation_config.speculator = str(tmp_path)
    first, again = (default_speculator(model, None)[0] for _ in range(2))
    assert first is not None and again is first
    model.generation_config.speculator = None
    assert default_speculator(model, None) == (None, None)
    model.generation_config.speculator = str(tmp_path)
    assert default_speculator(model, None)[0] is not first


def test_a_draft_in_a_generation_config_is_refused(model: PreTrainedModel) -> None:
    model.generation_config.speculator = draft()
    with pytest.raises(TypeError, match=r"set_speculator\(model, draft\)"):
        model.generate(**prompts(1), **NEW)


# --- Pipelines -------------------------------------------------------------------------------------------------------


def test_the_statistics_of_a_pipeline_are_kept() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.path())
    assert hf_spec.last_speculation(model) is None
    pipe = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(demo.path()))
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = pipe("Once upon a time", **options)
    assert hf_spec.last_speculation(model) is None
    hf_spec.set_speculator(model, str(demo.path("draft-eagle3")))
    assert pipe("Once upon a time", **options) == plain
    stats = hf_spec.last_speculation(model)
    assert stats is not None
    assert 0 < stats.emitted <= 12
    out = model.generate(torch.tensor([[1, 5, 7]]), **options, speculator="ngram", return_dict_in_generate=True)
    assert hf_spec.last_speculation(model) is out.speculation


# --- warnings of what is slow ----------------------------------------------------------------------------------------


def test_a_draft_that_is_read_by_every_call_is_told_of(warned: list[str]) -> None:
    logging.warning_once.cache_clear()
    model, place = AutoModelForCausalLM.from_pretrained(demo.path()), str(demo.path("draft-eagle3"))
    as_speculator(place, model)
    assert warned == []
    for _ in range(2):
        as_speculator(place, model)
    assert len(warned) == 1, "more than one warning"
    assert place in warned[0] and "read it once" in warned[0]


def test_failed_attempts_and_what_auto_tries_are_no_readings(warned: list[str]) -> None:
    logging.warning_once.cache_clear()
    model = AutoModelForCausalLM.from_pretrained(demo.path())
    for _ in range(2):
        with pytest.raises(ValueError, match="no multi-token-prediction layers"):
            as_speculator("mtp", model)
    as_speculator("auto", model)
    assert warned == []


@pytest.mark.parametrize(("device", "count"), [("cuda:0", 1), ("cpu", 0), ("meta", 0)])
def test_a_draft_left_on_the_cpu_is_told_of(
    device: str, count: int, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = AutoModel.from_pretrained(demo.path("draft-eagle3"))
    model, small = (AutoModelForCausalLM.from_pretrained(demo.path(name)) for name in ("target", "draft-vanilla"))
    monkeypatch.setattr(resolve, "input_device", lambda target: torch.device(device))
    for speculator in (draft, hf_spec.VanillaSpeculator(small), hf_spec.NgramSpeculator()):  # the last one is nowhere
        as_speculator(speculator, model)
    assert len(warned) == 2 * count
    assert all("on the CPU" in warning and f'draft.to("{device}")' in warning for warning in warned)
