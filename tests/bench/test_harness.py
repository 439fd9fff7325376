"""lm-eval with speculation gives the answers of the same model without it, and so the same scores."""

from __future__ import annotations

import sys

import pytest

import hf_spec
from hf_spec import demo
from hf_spec.bench.harness import harness_model

STORIES = ("Once upon a time, there was", "One day, Lily and her mom went", "Tom had a big red ball. He", "The sun")
NOT_INSTALLED = "lm-eval is not installed: pip install 'hf-spec[eval]'"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, None)
    harness_model.cache_clear()
    with pytest.raises(ImportError, match=r"lm-eval is not installed: pip install 'hf-spec\[eval\]'"):
        harness_model()


def test_answers_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, with a stop string that ends rows at different places; and the draft was asked."""
    plain_model = pytest.importorskip("lm_eval.models.huggingface", reason=NOT_INSTALLED).HFLM
    instances = pytest.importorskip("lm_eval.api.instance", reason=NOT_INSTALLED)
    given = {"tokenizer": str(demo.path()), "dtype": "float32", "device": "cpu", "batch_size": 2}
    ours = harness_model()(str(demo.path()), speculator=str(demo.path("draft-eagle3")), **given)
    speculator = hf_spec.get_speculator(ours.model)
    asked = []
    drafter = speculator.drafter
    monkeypatch.setattr(speculator, "drafter", lambda request: asked.append(1) or drafter(request))
    options = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
    answers = []
    for model in (plain_model(str(demo.path()), **given), ours):
        requests = [instances.Instance("generate_until", {}, (story, options), 0) for story in STORIES]
        answers.append(model.generate_until(requests, disable_tqdm=True))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(STORIES) and all(answers[0])
    assert asked
