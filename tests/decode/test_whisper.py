"""Whisper by its own `generate`: windows, fallbacks and their sum, and the pipeline that calls it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speech
import torch
from architectures import build as decoder_only
from pairs import each_value
from speech import END, NO_TIMES, PREVIOUS, VOCABULARY, sound, wave, whisper
from test_exactness import noisy_copy
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    pipeline,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

import hf_spec
from hf_spec import NgramSpeculator, SpeculationConfig, SpeculationStats, integration
from hf_spec.checkpoints import resolve
from hf_spec.verify import prefixes

ENDS: dict[str, Any] = {"max_new_tokens": 16, "exponential_decay_length_penalty": (4, 1.25)}  # at different lengths
POOR = {"temperature": (0.0, 0.0), "compression_ratio_threshold": 0.61, "logprob_threshold": -0.8}
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "timestamps": {"return_timestamps": True},
    "conditioned": {"return_timestamps": True, "condition_on_prev_tokens": True},
    "fallback": {"return_timestamps": True, **POOR},
    "silence": {"return_timestamps": True, **POOR, "no_speech_threshold": 0.001},
    "all": {"return_timestamps": True, **POOR, "no_speech_threshold": 0.001, "condition_on_prev_tokens": True},
    "best of a sample": {"return_timestamps": True, **POOR, "temperature": (0.0, 0.7), "top_k": 1},
    "prompt": {"prompt_ids": torch.tensor([PREVIOUS, 7, 8, 9]), "return_timestamps": True},
    "prompt of all windows": {
        "prompt_ids": torch.tensor([PREVIOUS, 7, 8]),
        "return_timestamps": True,
        "prompt_condition_type": "all-segments",
        "condition_on_prev_tokens": True,
    },
    "translation": {"task": "translate", "language": "de", "return_timestamps": True},
    "several languages": {"language": ["de", "fr", "en", "de"], "return_timestamps": True},
}
DRAFTS = ("n-grams", "draft", "tree")


@functools.cache
def target(languages: bool) -> PreTrainedModel:
    return whisper(languages)


@functools.cache
def draft(languages: bool) -> PreTrainedModel:
    return noisy_copy(target(languages), seed=0, noise=0.05)


def options(case: str, rows: int) -> dict[str, Any]:
    languages = CASES[case].get("language")
    return {**ENDS, **CASES[case]} | ({"language": languages[:rows]} if isinstance(languages, list) else {})


@functools.cache
def plain(languages: bool, case: str, rows: int, windows: float) -> Tensor:
    return target(languages).generate(**sound(target(languages), rows, windows), **options(case, rows))


@functools.cache
def history() -> NgramSpeculator:
    return NgramSpeculator(history_size=10_000)


def speculation(kind: str, languages: bool) -> dict[str, Any]:
    if kind == "tree":
        tree = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8)
        return {"speculator": draft(languages), "speculation_config": tree}
    return {"speculator": draft(languages) if kind == "draft" else history(), "num_speculative_tokens": 4}


# --- The text is that of plain generate ------------------------------------------------------------------------------

# Each set of options meets one draft, in one batch; all options together meet every draft.
TOGETHER = [("all", "draft", 4, 3.2), ("all", "n-grams", 3, 3.2), ("fallback", "draft", 3, 3.2)]
COMBINATIONS = [
    pytest.param(*one.values) if one.values in TOGETHER else one
    for one in each_value(CASES, DRAFTS, (1, 3, 4), (1, 3.2))
]


@pytest.mark.parametrize(("case", "kind", "rows", "windows"), COMBINATIONS)
def test_same_text_as_plain_generate(case: str, kind: str, rows: int, windows: float) -> None:
    languages = case in ("translation", "several languages") or rows == 3
    want = plain(languages, case, rows, windows)
    given = sound(target(languages), rows, windows)
    got = target(languages).generate(**given, **options(case, rows), **speculation(kind, languages))
    assert torch.equal(got, want)
    untouched = sound(target(languages), rows, windows)
    assert all(torch.equal(given[name], value) for name, value in untouched.items())
    stats = hf_spec.last_speculation(target(languages))
    assert stats is not None and stats.batch_size == len(stats.per_row) == rows
    assert kind == "n-grams" or 0 < stats.accepted < stats.proposed


def test_the_cases_do_what_they_are_for() -> None:
    """Rows end at different lengths, timestamps come, some rows fall back and others do not, some are skipped."""
    model, given = target(False), sound(target(False), 4, 3.2)
    asked: list[tuple[bool, bool]] = []
    need = WhisperGenerationMixin._need_fallback

    def noted(self: Any, *args: Any) -> Any:
        asked.append(need(self, *args))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WhisperGenerationMixin, "_need_fallback", noted)
        for case, outcomes in (("fallback", {True, False}), ("silence", {True, False})):
            asked.clear()
            text = model.generate(**given, **ENDS, **CASES[case])
            assert {again for again, _ in asked} == outcomes, case
            assert case != "silence" or {skip for _, skip in asked} == {True, False}
    assert (text > NO_TIMES).any() and len(set((text == END).sum(1).tolist())) > 1
    assert not torch.equal(plain(True, "translation", 1, 1), plain(True, "timestamps", 1, 1))


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_seed_gives_the_text_of_plain_fallbacks(kind: str) -> None:
    """Windows are sampled, too: rows that fall back leave those that do not, and draw what they draw in plain."""
    model, given, texts = target(False), sound(target(False), 3, 3.2), []
    options = {**ENDS, **CASES["fallback"], "temperature": (0.0, 0.7, 1.0)}
    ours = speculation(kind, False)
    config = ours.get("speculation_config", SpeculationConfig(num_speculative_tokens=4))
    exact = {
        "speculator": ours["speculator"],
        "speculation_config": dataclasses.replace(config, verification="exact"),
    }
    for more in ({}, {}, exact):
        torch.manual_seed(3 + len(texts) % 2)
        texts.append(model.generate(**given, **options, **more))
    assert torch.equal(texts[2], texts[0]) and not torch.equal(texts[1], texts[0])


def test_a_lost_rule_of_timestamps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefixes.VECTORIZED, WhisperTimeStampLogitsProcessor, lambda one, prefixes, scores: scores)
    got = target(False).generate(
        **sound(target(False), 3), **ENDS, **CASES["timestamps"], **speculation("draft", False)
    )
    assert not torch.equal(got, plain(False, "timestamps", 3, 1))


def test_rows_do_not_wait_for_each_other() -> None:
    """A processor that needs all rows brings lockstep back, and more forwards with it."""
    steps = []
    for own in (None, LogitsProcessorList([lambda ids, scores: scores])):
        given = sound(target(False), 4, 3.2)
        options = {**ENDS, **CASES["silence"], **speculation("draft", False)}
        assert torch.equal(
            target(False).generate(**given, **options, logits_processor=own), plain(False, "silence", 4, 3.2)
        )
        steps.append(hf_spec.last_speculation(target(False)).steps)  # type: ignore[union-attr]
    assert steps[0] < steps[1]


def test_the_sound_is_encoded_as_often_as_by_plain_generate() -> None:
    """Also where the detection of silence encodes it once more."""
    counts, model = [], target(True)
    for options in ({}, speculation("n-grams", True)):
        encoded: list[int] = []
        with model.get_encoder().register_forward_hook(lambda *args, encoded=encoded: encoded.append(1)):
            model.generate(**sound(model, 2, 3.2), **ENDS, **CASES["silence"], **options)
        counts.append(len(encoded))
    assert counts[0] == counts[1] > 8


# --- Statistics of the whole call ------------------------------------------------------------------------------------


@pytest.fixture
def forwards() -> Iterator[dict[str, int]]:
    """Count the forwards of encoder and decoder."""
    seen, model, _ = {"encoder": 0, "decoder": 0}, target(False).model, draft(False)  # a copy takes hooks along

    def count(module: Any, *_: Any) -> None:
        seen["encoder" if module is model.encoder else "decoder"] += 1

    with model.encoder.register_forward_hook(count), model.decoder.register_forward_hook(count):
        yield seen


@pytest.mark.parametrize("case", ["timestamps", "fallback"])
def test_statistics_are_the_sum_of_windows_and_fallbacks(case: str, forwards: dict[str, int]) -> None:
    model, given = target(False), sound(target(False), 3, 3.2)
    options = {**ENDS, **CASES[case], **speculation("draft", False)}
    calls = []
    for _ in range(2):  # the second one begins anew
        model.generate(**given, **options)
        forwards.update(encoder=0, decoder=0)
        model.generate(**given, **options)
        calls.append(hf_spec.last_speculation(model))
    first, second = calls
    assert isinstance(first, SpeculationStats) and isinstance(second, SpeculationStats)
    assert first is not second and first.counts == second.counts and first.steps == second.steps
    parts = forwards["encoder"]
    extra = forwards["decoder"] - parts - first.steps  # each part begins with a prefill
    # Scores are returned with a cache, into which the last token of a row is read that ended before others.
    assert parts > 3 and (0 <= extra <= parts if case == "fallback" else extra == 0)
    # A row of a batch does what it does alone.
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        frames = int(alone["attention_mask"].sum())
        model.generate(input_features=alone["input_features"][..., :frames], **options)
        stats = hf_spec.last_speculation(model)
        assert stats is not None and stats.per_row[0].tokens == first.per_row[row].tokens
        assert stats.per_row[0].to_dict() | {"seconds": 0} == first.per_row[row].to_dict() | {"seconds": 0}
        assert stats.per_row[0].seconds > 0 and first.per_row[row].seconds > 0


def test_outputs_have_the_statistics() -> None:
    model = target(False)
    for case, windows in (("text", 1), ("timestamps", 3.2)):
        asked: dict[str, Any] = {**ENDS, **CASES[case], "return_dict_in_generate": True, "output_scores": True}
        given = sound(model, 3, windows)
        want = model.generate(**given, **asked)
        out = model.generate(**given, **asked, **speculation("draft", False))
        assert torch.equal(out["sequences"], want["sequences"])
        stats = out["speculation"] if windows > 1 else out.speculation
        assert stats is hf_spec.last_speculation(model) and stats.accepted
        assert set(out) == {*want, "speculation"}
        assert windows == 1 or "speculation" not in out["segments"][0][0]["result"]
    segments = model.generate(**given, **ENDS, return_segments=True, **speculation("draft", False))
    assert segments["speculation"].batch_size == 3


def test_a_call_without_a_speculator_is_plain() -> None:
    model, given = whisper(), sound(target(False), 2, 3.2)
    for options in ({}, {"speculator": False}):
        out = model.generate(**given, **ENDS, **options, return_segments=True)
        assert set(out) == {"sequences", "segments"} and hf_spec.last_speculation(model) is None


def test_a_call_that_fails_leaves_the_statistics_of_the_one_before() -> None:
    model, given = target(False), sound(target(False), 1, 3.2)
    model.generate(**given, **ENDS, speculator="ngram")
    before = hf_spec.last_speculation(model)
    windows = []

    def stop(progress: Tensor) -> None:
        windows.append(progress)
        if len(windows) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**given, **ENDS, speculator="ngram", monitor_progress=stop)
    assert before is not None and hf_spec.last_speculation(model) is before


def test_another_model_that_generates_meanwhile_keeps_its_own_statistics() -> None:
    model, other = target(False), whisper(seed=1)
    model.generate(
        **sound(model, 1, 3.2),
        **ENDS,
        speculator="ngram",
        monitor_progress=lambda _: other.generate(**sound(other, 2), **ENDS, speculator="ngram"),
    )
    stats, others = hf_spec.last_speculation(model), hf_spec.last_speculation(other)
    assert stats is not None and others is not None and (stats.batch_size, others.batch_size) == (1, 2)


# --- Ways to ask -----------------------------------------------------------------------------------------------------


def test_a_default_speculator(caplog: pytest.LogCaptureFixture) -> None:
    model, given = whisper(), sound(target(False), 2, 3.2)
    hf_spec.set_speculator(model, draft(False))
    want = plain(False, "timestamps", 2, 3.2)
    assert torch.equal(model.generate(**given, **ENDS, **CASES["timestamps"]), want)
    stats = hf_spec.last_speculation(model)
    assert stats is not None and stats.batch_size == 2 and stats.accepted
    beams = model.generate(**given, **ENDS, num_beams=2)
    assert hf_spec.last_speculation(model) is None  # decoded plainly
    assert torch.equal(beams, target(False).generate(**given, **ENDS, num_beams=2))


def test_settings_that_transformers_fills_in_are_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Whisper passes on a configuration with those of assisted generation."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    with caplog.at_level("WARNING", "transformers"):
        whisper().generate(**sound(target(False), 1, 3.2), **ENDS, speculator=draft(False))
    assert "assisted generation" not in caplog.text


def test_the_speculator_of_a_call_comes_before_that_of_a_generation_config() -> None:
    """Whisper's own ``generate`` writes keywords over those of the config that has them."""
    model, given = whisper(), sound(target(False), 2, 3.2)
    model.generation_config.speculator = "ngram"
    want, asked = plain(False, "timestamps", 2, 3.2), {**ENDS, **CASES["timestamps"]}
    found = []
    for speculator in (None, draft(False), "ngram", False):
        assert torch.equal(model.generate(**given, **asked, speculator=speculator), want)
        found.append(hf_spec.last_speculation(model))
    by_config, by_draft, by_name, plainly = found
    assert by_config is not None and by_draft is not None and by_name is not None
    assert by_config.accepted == by_name.accepted != by_draft.accepted
    assert plainly is by_name  # nothing was drafted since
    model.generate(**given, **asked, num_speculative_tokens=1)
    stats = hf_spec.last_speculation(model)
    assert stats is not None and stats.proposed <= stats.steps


def test_a_draft_of_a_name_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_only("llama", vocab_size=VOCABULARY).save_pretrained(tmp_path)
    read, load = [], resolve.load_draft
    monkeypatch.setattr(resolve, "load_draft", lambda *args, **kwargs: read.append(args[0]) or load(*args, **kwargs))
    got = target(False).generate(
        **sound(target(False), 2, 3.2), **ENDS, **CASES["timestamps"], speculator=str(tmp_path)
    )
    assert torch.equal(got, plain(False, "timestamps", 2, 3.2)) and len(read) == 1


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"num_beams": 5}, "pipelines ask for beams, too; pass num_beams=1"),
        ({"return_token_timestamps": True}, "aligns words by the attention of single steps"),
        ({"cache_implementation": "static"}, "is static, which is served for decoder-only models alone"),
        ({"assistant_model": True}, "two ways of decoding"),
    ],
)
def test_what_is_refused_is_refused_before_a_language_is_detected(options: dict[str, Any], cause: str) -> None:
    model, encoded = target(True), []
    with (
        model.get_encoder().register_forward_hook(lambda *args: encoded.append(1)),
        pytest.raises(ValueError, match=cause),
    ):
        model.generate(**sound(model, 1), **ENDS, speculator="ngram", **options)
    assert not encoded


SEEDS = SpeculationConfig(verification="exact", num_speculative_tokens=3, row_seeds=(1, 2))


@pytest.mark.parametrize("place", ["call", "config of the call", "config of the model"])
def test_seeds_of_rows_are_refused_before_anything_runs(place: str) -> None:
    """Windows have fewer and fewer rows, and each would begin with the same seeds."""
    model, given, encoded = whisper(), sound(target(False), 2, 3.2), []
    asked: dict[str, Any] = {"speculator": "ngram"}
    if place == "call":
        asked["speculation_config"] = SEEDS
    elif place == "config of the call":
        asked["generation_config"] = copy.deepcopy(model.generation_config)
        asked["generation_config"].speculation_config = SEEDS.to_dict()
    else:
        model.generation_config.speculation_config = SEEDS
    with (
        model.get_encoder().register_forward_hook(lambda *args: encoded.append(1)),
        pytest.raises(ValueError, match=r"row_seeds .* decodes in parts: .* one sound per call .*torch\.manual_seed"),
    ):
        model.generate(**given, **ENDS, **asked)
    assert not encoded


def test_seeds_of_rows_in_the_settings_of_a_default_leave_it_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, warned = whisper(), sound(target(False), 2, 3.2), []
    monkeypatch.setattr(integration.logger, "warning", warned.append)
    hf_spec.set_speculator(model, draft(False), SEEDS)
    want = plain(False, "timestamps", 2, 3.2)
    assert torch.equal(model.generate(**given, **ENDS, **CASES["timestamps"]), want)
    assert hf_spec.last_speculation(model) is None
    assert len(warned) == 1 and "default speculator is not used" in warned[0] and "row_seeds" in warned[0]
    with pytest.raises(ValueError, match="row_seeds"):
        model.generate(**given, **ENDS, speculation_config=SEEDS)
    hf_spec.set_speculator(model, draft(False))
    model.generate(**given, **ENDS)
    assert hf_spec.last_speculation(model) is not None


def test_uninstall_gives_whisper_its_methods_back() -> None:
    names = ("generate", "generate_with_fallback", "_need_fallback")
    ours = {name: getattr(WhisperGenerationMixin, name) for name in names}
    hf_spec.uninstall()
    try:
        for name in names:
            assert getattr(WhisperGenerationMixin, name) is ours[name]._hf_spec_original
        assert not hasattr(GenerationMixin.generate, "_hf_spec_original")
    finally:
        hf_spec.install()
    hf_spec.install()  # once more changes nothing
    assert not hasattr(WhisperGenerationMixin.generate._hf_spec_original, "_hf_spec_original")
    assert torch.equal(
        target(False).generate(**sound(target(False), 2), **ENDS, speculator="ngram"), plain(False, "text", 2, 1)
    )


# --- The pipeline ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    speech.save(target(False), path)
    return path


@pytest.mark.parametrize(
    "options",
    [{}, {"return_timestamps": True}, {"chunk_length_s": 1}, {"chunk_length_s": 1, "batch_size": 3}],
    ids=["short", "long", "chunked", "batched"],
)
def test_the_pipeline_for_speech(folder: Path, options: dict[str, Any]) -> None:
    transcribe = pipeline("automatic-speech-recognition", model=str(folder))
    heard = [wave(0.7), wave(2.5 if options else 0.9, seed=1)]
    asked = {"num_beams": 1, **ENDS}
    want = transcribe([*heard], generate_kwargs=asked, **options)
    got = transcribe([*heard], generate_kwargs=asked | speculation("draft", False), **options)
    assert got == want and all(answer["text"] for answer in got)
    stats = hf_spec.last_speculation(transcribe.model)
    assert stats is not None and stats.proposed


def test_the_pipeline_asks_for_beams(folder: Path) -> None:
    transcribe = pipeline("automatic-speech-recognition", model=str(folder))
    with pytest.raises(ValueError, match=r"num_beams=5: .*generate_kwargs=\{'num_beams': 1\} to a speech pipeline"):
        transcribe(wave(0.7), generate_kwargs={"speculator": "ngram"})


# --- Real weights ----------------------------------------------------------------------------------------------------


POOR_SPEECH = {"compression_ratio_threshold": 1.35, "logprob_threshold": -0.3}
REAL: dict[str, dict[str, Any]] = {
    "text": {},
    "fallback": {"return_timestamps": True, **POOR_SPEECH, "temperature": (0.0, 0.0), "no_speech_threshold": 0.6},
    "sampled fallback": {"return_timestamps": True, **POOR_SPEECH, "temperature": (0.0, 0.4, 0.8)},
}


@functools.cache
def real() -> tuple[Any, Any, dict[str, Any], np.ndarray]:
    """Load a Whisper, and read what is said to it."""
    path, file = os.environ["HF_SPEC_WHISPER"], os.environ.get("HF_SPEC_SPEECH")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(path, dtype=torch.float32).eval()
    extractor = AutoFeatureExtractor.from_pretrained(path)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "transcribe.py"))
    heard = wave(40) if file is None else example["read"](file, extractor.sampling_rate)
    return model, extractor, example, heard


@pytest.mark.slow
@pytest.mark.skipif("HF_SPEC_WHISPER" not in os.environ, reason="names no directory of a Whisper")
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("recordings", ["short", "three short", "long", "two long"])
def test_real_weights(recordings: str, case: str) -> None:
    """HF_SPEC_WHISPER is a directory of a Whisper, HF_SPEC_SPEECH a WAV file of speech; without it noise is heard.

    The draft is the target with noise, so that a draft token costs as much as a plain step.
    """
    model, extractor, example, heard = real()
    short, half = heard[: 16000 * 20], heard[: len(heard) // 2]
    given = {
        "short": [short],
        "three short": [short, short[: 16000 * 7], short[16000 * 3 :]],
        "long": [heard],
        "two long": [heard, half],
    }[recordings]
    call = example["features"](extractor, given, extractor.chunk_length) | {"num_beams": 1}
    call |= {"return_timestamps": len(heard) > 16000 * 30 or None, **REAL[case]}
    exact = SpeculationConfig(num_speculative_tokens=4, verification="exact")  # a seed gives plain's text
    texts = []
    for own in (None, NgramSpeculator(history_size=10_000), noisy_copy(model, seed=0, noise=0.01)):
        torch.manual_seed(0)
        texts.append(model.generate(**call, **({"speculator": own, "speculation_config": exact} if own else {})))
    assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])
