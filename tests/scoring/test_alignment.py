"""Rows of different lengths are aligned between ordinary steps: moved to one end, with the same text as ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from architectures import CORE, build, names, prompts
from lengths import force_lengths
from pairs import each_value
from test_exactness import MISREADS_PADDING
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import NgramSpeculator
from hf_spec.scoring.kv_view import KVView

NEW_TOKENS = 24
LENGTHS = (13, 9, 5, 12, 3, 7, 13, 2)
DEPTHS = (3, 3, 0, 0, 0, 4, 0, 0)  # of the steps, again and again
NEVER_ALIGNED = ("bloom", "mpt", "bart", "deepseek_v32")  # columns are positions there, or an indexer has its own


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Guess and rest in turns, and list by how much rows were moved."""
    seen: list[Tensor] = []
    align = KVView.align

    def noted(slots: KVView) -> Tensor:
        seen.append(align(slots))
        return seen[-1]

    depths = itertools.cycle(DEPTHS)
    force_lengths(monkeypatch, lambda rows: next(depths))
    monkeypatch.setattr(KVView, "align", noted)
    return seen


def texts(model: PreTrainedModel, batch: int, **options: Any) -> tuple[Any, Any]:
    """Return plain text, and that of guesses which are wrong now and then."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | prompts(batch, LENGTHS) | options
    plain = model.generate(**options, speculator=False)
    flawed = getattr(plain, "sequences", plain).clone()
    for row, ids in enumerate(flawed):
        ids[row % 3 :: 5] = (ids[row % 3 :: 5] + 1) % 99
    return plain, model.generate(**options, speculator=NgramSpeculator(corpus=flawed.tolist()))


@pytest.mark.parametrize(("name", "batch"), each_value(CORE, [3, 8]))
def test_text_is_the_same(name: str, batch: int, shifts: list[Tensor]) -> None:
    plain, text = texts(build(name), batch)
    assert torch.equal(text, plain)
    assert any(shift.any() for shift in shifts) == (name not in NEVER_ALIGNED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*names("all")} - {*CORE, *MISREADS_PADDING}))
def test_text_is_the_same_on_every_architecture(name: str, shifts: list[Tensor]) -> None:
    try:
        plain, text = texts(build(name), 8)
    except ValueError as refused:
        if "speculator" not in str(refused):
            raise
        return
    assert torch.equal(text, plain)


def test_rows_that_are_not_padded(shifts: list[Tensor]) -> None:
    plain, text = texts(build("llama"), 5, **prompts(5, (9,)))
    assert torch.equal(text, plain)
    assert any(shift.any() for shift in shifts)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_position_lies_behind_the_last_one(name: str, shifts: list[Tensor]) -> None:
    """Rows that lag behind have nodes that only pad them: those share the last position that a text may reach."""
    model = build(name, max_position_embeddings=13 + NEW_TOKENS)
    plain, text = texts(model, 8)
    assert torch.equal(text, plain)
    assert any(shift.any() for shift in shifts)


def test_rows_that_end_leave_aligned_ones_behind(shifts: list[Tensor]) -> None:
    model = build("llama")
    plain = texts(model, 8)[0]
    ends = plain[:, 13 + 6 :: 5].flatten().unique().tolist()[:3]
    plain, text = texts(model, 8, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(text, plain)
    assert any(shift.any() for shift in shifts)


def test_caches_that_are_handed_back_stay_as_they_are(shifts: list[Tensor]) -> None:
    model = build("llama")
    plain, text = texts(model, 3, return_dict_in_generate=True)
    assert torch.equal(text.sequences, plain.sequences)
    for ours, theirs in zip(text.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
    assert not shifts


def test_positions_that_do_not_follow_are_caught(shifts: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: rows that are moved, but not told so, write other text."""
    align = KVView.align
    monkeypatch.setattr(KVView, "align", lambda slots: torch.zeros_like(align(slots)))
    plain, text = texts(build("llama"), 8)
    assert not torch.equal(text, plain)
