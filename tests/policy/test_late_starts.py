"""Drafters that begin to guess late in a call, when rows have ended and text went by that they have not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import prompts
from lengths import force_lengths
from torch import Tensor
from twins import target

from hf_spec import AcceptedTokens, Drafter, Proposal, Speculator
from hf_spec.drafts.lazy import LazyDrafter
from hf_spec.policy.acceptance import AcceptanceEstimator
from hf_spec.policy.adaptive import AdaptiveLength
from hf_spec.policy.base import DraftPlan, DraftSource, StepObservation
from hf_spec.policy.fixed import FixedLength

ROWS = 6


class Following(Speculator):
    """Find the text of each row among ``texts`` (rows, length), which begin at ``starts``, and guess how it goes on.

    A row that was told another's prompt, or not all of its own text, is in none of them: that is an error. ``pays`` is
    told how many tokens a row reads at once.
    """

    def __init__(self, texts: Tensor, starts: list[int], pays: Callable[[int], None] = lambda read: None) -> None:
        self.texts = [row[start:] for row, start in zip(texts.tolist(), starts, strict=True)]
        self.pays = pays

    def drafter(self, request: Any) -> Drafter:
        return _FollowingDrafter(self, request.prompts())


class _FollowingDrafter(Drafter):
    def __init__(self, following: Following, prompts: list[list[int]]) -> None:
        self._following, self._rows = following, prompts

    def propose(self, news: Any, limit: int) -> Proposal:
        for row, tokens in zip(self._rows, news.emitted, strict=True):
            row += tokens
        self._following.pays(news.tokens.shape[1])
        guesses = [self._next(row, min(limit, 4)) for row in self._rows]
        return Proposal.chain(news.root, torch.tensor(guesses).view(len(guesses), -1))

    def _next(self, row: list[int], depth: int) -> list[int]:
        (text,) = [text for text in self._following.texts if text[: len(row)] == row]
        return [*text[len(row) :], *[0] * depth][:depth]

    def keep_rows(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]


def test_a_drafter_that_starts_late_knows_whose_text_is_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at several times before it starts, and others after that."""
    inputs = prompts(ROWS, (13, 9, 5))
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    options = {"max_new_tokens": 28, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = target().generate(**inputs, **options)

    said = texts[:, 13:]

    def end_of(row: int, first: int) -> int:  # a token that no other row says
        others = set(torch.cat([said[:row], said[row + 1 :]]).flatten().tolist())
        return next(token for token in said[row, first:].tolist() if token not in others)

    options["eos_token_id"] = [end_of(row, 4 * number) for number, row in enumerate((0, 1, 3, 4))]
    plain = target().generate(**inputs, **options)
    for most in (ROWS - 1, ROWS - 2, ROWS - 3):
        force_lengths(monkeypatch, lambda rows, most=most: 4 if rows <= most else 0)
        out = target().generate(**inputs, **options, speculator=Following(texts, starts), return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        guessing = [row for row in out.speculation.per_row if row.proposed]
        assert 0 < len(guessing) <= most and sum(row.accepted for row in guessing) > 20


def test_a_step_in_which_a_drafter_catches_up_is_no_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads there what became text in plain steps, too, which takes longer than a guess does."""
    inputs = prompts(1)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = target().generate(**inputs, **options)
    depths, read, usual = iter([0, 0, 3, 3, 0, 3, 0, 0, 3, 3] + 20 * [0]), [], []
    observe = AdaptiveLength.observe

    def noted(policy: AdaptiveLength, step: StepObservation) -> None:
        usual.append(step.seconds is not None)
        observe(policy, step)

    force_lengths(monkeypatch, lambda rows: next(depths))
    monkeypatch.setattr(AdaptiveLength, "observe", noted)
    following = Following(texts, [0], lambda tokens: read.append((len(usual), tokens)))
    assert torch.equal(target().generate(**inputs, **options, speculator=following), texts)
    steps = [step for step, _ in read]
    assert steps == [2, 3, 5, 8, 9]  # it is asked in no other
    assert [step for step in steps if usual[step]] == [3, 9]
    assert dict(read)[3] == dict(read)[9] == 4


class _EndedByConfidence(FixedLength):
    """A plan whose chains may get longer than is expected."""

    def plan(self, batch_size: int, estimates: Any) -> DraftPlan:
        return DraftPlan(1, (DraftSource.MODEL,) * batch_size, model_length=4)


def test_a_draft_model_may_draft_more_than_is_expected_where_its_confidence_ends_chains() -> None:
    asked = []

    class Recording(Drafter):
        def propose(self, accepted: Any, limit: int) -> Proposal:
            asked.append(limit)
            return Proposal.nothing(accepted.root)

        def keep_rows(self, rows: Tensor) -> None:
            raise NotImplementedError

    drafter = LazyDrafter(Recording, _EndedByConfidence(9, AcceptanceEstimator(), ""))
    drafter.propose(AcceptedTokens(torch.ones(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long)), 9)
    assert asked == [4]
