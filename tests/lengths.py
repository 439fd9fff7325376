"""Draft lengths that a test chooses instead of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hf_spec.policy.adaptive import AdaptiveLength
from hf_spec.policy.base import DraftLengthPolicy, DraftPlan, Estimate
from hf_spec.policy.fixed import UNBOUNDED, FixedLength


def force_lengths(monkeypatch: pytest.MonkeyPatch, choose: Callable[[int], int], plain_steps: int = 1) -> None:
    """Let every step draft as many tokens as ``choose`` says for its number of rows.

    It is asked again after ``plain_steps`` steps for which it said 0.
    """
    fixed = FixedLength.plan

    def chosen(policy: DraftLengthPolicy, rows: int, estimates: Sequence[Estimate]) -> DraftPlan:
        length = choose(rows)
        sources = tuple(one.source for one in estimates[:1]) * rows
        policy._last = DraftPlan(length, sources, length, plain_steps=plain_steps)
        return policy._last

    def plan(policy: FixedLength, rows: int, estimates: Sequence[Estimate]) -> DraftPlan:
        return (fixed if policy.length == UNBOUNDED else chosen)(policy, rows, estimates)

    monkeypatch.setattr(AdaptiveLength, "_choose", chosen)
    monkeypatch.setattr(FixedLength, "plan", plan)
