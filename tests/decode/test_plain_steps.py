"""Runs of plain steps in the middle of a call, beside the same steps taken one by one with all hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build, prompts
from lengths import force_lengths
from pairs import pairwise
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer
from twins import draft, noisy, target

from hf_spec import SpeculationConfig
from hf_spec.decode.loop import Call
from hf_spec.policy.acceptance import FADED_TOGETHER
from hf_spec.scoring import masks
from hf_spec.scoring.buffers import NOWHERE
from hf_spec.scoring.kv_view import KVView
from hf_spec.scoring.runner import ModelRunner

AUTO = SpeculationConfig(num_speculative_tokens="auto")
# Two steps that draft, then plain ones: rows have unequal lengths first, and are aligned where that is possible.
PATTERN = [3, 2, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let calls draft after ``PATTERN``, and list the plain steps of each run."""
    taken: list[int] = []
    one = ModelRunner._score_as_plain

    def counted(runner: ModelRunner, *args: Any) -> Any:
        taken[-1] += 1
        return one(runner, *args)

    def begun(call: Call, *args: Any) -> Any:
        taken.append(0)
        return many(call, *args)

    many = Call._plain_steps
    monkeypatch.setattr(ModelRunner, "_score_as_plain", counted)
    monkeypatch.setattr(Call, "_plain_steps", begun)
    return taken


def call(model: Any, monkeypatch: pytest.MonkeyPatch, rows: int, **options: Any) -> Any:
    steps = iter(PATTERN * 20)
    force_lengths(monkeypatch, lambda rows: next(steps))
    torch.manual_seed(3)
    given = {"max_new_tokens": 30, "return_dict_in_generate": True, "speculation_config": AUTO, **options}
    return model.generate(**prompts(rows), **given)


@pytest.mark.parametrize(
    ("name", "rows", "sample"),
    pairwise(["llama", "gemma2", "gpt2", "deepseek_v2", "falcon", "bloom"], [1, 3], [False, True]),
)
def test_plain_steps_are_those_taken_one_by_one(
    name: str, rows: int, sample: bool, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(name) if name in ("llama", "gemma2", "gpt2") else build(name)
    options = {"do_sample": sample, "speculator": noisy(model), "output_scores": True}
    if rows > 1:
        options |= {"return_dict_in_generate": False, "output_scores": False}  # else rows are not aligned
    found = call(model, monkeypatch, rows, **options)
    entered = list(runs)
    monkeypatch.setattr(ModelRunner, "scores_as_plain", False)
    wanted = call(model, monkeypatch, rows, **options)
    assert runs == entered  # none is taken now
    assert name == "bloom" or max(entered) > 1  # it is given no positions, which our hooks set
    if rows > 1:
        assert torch.equal(found, wanted)
    else:
        assert torch.equal(found.sequences, wanted.sequences)
        for ours, twin in zip(found.scores, wanted.scores, strict=True):
            torch.testing.assert_close(ours, twin)


def test_the_statistics_count_plain_steps(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(target(), monkeypatch, 1, speculator=draft()).speculation
    assert max(runs) > 1
    monkeypatch.setattr(ModelRunner, "scores_as_plain", False)
    wanted = call(target(), monkeypatch, 1, speculator=draft()).speculation
    assert found.steps == wanted.steps and found.counts == wanted.counts
    assert [row.tokens for row in found.per_row] == [row.tokens for row in wanted.per_row]
    assert [row.drafted for row in found.per_row] == [row.drafted for row in wanted.per_row]


class Raising(BaseStreamer):
    """A streamer that fails in the middle of a run."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: torch.Tensor) -> None:
        """Fail after some calls."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("in the middle")

    def end(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("after", [3, 6, 9])
def test_a_run_that_is_interrupted_leaves_what_was_shown(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = target(), []
    for options in ({}, {"speculator": draft(), "speculation_config": AUTO}):
        force_lengths(monkeypatch, lambda rows: 0)
        cache = DynamicCache(config=model.config)
        with pytest.raises(KeyboardInterrupt, match="in the middle"):
            model.generate(**prompts(1), past_key_values=cache, streamer=Raising(after), max_new_tokens=20, **options)
        kept.append(cache)
    assert kept[0].get_seq_length() == kept[1].get_seq_length()
    for ours, plain in zip(kept[1].layers, kept[0].layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys)
    again = [model.generate(**prompts(1), max_new_tokens=5, **options) for options in ({}, {"speculator": draft()})]
    assert torch.equal(*again)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_masks_that_are_kept_between_plain_steps_are_transformers_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows; layers with a window get transformers' masks. A kept mask that shows the padding is noticed."""
    model, kept, used = build(name), masks._kept, []

    def counted(kwargs: dict[str, Any]) -> Any:
        used.append(kept(kwargs) is not None)
        return kept(kwargs)

    def logits() -> Any:
        options = {"speculator": "plain", "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 9}
        return torch.stack(model.generate(**prompts(3), **options).logits)

    monkeypatch.setattr(masks, "_kept", counted)
    found = logits()
    assert used.count(True) >= 7
    monkeypatch.setattr(masks, "_kept", lambda kwargs: None)
    assert torch.equal(found, logits())
    monkeypatch.setattr(masks, "_kept", kept)
    monkeypatch.setattr(KVView, "seen_by_one", lambda view, mask: torch.ones_like(mask[:, None, None]).bool())
    assert not torch.allclose(found, logits())


def test_nothing_of_a_forward_that_failed_is_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[ModelRunner] = []

    def fail(runner: ModelRunner, inputs: Any) -> Any:
        runners.append(runner)
        assert runner.slots.cache.rows.appends_at != NOWHERE and masks._plain.get() is not None
        raise KeyboardInterrupt("in a forward")

    target().generate(**prompts(3), speculator="plain", max_new_tokens=2)  # the target is tried out first
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_forward", fail)
        with pytest.raises(KeyboardInterrupt, match="in a forward"):
            target().generate(**prompts(3), speculator="plain", max_new_tokens=9)
    assert runners[0].slots.cache.rows.appends_at == NOWHERE and masks._plain.get() is None
    plain, ours = (target().generate(**prompts(3), max_new_tokens=9, **more) for more in ({}, {"speculator": "plain"}))
    assert torch.equal(ours, plain)


def test_the_policy_is_asked_once_for_several_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def choose(rows: int) -> int:
        asked.append(rows)
        return 0

    force_lengths(monkeypatch, choose, plain_steps=FADED_TOGETHER)
    out = target().generate(
        **prompts(3), speculator=draft(), speculation_config=AUTO, max_new_tokens=33, return_dict_in_generate=True
    )
    assert out.speculation.steps == 32 and len(asked) == 32 / FADED_TOGETHER
