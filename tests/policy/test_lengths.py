"""The lengths that the policy chooses, in worlds where what a step takes and emits is made up."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import replay
import torch

from hf_spec.decode.draft_length import static_length
from hf_spec.policy import acceptance
from hf_spec.policy.acceptance import AcceptanceEstimator
from hf_spec.policy.adaptive import AdaptiveLength, mean_survival
from hf_spec.policy.base import MAX_LENGTH, DraftPlan, DraftSource, Estimate, StepObservation, better_sources
from hf_spec.policy.cost import ModelShape, ShapeCost, size_class
from hf_spec.policy.fixed import FixedLength
from hf_spec.policy.store import Profile

pytestmark = pytest.mark.clock

MODEL, NGRAM, NONE = DraftSource.MODEL, DraftSource.NGRAM, DraftSource.NONE


def adaptive(profile: Profile, first: int = 5, **options: object) -> AdaptiveLength:
    return AdaptiveLength(profile.cost, profile.acceptance, profile.idle, first, **options)  # type: ignore[arg-type]


def measured(rows: int = 1, **seconds: Callable[[int], float]) -> Profile:
    """Return a profile of plain steps that take 1 and of one to eight draft tokens of each source."""
    profile = Profile()
    for _ in range(2):
        profile.cost.observe(rows, NONE, 0, 1.0)
        for name, taken in seconds.items():
            for length in range(1, 9):
                profile.cost.observe(rows, DraftSource[name], length, taken(length))
    return profile


@dataclass(frozen=True)
class World:
    """Say how often the j-th draft token after an accepted one is accepted, from 0 on, and what a step takes."""

    accept: Callable[[int], float]
    seconds: Callable[[int], float]
    deepest: int = 99  # that the draft ever drafts
    rows: int = 1
    behind: float = 0.0  # seconds of reading the tokens of plain steps before a draft can go on

    def best(self) -> float:
        return max(self.speed(length) for length in range(MAX_LENGTH + 1))

    def speed(self, length: int) -> float:
        tokens, survival = 1.0, 1.0
        for position in range(min(length, self.deepest)):
            survival *= self.accept(position)
            tokens += survival
        return tokens / self.seconds(min(length, self.deepest))


def run(policy: AdaptiveLength, world: World, tokens: int, seed: int = 0) -> float:
    """Decode ``tokens`` tokens per row and return how many each second gave."""
    chance = random.Random(seed)
    emitted, clock, first, late = 0.0, 0.0, True, False
    while emitted < tokens:
        estimate = policy.acceptance.estimate(MODEL, world.rows, MAX_LENGTH)
        length = min(policy.plan(world.rows, [estimate]).length, world.deepest)
        late = late and length > 0
        taken = world.seconds(length) * chance.uniform(0.9, 1.1) + world.behind * late
        accepted = []
        for _ in range(world.rows):
            count = 0
            while count < length and chance.random() < world.accept(count):
                count += 1
            accepted.append(count)
        seconds = None if first or late else taken
        policy.observe(StepObservation(length, seconds, [length] * world.rows, accepted))
        emitted += 1 + sum(accepted) / world.rows
        clock, first, late = clock + taken, False, length == 0
    return emitted / clock


WORLDS = {
    "a wide forward costs nothing": World(lambda j: 0.7, lambda k: 1 + 0.05 * k),
    "the second token costs most": World(lambda j: 0.75, lambda k: (1.0, 1.9)[k > 0] + 0.03 * k),
    "a draft token costs as much as a token": World(lambda j: 0.6, lambda k: 1 + 1.0 * k),
    "a draft that is never right": World(lambda j: 0.0, lambda k: 1 + 0.6 * k),
    "a draft that is always right": World(lambda j: 1.0, lambda k: 1 + 0.1 * k),
    "never right, and slow to begin": World(lambda j: 0.0, lambda k: 1 + 0.6 * k, behind=4.0),
    "only the first token is good": World(lambda j: 0.9 if j == 0 else 0.05, lambda k: 1 + 0.15 * k),
    "three heads": World(lambda j: 0.6, lambda k: 1.1 + 0.02 * k if k else 1.0, deepest=3),
    "a batch of eight": World(lambda j: 0.5, lambda k: 1 + 0.25 * k, rows=8),
    "a batch of sixteen that is full": World(lambda j: 0.6, lambda k: 1 + 0.9 * k, rows=16),
}


@pytest.mark.parametrize("name", WORLDS)
def test_little_slower_than_plain_and_than_the_best_fixed_length(name: str) -> None:
    world, profile = WORLDS[name], Profile()
    run(adaptive(profile), world, 64)  # a process's first tokens
    speeds = [run(adaptive(profile), world, 256, seed) for seed in range(8)]
    speed = sum(speeds) / len(speeds)
    assert speed >= 0.93 * world.speed(0)
    assert speed >= 0.9 * world.best()


def test_a_draft_that_becomes_better_or_worse_is_noticed_within_a_call() -> None:
    for before, after in ((0.0, 0.9), (0.9, 0.0)):
        rates, profile = {"now": before}, Profile()
        world = World(lambda j, rates=rates: rates["now"], lambda k: 1 + 0.3 * k)  # type: ignore[misc]
        run(adaptive(profile), world, 256)
        rates["now"] = after
        late = adaptive(profile)
        run(late, world, 256)
        assert run(late, world, 256) >= 0.88 * world.best()


def test_a_draft_whose_first_steps_were_slow_comes_back() -> None:
    """Steps that follow plain ones read what these left, so that a single retry tells no time."""
    slow, profile = {"now": 4.0}, Profile()
    world = World(lambda j: 0.7, lambda k: (1 + 0.1 * k) * (slow["now"] if k else 1))
    run(adaptive(profile), world, 8)  # the beginning of a process, on a busy machine
    slow["now"] = 1.0
    run(adaptive(profile), world, 8000)
    assert run(adaptive(profile), world, 256) >= 0.75 * world.best()


def test_steps_of_a_draft_that_proposes_nothing_are_no_plain_steps() -> None:
    profile = measured(MODEL=lambda length: 1.1)
    policy, before = adaptive(profile), profile.cost.plain(1)
    for _ in range(8):
        assert policy.plan(1, [Estimate(MODEL, [[0.9, 0.8]])]).length == 2
        policy.observe(StepObservation(0, 5.0, [0], [0]))
    assert profile.cost.plain(1) == before


def test_the_length_is_that_of_most_tokens_a_second() -> None:
    profile = measured(NGRAM=lambda length: 1 + 0.1 * length, MODEL=lambda length: 1 + 0.4 * length)
    for rate in (0.9, 0.3):
        chances = [rate**j for j in range(1, 9)]
        for source, cost in ((NGRAM, 0.1), (MODEL, 0.4)):
            speeds = [(1 + sum(chances[:length])) / (1 + cost * length) for length in range(9)]
            plan = adaptive(profile).plan(1, [Estimate(source, [chances])])
            assert plan.length == speeds.index(max(speeds))
            assert plan.source is (source if plan.length else NONE)
    assert adaptive(profile).plan(1, [Estimate(NGRAM, [[]])]).length == 0


def test_what_hardly_promises_more_than_a_plain_step_is_left() -> None:
    profile = measured(NGRAM=lambda length: 1.0)
    assert adaptive(profile).plan(1, [Estimate(NGRAM, [[0.02]])]).length == 0
    assert adaptive(profile).plan(1, [Estimate(NGRAM, [[0.05]])]).length == 1


def test_ngrams_alone_are_taken_where_they_give_more_tokens_per_second() -> None:
    profile = measured(2, MODEL=lambda length: 3.0, NGRAM=lambda length: 1.0)
    better = [Estimate(MODEL, [[0.9] * 4] * 2), Estimate(NGRAM, [[0.8] * 4, []])]
    for estimates in (better, better[::-1]):
        assert adaptive(profile).plan(2, estimates).sources == (NGRAM, NONE)


def test_a_source_that_is_worth_it_is_used_at_its_best_length_however_long_it_was_idle() -> None:
    profile = measured(MODEL=lambda length: 1.0 + 0.2 * length)
    profile.idle.stepped(1, NONE, 1e6)
    estimate = Estimate(MODEL, [[0.9, 0.8, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01]])
    assert adaptive(profile).plan(1, [estimate]).length == 2


def test_plain_steps_of_one_sequence_are_no_retries_of_those_of_eight() -> None:
    """Rows that end apart leave one at the end of each call, which would count as a retry of all batch sizes."""
    profile = measured(8, MODEL=lambda length: 1.0 + 0.2 * length)
    policy = adaptive(profile)
    for _ in range(300):  # 300 calls: a step of eight rows, and a plain one of the row that is left
        for rows in (8, 1):
            plan = policy.plan(rows, [Estimate(MODEL, [[0.9] * 4 if rows == 8 else []] * rows)])
            length = plan.length
            policy.observe(StepObservation(length, 1.0 + 0.2 * length, [length] * rows, [length] * rows))
    found = profile.cost._samples[size_class(8), NONE][0]
    assert 3 <= len(found) <= 8, "one in 128 units of time"


def test_each_sequence_takes_the_source_that_promises_more() -> None:
    estimates = [Estimate(NGRAM, [[0.9, 0.8], [], [0.2]]), Estimate(MODEL, [[0.5, 0.3]] * 3)]
    assert better_sources(estimates, 3) == (NGRAM, MODEL, MODEL)
    assert better_sources([Estimate(NGRAM, [[]])], 1) == (NONE,)
    assert better_sources([Estimate(NGRAM, [[0.5]]), Estimate(MODEL, [[0.5]])], 1) == (NGRAM,)
    fixed = FixedLength(4, AcceptanceEstimator()).plan(3, estimates)
    assert fixed == DraftPlan(4, (NGRAM, MODEL, MODEL), 4) and fixed.source is MODEL
    cheap = measured(3, NGRAM=lambda length: 1.01, MODEL=lambda length: 1 + 3 * length)
    assert adaptive(cheap).plan(3, estimates).sources == (NGRAM, NONE, NGRAM)
    dear = measured(3, NGRAM=lambda length: 1 + 3 * length, MODEL=lambda length: 1.01)
    assert adaptive(dear).plan(3, estimates).sources == (NGRAM, MODEL, MODEL)
    assert mean_survival([[0.8, 0.6], [], [0.4]]) == pytest.approx([0.4, 0.2])


def test_every_source_is_tried_first_and_again_but_seldom() -> None:
    profile, taken = Profile(), {NONE: 1.0, NGRAM: 1.2, MODEL: 9.0}
    policy, steps = adaptive(profile, 1), []
    for _ in range(4000):
        plan = policy.plan(1, [Estimate(NGRAM, [[0.5]]), Estimate(MODEL, [[0.6]])])
        policy.observe(StepObservation(plan.length, taken[plan.source], [plan.length], [0]))
        steps.append(plan.source)
    assert set(steps[:8]) == set(steps[-2500:]) == {NGRAM, MODEL, NONE}
    seconds = {source: taken[source] * steps.count(source) for source in taken}
    assert seconds[MODEL] + seconds[NONE] < 0.04 * sum(seconds.values())


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (3, 5), (4, 4), (8, 2), (16, 1), (64, 1)])
def test_a_first_try_of_ngrams_is_short_in_a_batch(rows: int, length: int) -> None:
    survival = [[0.9] * 8] * rows
    assert adaptive(Profile()).plan(rows, [Estimate(NGRAM, survival)]).length == length
    assert adaptive(Profile()).plan(rows, [Estimate(MODEL, survival)]).length == 5  # asking it costs more than a token
    assert adaptive(Profile(), lengths=(0, 5)).plan(rows, [Estimate(NGRAM, survival)]).length == 5  # there is a graph


@pytest.mark.parametrize(("rate", "kept"), [(0.95, 4), (0.05, 0)])
def test_after_a_short_try_ngrams_grow_or_end(rate: float, kept: int) -> None:
    policy, lengths = adaptive(Profile()), []
    for _ in range(40):
        length = policy.plan(8, [Estimate(NGRAM, [[rate**j for j in range(1, 9)]] * 8)]).length
        policy.observe(StepObservation(length, 1 + 0.2 * length, [length] * 8, [length // 2] * 8))
        lengths.append(length)
    assert lengths[0] == 2 and (min(lengths[5:]) >= kept if kept else max(lengths[5:]) == 0)


def test_a_step_that_did_other_work_warms_up_as_well() -> None:
    profile = Profile()
    for seconds in (None, 3.0):
        profile.cost.observe(1, MODEL, 2, seconds)
    assert profile.cost.curve(1, MODEL)[2] == 3.0


def test_steps_that_did_other_work_teach_no_times() -> None:
    profile = Profile()
    for _ in range(4):
        policy = adaptive(profile)
        policy.plan(1, [Estimate(MODEL, [[0.5]])])
        policy.observe(StepObservation(1, None, [1], [1]))
    assert list(profile.cost.curve(1, MODEL)) == [] and profile.acceptance.survival(MODEL, 1)[0] > 0.85


def test_sources_learn_from_their_own_sequences() -> None:
    profile = measured(3, NGRAM=lambda length: 1 + 3 * length, MODEL=lambda length: 1.01)
    policy = adaptive(profile)
    policy.plan(3, [Estimate(NGRAM, [[0.9, 0.8], [], []]), Estimate(MODEL, [[0.5, 0.3]] * 3)])
    unknown = AcceptanceEstimator().survival(MODEL, 2)
    policy.observe(StepObservation(2, 1.0, [2, 2, 2], [0, 2, 2]))
    assert profile.acceptance.survival(NGRAM, 1) < unknown < profile.acceptance.survival(MODEL, 2)


@pytest.mark.parametrize("cost", [0.05, 5.0], ids=["cheap", "dear"])
def test_compiled_steps_have_two_lengths(cost: float) -> None:
    policy, chosen = adaptive(Profile(), lengths=(0, 5)), []
    for room in [5] * 195 + [4, 3, 2, 1, 5]:
        length = policy.plan(1, [policy.acceptance.estimate(MODEL, 1, room)]).length
        chosen.append(length)
        policy.observe(StepObservation(length, 1 + cost * length, [length], [length // 2]))
    assert set(chosen[:194]) == {0, 5} and chosen[:195].count(5 if cost < 1 else 0) > 150
    assert policy.longest == 5


@pytest.mark.parametrize(("cost", "length"), [("flat", 5), ("steep", 1), ("in between", 3)])
def test_compiled_batches_draft_as_much_as_wide_forwards_allow(cost: str, length: int) -> None:
    known: dict[int, int] = {}
    costs = {
        "flat": lambda width: 1.0,
        "steep": lambda width: width / 8,
        "in between": lambda width: 1 + (width - 8) / 40,
    }
    asked: list[list[int]] = []

    def costs_of(widths: list[int]) -> list[float]:
        asked.append(widths)
        return [costs[cost](width) for width in widths]

    new = AcceptanceEstimator()
    assert static_length(known, new, 8, 5, lambda: 0.05, costs_of) == pytest.approx(length, abs=1)  # type: ignore[arg-type]
    once = static_length(known, new, 6, 5, lambda: 0.05, costs_of)  # type: ignore[arg-type]
    assert once == known[3] and asked == [[8, 16, 24, 32, 40, 48]]
    assert static_length(known, new, 8, 1, lambda: 0.05, costs_of) == 1  # type: ignore[arg-type]
    assert static_length(known, new, 1, 5, lambda: 0.05, costs_of) == 5 and len(asked) == 1  # type: ignore[arg-type]
    assert static_length({}, new, 4, 5, lambda: 0.05, lambda widths: None) == 5


# --- Token by token --------------------------------------------------------------------------------------------------


def early(seconds: Callable[[int], float], rows: int = 1, known: bool = True) -> AdaptiveLength:
    profile = measured(rows, MODEL=seconds) if known else Profile()
    policy = adaptive(profile, stops_early=True)
    policy.plan(rows, [Estimate(MODEL, [[0.9] * 8] * rows)])
    return policy


def test_chains_end_where_another_token_is_not_worth_it() -> None:
    policy = early(lambda length: 1 + 0.2 * length)
    assert policy.planned == 8  # and ended token by token
    assert policy.keep_drafting(torch.tensor([0.95]))
    assert not policy.keep_drafting(torch.tensor([0.1]))
    of_two = early(lambda length: 1 + 0.2 * length, rows=2)
    assert of_two.keep_drafting(torch.tensor([0.99, 0.3]))  # on average
    assert early(lambda length: 9.0, known=False).planned == 5  # what was not measured is tried as long as is usual


def test_nan_ends_the_chain_and_not_the_call() -> None:
    policy = early(lambda length: 1 + 0.2 * length)
    assert not policy.keep_drafting(torch.tensor([math.nan]))
    policy.observe(StepObservation(1, 1.0, [1], [1]))
    assert policy.acceptance.calibration[MODEL](0.99) == 0.99


def test_confidence_teaches_up_to_the_first_rejected_token() -> None:
    policy = early(lambda length: 1 + 0.02 * length, rows=2)
    for _ in range(3):
        policy.keep_drafting(torch.tensor([0.9, 0.3]))
    policy.observe(StepObservation(4, 1.0, [4, 4], [4, 0]))
    trust = policy.acceptance.calibration[MODEL]
    assert trust(0.9) > 0.9 and trust(0.3) == pytest.approx(0.3 * 1.5 / 1.8)  # one of the second row, not three


# --- Without a clock -------------------------------------------------------------------------------------------------


def by_shapes(draft_layers: int = 1, layers: int = 10) -> AdaptiveLength:
    big, small = ModelShape(layers + 1, 2_500_000), ModelShape(draft_layers + 1, 900_000)
    cost = ShapeCost(big, lambda length: [small] * length, lambda length: length, False, False)
    profile = Profile()
    return AdaptiveLength(cost, AcceptanceEstimator(), profile.idle, 5)


def test_the_time_of_a_draft_token_by_shapes() -> None:
    big, small = ModelShape(0, 100), ModelShape(0, 10)
    one_by_one = ShapeCost(big, lambda length: [small] * length, lambda length: length, False, False)
    in_a_block = ShapeCost(big, lambda length: [small], lambda length: length, False, False)
    assert one_by_one.draft_token(1, 5) == pytest.approx(0.1)
    assert in_a_block.draft_token(1, 5) == pytest.approx(0.02)


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, False), (0.9, True)])
def test_by_shapes_bad_drafts_are_soon_left_and_good_ones_kept(rate: float, drafts: bool) -> None:
    """96 tokens of the demo target: a random draft may cost a tenth at most."""
    world = World(lambda j: rate, lambda k: by_shapes().cost.curve(1, MODEL)[k] / by_shapes().cost.plain(1))
    speeds = [run(by_shapes(), world, 96, seed) for seed in range(5)]
    assert min(speeds) >= (1.3 if drafts else 0.87)


def test_by_shapes_the_clock_changes_nothing() -> None:
    lengths = []
    for seconds in (1.0, 50.0):
        policy, chance = by_shapes(), random.Random(1)
        for _ in range(60):
            length = policy.plan(1, [policy.acceptance.estimate(MODEL, 1, 8)]).length
            lengths.append(length)
            policy.observe(StepObservation(length, seconds * chance.random() ** 0, [length], [length // 2]))
    assert lengths[:60] == lengths[60:] and len(set(lengths)) > 1


# --- Recorded answers ------------------------------------------------------------------------------------------------

# Times plain with the policy before this one (Pace and Worth), same answers, times and noise.
BEFORE = {
    ("draft model", "AMD, float32"): 1.266,
    ("draft model", "bfloat16"): 1.562,
    ("n-grams", "AMD, float32"): 1.513,
}


@pytest.mark.parametrize(("kind", "machine"), BEFORE)
def test_recorded_answers_take_no_longer_than_before(kind: str, machine: str) -> None:
    found = replay.took(kind, machine, passes=3)
    assert replay.speed(found) > 0.97 * BEFORE[kind, machine]
    assert all(taken < in_plain / 0.93 for taken, in_plain in found.values())


@pytest.mark.parametrize(("rule", "rows", "gain"), [("match length", 1, 1.02), ("slowest row", 8, 1.04)])
def test_rules_that_are_left_out_are_missed(rule: str, rows: int, gain: float) -> None:
    base = replay.speed(replay.took("n-grams", "Intel, float32", 2, rows))
    with replay.without(rule):
        assert replay.speed(replay.took("n-grams", "Intel, float32", 2, rows)) < base / gain
    assert replay.speed(replay.took("n-grams", "Intel, float32", 2, rows)) == base


@pytest.mark.parametrize(("kind", "least"), [("n-grams", 0.94), ("draft model", 1.0)])
@pytest.mark.parametrize("machine", ["AMD, float32", "bfloat16"])
def test_batches_that_end_with_their_slowest_row_lose_little(kind: str, least: float, machine: str) -> None:
    assert replay.speed(replay.took(kind, machine, passes=3, rows=8)) > least


def test_without_decay_nothing_fades() -> None:
    with replay.without("decay"):
        assert {one for name, one in vars(acceptance).items() if name.endswith("DECAY")} == {1.0}


def test_all_lengths_are_told() -> None:
    policy = adaptive(measured())
    for length, count in {0: 50, 1: 20, 2: 10, 3: 4, 4: 9, 5: 7}.items():
        policy._chosen[length] = count
    told = "none in 50%, 1 in 20%, 2 in 10%, 4 in 9%, others in 11% of 100 steps, by measured time"
    assert str(policy) == told
    policy._chosen = Counter({3: 1})
    assert str(policy) == "3 in 100% of 1 step, by measured time"
