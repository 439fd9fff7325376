"""What is learned of looked-up chains, guessed or not."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ngram import news

from hf_spec import NgramSpeculator, SpeculationConfig
from hf_spec.drafts.ngram.lookups import Lookups, Records, level_of
from hf_spec.drafts.trust import TrackRecord


def records() -> Records:
    return defaultdict(TrackRecord)


def test_long_matches_are_judged_alike() -> None:
    assert [level_of(agreed) for agreed in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 64)] == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 9]


def test_a_chain_is_judged_once_its_end_is_text() -> None:
    known = records()
    lookups, text = Lookups(known, 1), [1, 2, 3]
    believed = lookups.chances(0, text, (4, 5, 9), agreed=2)
    assert believed == TrackRecord().of(3) and not known[3].of(1)[0] > believed[0]
    assert lookups.chances(0, [*text, 4, 5], (), agreed=0) == []
    assert known[2].of(3) == believed, "its third guess is not known to be wrong yet"
    lookups.chances(0, [*text, 4, 5, 6], (), agreed=0)
    record = TrackRecord()
    record.learn(3, 2)
    assert known[2].of(3) == record.of(3)
    assert known[1].of(3) == believed, "of other matches it says nothing"


@pytest.mark.parametrize("length", [1, 4])
def test_what_nobody_guesses_is_learned_from(length: int) -> None:
    """A match that is always wrong loses its chances, one that is always right gets them, without one guess."""
    known = records()
    lookups, text = Lookups(known, 1), [0]
    for step in range(40):
        right = tuple(step + 1 + place for place in range(length))
        lookups.chances(0, text, right, agreed=5) if step % 2 else lookups.chances(0, text, (-1,) * length, agreed=1)
        text.append(step + 1)
    assert known[1].of(1)[0] < 0.1 and known[5].of(length)[-1] > 0.9


def test_rows_leave_and_join() -> None:
    mine, theirs = Lookups(records(), 2), Lookups(records(), 1)
    mine.chances(0, [1], (2,), agreed=1)
    mine.chances(1, [1], (3,), agreed=1)
    theirs.chances(0, [1], (4,), agreed=1)
    mine.keep_rows([1])
    mine.join(theirs)
    mine.chances(0, [1, 3], (), agreed=0)
    mine.chances(1, [1, 5], (), agreed=0)
    record = TrackRecord()
    record.learn(1, 1)
    record.fade()
    record.learn(1, 0)
    assert mine._records[1].of(1) == record.of(1)


def test_a_row_that_stays_is_judged_by_its_own_lookups() -> None:
    def learned(prompts: list[list[int]], staying: list[int]) -> dict[int, list[float]]:
        ids, speculator = torch.tensor(prompts), NgramSpeculator()
        context: Any = SimpleNamespace(
            input_ids=ids,
            prompts=lambda: [list(prompt) for prompt in prompts],
            config=SpeculationConfig(),
            worth=lambda rows, kind, chances: (len(chances), 1.0),
        )
        drafter = speculator.drafter(context)
        drafter.propose(news([[prompt[0]] for prompt in prompts]), 2)
        drafter.keep_rows(torch.tensor(staying))
        drafter.propose(news([prompts[staying[0]][1:3]]), 2)
        return {level: record.of(2) for level, record in speculator.records.items()}

    mine, other = [2, 3, 4], [1, 7, 8]
    alone = learned([mine], [0])
    assert learned([other, mine], [1]) == alone
    assert alone[1][1] > TrackRecord().of(2)[1], "its guesses came true"
