"""Acceptance rates and step times: what the policy knows."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict

import pytest
import replay
from twins import draft, noisy, target

from hf_spec.drafts.ngram.lookups import Lookups
from hf_spec.policy.acceptance import (
    DECAY,
    LEAVING,
    PRIOR_ACCEPTANCE,
    PRIOR_STEPS,
    AcceptanceEstimator,
    Calibration,
    Lag,
    PositionCounts,
    match_class,
    num_accepted,
)
from hf_spec.policy.base import MAX_LENGTH, DraftSource
from hf_spec.policy.cost import SCORE, SECOND_TOKEN, MeasuredCost, ModelShape, ShapeCost, size_class
from hf_spec.policy.store import profile_of, prompt_class

MODEL, NGRAM, NONE = DraftSource.MODEL, DraftSource.NGRAM, DraftSource.NONE


def measured(times: dict[int, float], source: DraftSource = MODEL, steps: int = 3) -> MeasuredCost:
    cost = MeasuredCost()
    for length, seconds in times.items():
        for _ in range(steps):
            cost.observe(1, source if length else NONE, length, seconds)
    return cost


# --- Acceptance ------------------------------------------------------------------------------------------------------


def test_acceptance_is_counted_by_position_and_begins_with_the_prior() -> None:
    known = AcceptanceEstimator()
    assert known.survival(MODEL, 3) == pytest.approx([PRIOR_ACCEPTANCE**j for j in (1, 2, 3)])
    known.record(MODEL, [3], [2])
    first = (1 + PRIOR_STEPS * PRIOR_ACCEPTANCE) / (1 + PRIOR_STEPS)
    assert known.survival(MODEL, 1) == pytest.approx([first])
    for _ in range(300):
        known.record(MODEL, [3], [2])
    assert known.survival(MODEL, 3) == pytest.approx([1, 1, 0], abs=0.05)
    assert known.survival(NGRAM, 3) == AcceptanceEstimator().survival(MODEL, 3)


def test_the_prior_of_a_match_grows_with_its_length() -> None:
    """Each token that is accepted makes a match longer: after 1, 2, 3, ... equal tokens 1/3, 2/4, 3/5, ... go on."""
    known = AcceptanceEstimator()
    assert known.survival(NGRAM, 3, agreed=1) == pytest.approx([1 / 3, 1 / 3 * 2 / 4, 1 / 3 * 2 / 4 * 3 / 5])
    firsts = [known.survival(NGRAM, 1, agreed=agreed)[0] for agreed in (1, 2, 3, 4, 6, 12, 24, 48)]
    assert firsts == sorted(firsts) and firsts[-1] > 0.9
    for agreed in (5, 7):
        assert known.survival(NGRAM, 4, agreed=agreed) == known.survival(NGRAM, 4, agreed=6)
    known.record(NGRAM, [2], [0], agreed=7)
    assert known.survival(NGRAM, 1, agreed=5) == pytest.approx([PRIOR_STEPS * 6 / 8 / (1 + PRIOR_STEPS)])
    assert known.survival(NGRAM, 1, agreed=4) == pytest.approx([4 / 6])


def test_the_prior_of_a_match_is_what_real_answers_show() -> None:
    """Of all places in the recorded answers, by match length: the first token, and the second after the first."""
    found = defaultdict(list)
    for number, answer in enumerate(replay.ANSWERS):
        for done, (chain, agreed) in replay.looked_up(number).items():
            if chain:
                found[match_class(agreed)].append((num_accepted(chain, answer["ids"][done:]), agreed))
    known = AcceptanceEstimator()
    for match, places in found.items():
        first, second = (sum(right > position for right, _ in places) for position in (0, 1))
        expected = known.survival(NGRAM, 2, agreed=places[0][1])
        assert first / len(places) == pytest.approx(expected[0], abs=0.17), match
        assert second / first == pytest.approx(expected[1] / expected[0], abs=0.17), match


def test_a_shorter_draft_counts_as_rejected_beyond_its_end() -> None:
    counts = PositionCounts()
    for _ in range(200):
        counts.record([4, 0, 0, 0], [4, 0, 0, 0])
    assert sum(counts.survival(4)) == pytest.approx(1.0, abs=0.05)  # four of one sequence, none of the others


def test_what_was_worked_out_is_worked_out_again_after_a_record() -> None:
    counts = PositionCounts()
    before = counts.survival(2)
    counts.record([2], [0])
    assert counts.survival(2) != before


def test_steps_without_a_source_let_its_past_fade() -> None:
    known = AcceptanceEstimator()
    for _ in range(50):
        known.record(MODEL, [2], [0])
    worst = known.survival(MODEL, 1)[0]
    for _ in range(800):
        known.record(MODEL, [], [])
    assert worst < 0.1 and known.survival(MODEL, 1)[0] > 0.75


def test_a_step_that_taught_nothing_fades_less_than_one_that_did() -> None:
    known = AcceptanceEstimator()
    known.record(MODEL, [1], [0])
    for _ in range(30):
        known.record(MODEL, [], [])
    left = DECAY**20  # two thirds as many
    assert known.survival(MODEL, 1) == pytest.approx([PRIOR_STEPS * PRIOR_ACCEPTANCE / (left + PRIOR_STEPS)])


def test_a_call_begins_with_a_hint_of_earlier_ones_in_averages_alone() -> None:
    known = AcceptanceEstimator()
    for _ in range(50):
        known.record(MODEL, [2], [0])
        known.record(NGRAM, [2], [0], agreed=3)
    by_match = known.survival(NGRAM, 1, agreed=3)
    known.begin_call(1)
    half = PRIOR_ACCEPTANCE / 2
    assert known.survival(MODEL, 1) == pytest.approx([half])
    assert known.survival(NGRAM, 1, agreed=3) == by_match
    known.begin_call(8)  # as it was: at most
    assert known.survival(MODEL, 1) == pytest.approx([half])


def test_no_draft_token_is_likelier_than_those_before_it() -> None:
    counts = PositionCounts()
    counts.record([1], [0])
    found = counts.survival(5)
    assert found == sorted(found, reverse=True) and found[1] < found[0]
    counts.record([4], [4])  # all that reached the second position were accepted there, and one in two at the first
    found = counts.survival(4)
    assert found == sorted(found, reverse=True)


def test_confidence_is_calibrated_by_what_was_accepted() -> None:
    trust, chance = Calibration(), random.Random(0)
    assert [trust(one) for one in (0.9, 0.5, 0.2, 1.0, 0.0)] == pytest.approx([0.9, 0.5, 0.2, 1.0, 0.0])
    for _ in range(600):
        trust.record(0.9, chance.random() < 0.45)
        trust.record(0.3, True)
    assert trust(0.9) == pytest.approx(0.45, abs=0.15) and trust(0.3) > 0.8
    assert trust(0.6) == 0.6  # of which nothing is known
    assert trust(0.37) == 1.0


def test_lookups_are_learned_from_by_match_length_whether_drafted_or_not() -> None:
    known = AcceptanceEstimator()
    lookups, text = Lookups(known, 1), [1, 2, 3]
    unknown = lookups.survival(0, text, (4, 5, 9), agreed=2)
    assert lookups.survival(0, [*text, 4, 5], (), agreed=0) == []
    assert known.survival(NGRAM, 3, agreed=2) == unknown, "its third token is not known to be wrong yet"
    lookups.survival(0, [*text, 4, 5, 6], (), agreed=0)
    expected, others = AcceptanceEstimator(), known.survival(NGRAM, 3, agreed=1)
    expected.record(NGRAM, [3], [2], agreed=2)
    assert known.survival(NGRAM, 3, agreed=2) == expected.survival(NGRAM, 3, agreed=2)
    assert others == AcceptanceEstimator().survival(NGRAM, 3, agreed=1), "of other matches it says nothing"


def test_a_lookup_that_is_wrong_is_learned_from_at_once() -> None:
    known = AcceptanceEstimator()
    lookups, text = Lookups(known, 1), [1, 2, 3]
    lookups.survival(0, text, tuple(range(4, 20)), agreed=2)
    lookups.survival(0, [*text, 9], tuple(range(10, 26)), agreed=3)
    expected = AcceptanceEstimator()
    expected.record(NGRAM, [16], [0], agreed=2)
    assert known.survival(NGRAM, 16, agreed=2) == expected.survival(NGRAM, 16, agreed=2)
    for end in range(11, 26):  # the second goes on being right
        assert lookups.survival(0, [*text, 9, *range(10, end)], (), agreed=0) == []
        assert known.survival(NGRAM, 16, agreed=3) == AcceptanceEstimator().survival(NGRAM, 16, agreed=3)
    lookups.survival(0, [*text, 9, *range(10, 26)], (), agreed=0)
    expected.record(NGRAM, [16], [16], agreed=3)
    assert known.survival(NGRAM, 16, agreed=3) == expected.survival(NGRAM, 16, agreed=3)


# --- The slowest row -------------------------------------------------------------------------------------------------


def test_a_batch_whose_rows_accept_alike_gains_all_of_it() -> None:
    lag = Lag()
    assert lag.share() == 1.0
    for _ in range(50):
        lag.record([2, 2, 2])
    assert lag.share() == 1.0


def test_what_one_row_alone_accepts_makes_the_call_shorter_only_by_its_leaving() -> None:
    lag = Lag()
    for _ in range(300):
        lag.record([0, 3, 0, 0])
    assert lag.share() == pytest.approx(LEAVING, abs=0.05)
    for _ in range(300):
        lag.record([3, 0, 3, 3])
    assert lag.share() > 0.9, "it was behind, and has caught up"


def test_a_call_of_another_thread_may_begin_while_a_step_is_counted() -> None:
    """Both share what batches of their size have gained."""
    lag = Lag()

    class Rows(list[int]):
        def __len__(self) -> int:
            known = super().__len__()
            if lag._accepted and len(lag._accepted) == known:
                lag.begin_call()
                lag.record([1])
            return known

    for _ in range(3):
        lag.record([1, 2, 3])
    lag.record(Rows([1, 2, 3]))
    assert 0 < lag.share() < 1


def test_rows_that_leave_and_earlier_calls_are_remembered() -> None:
    lag, other = Lag(), Lag()
    for _ in range(20):
        lag.record([0, 1, 2])
    before = lag.share()
    lag.record([0, 0])
    assert lag.share() == before
    for _ in range(20):
        lag.record([1, 1])
    assert before < lag.share() < 1.0
    lag.begin_call()
    weight = other.share() - lag.share()
    assert 0 < weight < 1 - before, "as much as the prior, at most"
    lag.begin_call()
    assert other.share() - lag.share() == pytest.approx(weight)


# --- Step times ------------------------------------------------------------------------------------------------------


def test_the_first_step_of_a_kind_warms_up_and_the_median_of_the_others_counts() -> None:
    cost = MeasuredCost()
    cost.observe(1, NONE, 0, 100.0)
    assert cost.plain(1) == 0.0
    for seconds in (1.0, 3.0):
        cost.observe(1, NONE, 0, seconds)
    assert cost.plain(1) == 2.0 and cost.plain(2) == 0.0
    assert cost.observe(1, NONE, 0, None) == 0.0 and cost.plain(1) == 2.0
    for seconds in [1.0] * 32 + [9.0] * 12:  # a machine that is busy for a while
        cost.observe(1, NONE, 0, seconds)
    assert cost.plain(1) == 1.0


def test_times_between_and_beyond_measured_lengths_lie_on_a_line() -> None:
    cost = measured({0: 1.0, 2: 2.0, 4: 3.0})
    assert cost.curve(1, MODEL) == pytest.approx([1 + length / 2 for length in range(MAX_LENGTH + 1)])
    assert list(cost.curve(1, NGRAM)) == [] == list(cost.curve(2, MODEL))
    assert cost.usual(1, MODEL) == 4 and cost.usual(1, NGRAM) == 0


def test_no_length_is_expected_to_take_less_than_a_shorter_one() -> None:
    curve = measured({0: 1.0, 4: 2.0, 6: 1.5}).curve(1, MODEL)
    assert list(curve[7:]) == sorted(curve[7:]) and curve[16] >= curve[7] > 1.0


def test_what_was_measured_is_believed_and_less_is_expected_to_take_no_longer() -> None:
    curve = measured({0: 1.0, 4: 1.7, 16: 1.8}).curve(1, MODEL)
    assert (curve[4], curve[16]) == (1.7, 1.8)
    assert curve[2] == pytest.approx(1.1)  # between a plain step and the second draft that was measured
    assert min(measured({0: 2.0, 5: 1.0}).curve(1, MODEL)) > 0


def test_a_curve_may_be_dropped_while_another_thread_reads_it() -> None:
    class Dropping(dict[tuple[int, DraftSource], list[float]]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()  # by another thread, which has measured a step just now
            return found

    cost = measured({0: 1.0, 4: 5.0})
    curve = list(cost.curve(1, MODEL))
    cost._curves = Dropping(cost._curves)
    assert cost.curve(1, MODEL) == curve


def test_a_new_time_changes_the_curve_of_its_batch_size() -> None:
    cost = measured({0: 1.0, 4: 5.0})
    before = cost.curve(1, MODEL)[2]
    for _ in range(9):
        cost.observe(1, MODEL, 2, 9.0)
    assert cost.curve(1, MODEL)[2] == 9.0 != before
    assert [size_class(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_shapes_say_the_same_everywhere_and_dearer_work_is_dearer() -> None:
    def cost(accelerator: bool = False, half: bool = False, packed: bool = False) -> ShapeCost:
        big, small = ModelShape(10, 10**8), ModelShape(2, 10**7)
        return ShapeCost(big, lambda length: [small] * length, lambda length: length, accelerator, half, packed)

    cpu = cost()
    assert cpu.curve(1, MODEL)[0] == cpu.plain(1) == pytest.approx(10 * 500_000 + 10**8)
    assert list(cpu.curve(1, MODEL)) == sorted(cpu.curve(1, MODEL))
    assert cpu.curve(1, MODEL)[3] - cpu.curve(1, NGRAM)[3] == pytest.approx(3 * (2 * 500_000 + 10**7) + 1.5 * 500_000)
    assert cost(half=True).curve(1, NGRAM)[1] / cost(half=True).plain(1) < cpu.curve(1, NGRAM)[1] / cpu.plain(1)
    assert cost(packed=True).plain(1) == cpu.plain(1)
    assert cpu.curve(1, NGRAM)[1] - cost(packed=True).curve(1, NGRAM)[1] == pytest.approx(SECOND_TOKEN * 10**8)
    assert cost(accelerator=True).curve(1, NGRAM)[5] / cost(accelerator=True).plain(1) < 1.11
    assert cpu.observe(1, MODEL, 2, 123.0) == cpu.observe(1, MODEL, 2, None) == cpu.curve(1, MODEL)[2]
    assert cpu.plain(8) > cpu.plain(2) > cpu.plain(1)


def test_each_distribution_that_is_sampled_from_takes_time() -> None:
    def cost(scores: int) -> ShapeCost:
        big, small = ModelShape(10, 10**8), ModelShape(2, 10**7)
        return ShapeCost(big, lambda length: [small] * length, lambda length: length, False, False, False, scores)

    greedy, sampled = cost(0), cost(1000)
    for rows, source, distributions in ((1, NGRAM, 4), (8, NGRAM, 32), (1, MODEL, 7), (8, MODEL, 56)):
        more = sampled.curve(rows, source)[3] - greedy.curve(rows, source)[3]
        assert more == pytest.approx(distributions * 1000 * SCORE)
        assert sampled.plain(rows) - greedy.plain(rows) == pytest.approx(rows * 1000 * SCORE)
        assert sampled.curve(rows, source)[0] == sampled.plain(rows)


# --- Profiles --------------------------------------------------------------------------------------------------------


def test_prompts_that_take_longer_have_profiles_of_their_own() -> None:
    lengths = (0, 1, 512, 513, 2048, 2049, 8192, 8193)
    assert [prompt_class(length) for length in lengths] == [0, 0, 0, 1, 1, 2, 2, 3]


def test_what_was_found_of_a_draft_goes_with_it() -> None:
    """A draft may come to stand where another one stood in memory."""
    model, small = target(), noisy(target())
    known = weakref.ref(profile_of(model, small, "a"))
    assert known() is profile_of(model, small, "a")
    assert known() is not profile_of(model, small, "b") and known() is not profile_of(model, None, "a")
    assert profile_of(model, draft(), "a") is not known()
    del small
    gc.collect()
    assert known() is None
