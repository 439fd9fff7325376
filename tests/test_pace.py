"""Depths chosen by the clock: in worlds where what a step takes and emits is made up, so that no clock is asked."""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import build, prompts
from golden import load_draft, load_target
from twins import draft, noisy, target

from hf_spec import AcceptedTokens, NgramSpeculator, SpeculationConfig, VanillaSpeculator, as_speculator
from hf_spec.batching.speculation import Speculation
from hf_spec.decoding import loop
from hf_spec.decoding.pace import DEEPEST, LOOK_AT_SHAPES, Experience, Pace, experience_of, faster
from hf_spec.decoding.worth import Worth
from hf_spec.sampling import is_seeded
from hf_spec.scoring.widths import costs_of_widths

pytestmark = pytest.mark.clock


@dataclass(frozen=True)
class World:
    """Say how often the j-th guess behind an accepted one is accepted, from 0 on, and what a step takes by depth."""

    accept: Callable[[int], float]
    seconds: Callable[[int], float]
    deepest: int = 99  # that the draft ever guesses
    rows: int = 1
    behind: float = 0.0  # seconds of reading what became text in ordinary steps, before a draft can guess again

    def best(self) -> tuple[int, float]:
        """Return the best fixed depth, and its tokens per second."""
        return max(((k, self.speed(k)) for k in range(DEEPEST + 1)), key=lambda one: one[1])

    def speed(self, depth: int) -> float:
        tokens, survival = 1.0, 1.0
        for j in range(min(depth, self.deepest)):
            survival *= self.accept(j)
            tokens += survival
        return tokens / self.seconds(min(depth, self.deepest))


def run(pace: Pace, world: World, tokens: int, seed: int = 0, noise: float = 0.1) -> float:
    """Decode ``tokens`` tokens per row and return how many each second gave."""
    chance = random.Random(seed)
    emitted, clock, first, late = 0.0, 0.0, True, False
    while emitted < tokens:
        depth = min(pace.depth(world.rows), world.deepest)
        late = late and depth > 0
        taken = world.seconds(depth) * chance.uniform(1 - noise, 1 + noise) + world.behind * late
        reached = []
        for _ in range(world.rows):
            count = 0
            while count < depth and chance.random() < world.accept(count):
                count += 1
            reached.append(count)
        seconds = None if first else taken
        pace.stepped(world.rows, depth, seconds, [depth] * world.rows, reached, is_usual=not late)
        emitted += 1 + sum(reached) / world.rows
        clock, first, late = clock + taken, False, depth == 0
    return emitted / clock


WORLDS = {
    "a wide forward costs nothing": World(lambda j: 0.7, lambda k: 1 + 0.05 * k),
    "the second token costs most": World(lambda j: 0.75, lambda k: (1.0, 1.9)[k > 0] + 0.03 * k),
    "a guess costs as much as a token": World(lambda j: 0.6, lambda k: 1 + 1.0 * k),
    "a draft that is never right": World(lambda j: 0.0, lambda k: 1 + 0.6 * k),
    "a draft that is always right": World(lambda j: 1.0, lambda k: 1 + 0.1 * k),
    "never right, and slow to begin": World(lambda j: 0.0, lambda k: 1 + 0.6 * k, behind=4.0),
    "only the first guess is good": World(lambda j: 0.9 if j == 0 else 0.05, lambda k: 1 + 0.15 * k),
    "three heads": World(lambda j: 0.6, lambda k: 1.1 + 0.02 * k if k else 1.0, deepest=3),
    "a batch of eight": World(lambda j: 0.5, lambda k: 1 + 0.25 * k, rows=8),
    "a batch of sixteen that is full": World(lambda j: 0.6, lambda k: 1 + 0.9 * k, rows=16),
}


@pytest.mark.parametrize("name", WORLDS)
def test_never_slower_than_plain_nor_much_slower_than_the_best_fixed_depth(name: str) -> None:
    world, experience = WORLDS[name], Experience()
    run(Pace(experience, 5), world, 64)  # a process's first tokens
    speeds = [run(Pace(experience, 5), world, 256, seed) for seed in range(12)]
    speed = sum(speeds) / len(speeds)
    assert speed >= 0.96 * world.speed(0)
    assert speed >= 0.93 * world.best()[1]


def test_calls_of_a_draft_that_is_never_right_share_their_tries() -> None:
    """Short calls would else try once each, and their drafts read the whole prompt for it."""
    world, experience = WORLDS["never right, and slow to begin"], Experience()
    run(Pace(experience, 5), world, 64)
    speeds = [run(Pace(experience, 5), world, 96, seed) for seed in range(40)]
    assert sum(speeds) / len(speeds) >= 0.975 * world.speed(0)
    assert experience.offered[0] > 0.0  # but it is tried


@pytest.mark.parametrize(
    ("waits", "of_four", "depth"), [(True, 1.0, 0), (True, 0.5, 1), (False, 1.0, 1)], ids=["slow", "fast", "apart"]
)
def test_rows_that_wait_for_each_other_guess_less(waits: bool, of_four: float, depth: int) -> None:
    """One guess promises 7 % more: too little for a batch of eight, four of which would take as long.

    It is enough if they take half as long, or for requests that come and go.
    """
    world, experience = World(lambda j: 0.5, lambda k: 1 + 0.4 * k, rows=8), Experience()
    for _ in range(3):
        experience.measured(4, 0, of_four)
    run(Pace(experience, 5, waits=waits), world, 600, noise=0.01)
    assert experience.best == {3: depth}


def test_requests_that_sample_are_no_compiled_steps() -> None:
    config = SpeculationConfig(num_speculative_tokens="auto")
    speculator = as_speculator(draft(), target())
    for sample in (False, True):
        requests = Speculation(target(), speculator, config, config, sample)
        assert requests.pace.most_nodes(config) is None  # any depth may be chosen


MILLISECONDS = {8: (3.4, 9.8), 4: (3.2, 7.4), 2: (2.9, 6.6), 1: (2.3, 5.4)}  # ordinary and five deep, by rows
SURVIVAL = (0.66, 0.45, 0.29, 0.20, 0.12)  # how often the first one, two, ... guesses are accepted


def decode_batch(pace: Pace, chance: random.Random, length: int = 96) -> float:
    """Decode ``length`` tokens of eight rows, in compiled steps as they were measured; return the milliseconds."""
    missing, clock = [length] * 8, 0.0
    while missing:
        rows = len(missing)
        depth = pace.depth(rows)
        drawn = [chance.random() for _ in missing]
        reached = [sum(one < share for share in SURVIVAL[:depth]) for one in drawn]
        taken = MILLISECONDS[1 << (rows - 1).bit_length()][depth > 0] * chance.uniform(0.95, 1.05)
        pace.stepped(rows, depth, taken if clock else None, [depth] * rows, reached)
        missing = [left - 1 - count for left, count in zip(missing, reached, strict=True)]
        missing, clock = [left for left in missing if left > 0], clock + taken
    return clock


def test_a_batch_ends_with_its_slowest_row() -> None:
    """Here guesses emit nearly as many tokens a second, but the last row has its last one much later."""
    experience, passes = Experience(), 20
    for seed in range(3):  # a process's first tokens
        decode_batch(Pace(experience, 5, compiled=True), random.Random(seed))
    took = sum(decode_batch(Pace(experience, 5, compiled=True), random.Random(seed)) for seed in range(passes))
    fixed = sum(decode_batch(Pace(Experience(), 5, adapts=False), random.Random(seed)) for seed in range(passes))
    plain = passes * 96 * MILLISECONDS[8][0]
    assert fixed > plain / 0.9  # always guessing loses
    assert took < plain / 0.96


REAL = json.loads((Path(__file__).parent / "fixtures" / "smollm2_reach.json").read_text())


def decode_answer(pace: Pace, right: str, offered: str, seconds: list[float], chance: random.Random) -> float:
    """Decode an answer of which is known how many guesses there are and how many are right; return the seconds."""
    done, clock = 0, 0.0
    while done < len(right):
        depth = min(pace.depth(1), int(offered[done]))
        count = min(depth, int(right[done]))
        taken = seconds[depth] * chance.uniform(0.92, 1.08)
        pace.stepped(1, depth, taken if clock else None, [depth], [count])
        done, clock = done + 1 + count, clock + taken
    return clock


@pytest.mark.parametrize(
    ("kind", "dtype", "of_best"),
    [
        ("eagle3", "float32", 0.87),
        ("eagle3", "bfloat16", 0.92),
        ("ngram", "float32", 0.91),
        ("ngram", "bfloat16", 0.95),
    ],
)
def test_answers_of_a_real_model_take_little_longer_than_with_the_best_depth(
    kind: str, dtype: str, of_best: float
) -> None:
    """In float32 guesses pay in every third answer: what the others have taught must not keep a call from looking."""
    seconds, answers, passes = REAL["milliseconds"][kind][dtype], REAL["answers"][kind], 24
    took: dict[str, float] = defaultdict(float)
    best: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(seconds))
    for category, *answer in answers:
        for depth in range(len(seconds)):
            pace = Pace(Experience(), depth, adapts=False)
            best[category][depth] += passes * decode_answer(pace, *answer, seconds, random.Random(1))
    for number in range(passes):
        if number % 2 == 0:
            chance, experience = random.Random(number), Experience()
        for category, *answer in chance.sample(answers, len(answers)):
            took[category] += decode_answer(Pace(experience, 5), *answer, seconds, chance)
    assert all(took[category] <= depths[0] / 0.96 for category, depths in best.items())
    assert all(took[category] <= min(depths) / of_best for category, depths in best.items())


def test_a_fixed_depth_stays_fixed() -> None:
    pace = Pace(Experience(), 5, adapts=False)
    run(pace, WORLDS["a draft that is never right"], 64)
    assert {pace.depth(1) for _ in range(100)} == {5}
    assert str(pace) == "5 deep in every step, as asked for"


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_a_draft_that_becomes_better_or_worse_is_noticed_within_a_call(before: float, after: float) -> None:
    rates = {"now": before}
    world = World(lambda j: rates["now"], lambda k: 1 + 0.3 * k)
    experience = Experience()
    run(Pace(experience, 5), world, 256)
    rates["now"] = after
    late = Pace(experience, 5)
    run(late, world, 256)
    assert run(late, world, 256) >= 0.9 * world.best()[1]


def test_a_call_begins_where_the_last_one_ended() -> None:
    world, experience = WORLDS["a draft that is never right"], Experience()
    run(Pace(experience, 5), world, 64)
    assert [Pace(experience, 5).depth(1) for _ in range(3)] == [0, 0, 0]
    assert Pace(Experience(), 5).depth(1) == 5


def test_ordinary_steps_are_chosen_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing takes a small target as long as some layers; batches that get smaller are chosen for at once."""
    world, experience, asked = WORLDS["a draft that is never right"], Experience(), []
    run(Pace(experience, 5), world, 256)
    experience.patience, experience.steps = 1000, 0
    pace, speeds = Pace(experience, 5), Pace._speeds
    monkeypatch.setattr(Pace, "_speeds", lambda self, rows: asked.append(rows) or speeds(self, rows))
    run(pace, world, 65)
    assert len(asked) == 9
    assert pace.depth(2) > 0  # another batch, of which nothing is known yet, is not at rest
    run(pace, world, 7)
    assert len(asked) == 9
    experience.steps = 1000 - 3  # until a try is due
    assert [pace.depth(1) > 0 for _ in range(3)] == [False, False, True]


def test_what_was_found_of_a_draft_goes_with_it() -> None:
    """A draft may come to stand where another one stood in memory."""
    model, small = target(), noisy(target())
    known = weakref.ref(experience_of(model, VanillaSpeculator(small), SpeculationConfig()))
    assert known() is experience_of(model, VanillaSpeculator(small), SpeculationConfig())
    assert known() is not experience_of(model, NgramSpeculator(), SpeculationConfig())
    del small
    gc.collect()
    assert known() is None


def test_batches_of_other_sizes_are_measured_anew() -> None:
    experience = Experience()
    cheap, dear = World(lambda j: 0.7, lambda k: 1 + 0.02 * k), World(lambda j: 0.7, lambda k: 1 + 2.0 * k, rows=16)
    run(Pace(experience, 5), cheap, 128)
    pace = Pace(experience, 5)
    run(pace, dear, 128)
    assert pace.depth(16) == 0
    assert pace.depth(1) >= 5


def test_the_first_step_of_a_kind_warms_up_and_does_not_count() -> None:
    experience = Experience()
    experience.measured(1, 3, 100.0)
    assert experience.times(1) == {}
    experience.measured(1, 3, 1.0)
    experience.measured(1, 3, 3.0)
    assert experience.times(1) == {3: 2.0}
    looked_through = iter(experience.times(1))  # by another thread, while this one measures a new depth
    experience.measured(1, 0, 1.0)
    experience.measured(1, 0, 1.0)
    assert list(experience.times(1)) == [0, 3] and list(looked_through) == [3]


def test_a_curve_may_be_dropped_while_another_thread_reads_it() -> None:
    class Dropping(dict[int, list[float]]):
        def __contains__(self, size: object) -> bool:
            found = super().__contains__(size)
            self.clear()  # by another thread, which has measured a step just now
            return found

    experience = Experience()
    for depth in (0, 0, 4, 4):
        experience.measured(1, depth, 1.0 + depth)
    curve = experience.curve(1, 1.0)
    experience._curves = Dropping(experience._curves)
    assert experience.curve(1, 1.0) == curve


@pytest.mark.parametrize(("rows", "depth"), [(1, 5), (8, 5), (16, 3), (32, 1), (64, 1)])
def test_many_rows_begin_with_few_guesses(rows: int, depth: int) -> None:
    assert Pace(Experience(), first=5).depth(rows) == depth
    assert Pace(Experience(), first=5, compiled=True).depth(rows) == 5  # the one depth that has a graph
    world = World(lambda j: 0.7, lambda k: 1 + 0.05 * k, rows=rows)
    assert run(Pace(Experience(), first=5), world, 300) > 0.9 * world.best()[1]


def test_a_machine_that_is_busy_for_a_while_changes_nothing() -> None:
    experience = Experience()
    for depth, seconds in ((0, 1.0), (4, 2.0)):
        for _ in range(40):
            experience.measured(1, depth, seconds)
    for _ in range(12):
        experience.measured(1, 0, 3.0)
    assert experience.times(1) == {0: 1.0, 4: 2.0}
    for _ in range(12):
        experience.measured(1, 0, 3.0)
    assert experience.times(1) == {0: 3.0, 4: 2.0}


def test_what_lies_between_and_beyond_measured_depths_is_on_a_line() -> None:
    experience = Experience()
    for depth, seconds in ((0, 1.0), (4, 3.0)):
        for _ in range(3):
            experience.measured(1, depth, seconds)
    speeds, tokens = experience.speeds(1, 8), experience.tokens()
    assert [tokens[depth] / speed for depth, speed in speeds.items()] == pytest.approx(
        [1 + depth / 2 for depth in range(9)]
    )


def test_a_step_that_is_cheaper_than_a_plain_one_by_noise_promises_no_less_than_nothing() -> None:
    experience = Experience()
    for depth, seconds in ((0, 2.0), (5, 1.0)):
        for _ in range(3):
            experience.measured(1, depth, seconds)
    assert all(0 < speed < 20 for speed in experience.speeds(1, DEEPEST).values())


def test_rows_without_guesses_wait_for_those_that_have_some() -> None:
    experience = Experience()
    for _ in range(200):
        experience.accepted([4, 0, 0, 0], [4, 0, 0, 0])
    assert experience.tokens()[4] == pytest.approx(2.0, abs=0.1)  # five for one row, one for each of the others


# -- in the loop ------------------------------------------------------------------------------------------------------


def test_what_became_text_in_several_steps_is_told_at_once() -> None:
    first = AcceptedTokens(torch.tensor([[1, 2, 3], [4, 9, 9]]), torch.tensor([3, 1]), torch.arange(6.0).view(2, 3, 1))
    second = AcceptedTokens(torch.tensor([[5], [6]]), torch.tensor([1, 1]), torch.tensor([[[7.0]], [[8.0]]]))
    third = AcceptedTokens(
        torch.tensor([[7, 9], [8, 10]]), torch.tensor([1, 2]), torch.tensor([[[1.0], [0]], [[2.0], [3.0]]])
    )
    both = AcceptedTokens.joined([first, second, third])
    texts = [row[:count] for row, count in zip(both.tokens.tolist(), both.counts.tolist(), strict=True)]
    assert texts == [[1, 2, 3, 5, 7], [4, 6, 8, 10]]
    assert both.features is not None
    assert both.features[0, :5, 0].tolist() == [0, 1, 2, 7, 1]
    assert both.features[1, :4, 0].tolist() == [3, 8, 2, 3]
    assert both.root.tolist() == [7, 10]
    assert AcceptedTokens.joined([first]) is first
    assert both.tokens.shape[1] == both.features.shape[1] == 5  # nothing that counts in no row
    assert both.of(torch.tensor([1])).tokens.tolist() == [[4, 6, 8, 10]]


@pytest.mark.parametrize("tree", [None, "dynamic"])
@pytest.mark.parametrize("kind", ["ngram", "vanilla", "eagle3_orig_a", "medusa_v1_pt", "late"])
def test_whatever_depths_are_chosen_the_text_is_plain_generates(
    kind: str, tree: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    shallow = 20 if kind == "late" else 0  # the drafter starts after some rows are done

    def any_depth(clock: Pace | Worth, rows: int) -> int:
        nonlocal shallow
        shallow -= 1
        return 0 if shallow > 0 else chance.choice([0, 0, 1, 4, 7])

    def any_worth(worth: Worth, rows: int, kind: str, chances: list[float]) -> tuple[int, float]:
        return min(any_depth(worth, rows), len(chances)), 1.0

    monkeypatch.setattr(Pace, "depth", any_depth)
    monkeypatch.setattr(Worth, "__call__", any_worth)
    foreign = kind not in ("ngram", "vanilla", "late")
    model = load_target(kind) if foreign else target()
    speculator = load_draft(kind) if foreign else draft() if kind != "ngram" else kind
    inputs = prompts(3, (9, 6, 3), vocab_size=60)
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    ends = [int(plain[0, 14]), int(plain[1, 33])]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    config = SpeculationConfig(tree=tree)
    out = model.generate(
        **inputs, **options, speculator=speculator, speculation_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculation.proposed or kind == "ngram"


def test_a_seed_gives_the_same_text_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(**options: object) -> torch.Tensor:
        torch.manual_seed(5)
        return target().generate(**prompts(1, (7,)), speculator=draft(), do_sample=True, max_new_tokens=24, **options)

    first = sampled()
    monkeypatch.setattr(Pace, "_choose", lambda pace, rows: 1)
    assert torch.equal(sampled(), first)
    assert not torch.equal(sampled(num_speculative_tokens="auto"), first)


@pytest.mark.parametrize(("verification", "seeded"), [("auto", True), ("auto", False), ("exact", True)])
def test_sampled_depths_are_left_to_the_clock_unless_a_seed_has_to_give_the_same_text(
    verification: str, seeded: bool
) -> None:
    torch.manual_seed(5) if seeded else torch.seed()
    assert is_seeded(torch.device("cpu")) is seeded
    out = target().generate(
        **prompts(1), speculator=draft(), speculation_config=SpeculationConfig(verification=verification),
        do_sample=True, max_new_tokens=12, return_dict_in_generate=True,
    )  # fmt: skip
    assert ("by the clock" in out.speculation.pace) is (verification == "exact" or not seeded)


def test_a_number_asked_for_is_kept_and_the_statistics_say_so() -> None:
    out = target().generate(
        **prompts(1), speculator=draft(), num_speculative_tokens=3, do_sample=False, max_new_tokens=30,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.speculation.pace == "3 deep in every step, as asked for"
    assert len(out.speculation.acceptance_by_position) == 3
    out = target().generate(
        **prompts(1), speculator=draft(), do_sample=False, max_new_tokens=30, return_dict_in_generate=True
    )
    assert "by the clock" in out.speculation.pace
    assert out.speculation.pace in repr(out.speculation)


CHAIN = SpeculationConfig(num_speculative_tokens=4)


def told(model: object, speculator: object, tree: str | None, seconds: float, accepted: int) -> None:
    """Let steps of one shape take ``seconds`` and accept so many guesses."""
    experience = experience_of(model, speculator, CHAIN.merge(tree=tree))
    for _ in range(20):
        experience.measured(1, 4, seconds)
        experience.accepted([4], [accepted])


@pytest.mark.parametrize(
    ("tree_seconds", "tree_accepts", "best"), [(1.1, 3, "dynamic"), (3.0, 3, None), (1.0, 1, None)]
)
def test_the_faster_shape_is_taken_and_the_other_looked_at_again(
    tree_seconds: float, tree_accepts: int, best: str | None
) -> None:
    model = copy.deepcopy(target())  # of which nothing is known
    guesser = as_speculator(draft(), model)
    assert faster(model, guesser, CHAIN, 1).tree is None
    told(model, guesser, None, 1.0, 1)
    assert faster(model, guesser, CHAIN, 1).tree == "dynamic"  # of the tree nothing
    told(model, guesser, "dynamic", tree_seconds, tree_accepts)
    taken = [faster(model, guesser, CHAIN, 1).tree for _ in range(2 * LOOK_AT_SHAPES)]
    assert taken.count(best) == 2 * LOOK_AT_SHAPES - 2
    assert faster(model, guesser, CHAIN, 8).tree is None  # of such batches nothing is known


@pytest.mark.clock
def test_trees_may_be_deeper_than_is_counted() -> None:
    inputs, path = prompts(1, (7,)), [(0,) * 20]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    config = SpeculationConfig(tree=path)
    for speculator in ("ngram", draft()):
        out = target().generate(**inputs, **options, speculator=speculator, speculation_config=config)
        assert torch.equal(out, target().generate(**inputs, **options))


def test_a_seed_gives_a_chain_where_the_clock_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(loop, "faster", lambda *args: asked.append(args) or CHAIN)
    for kwargs, count in (({}, 0), ({"num_speculative_tokens": "auto"}, 1)):
        torch.manual_seed(5)
        config = SpeculationConfig(tree="auto", **kwargs)
        target().generate(
            **prompts(1), speculator=draft(), speculation_config=config, do_sample=True, max_new_tokens=4
        )
        assert len(asked) == count


def test_whatever_shape_is_taken_the_text_is_plain_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = copy.deepcopy(target()), []
    monkeypatch.setattr(loop, "faster", lambda *args: shapes.append(faster(*args)) or shapes[-1])
    inputs = prompts(3, (9, 6, 3), vocab_size=60)
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    config = SpeculationConfig(tree="auto", tree_nodes=8, tree_top_k=2)
    for _ in range(3):
        out = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, speculator=draft(), speculation_config=config
        )
        assert torch.equal(out, expected)
    assert [shape.tree for shape in shapes[:2]] == [None, "dynamic"]


def test_a_call_that_takes_no_trees_takes_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = target(), prompts(1)
    monkeypatch.setattr(loop, "faster", lambda *args: pytest.fail("there is nothing to choose"))
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    config = SpeculationConfig(tree="auto")
    out = model.generate(**inputs, **options, speculator=draft(), speculation_config=config)
    assert torch.equal(out, model.generate(**inputs, **options))
    monkeypatch.setattr("hf_spec.decoding.refusals.why_no_trees", lambda model: "this one takes none")
    options.pop("cache_implementation")
    out = model.generate(**inputs, **options, speculator=draft(), speculation_config=config)
    assert torch.equal(out, model.generate(**inputs, **options))


@pytest.mark.parametrize("guess", [0.05, 5.0], ids=["cheap", "dear"])
def test_compiled_steps_have_two_depths(guess: float) -> None:
    """Each depth is compiled anew."""
    pace, seconds = Pace(Experience(), 5, compiled=True), {0: 1.0, 5: 1.0 + 5 * guess}
    chosen = []
    for _ in range(200):
        chosen.append(depth := pace.depth(1))
        pace.stepped(1, depth, seconds[depth], [depth], [depth // 2])
    assert set(chosen) == {0, 5}
    assert chosen.count(5 if guess < 1 else 0) > 150
    assert pace.most_nodes(SpeculationConfig()) == 6


COSTS = {"flat": lambda width: 1.0, "steep": lambda width: width / 8, "in between": lambda width: 1 + (width - 8) / 40}


@pytest.mark.parametrize(("cost", "depth"), [("flat", 5), ("steep", 1), ("in between", 3)])
def test_compiled_batches_guess_as_deep_as_wide_forwards_allow(cost: str, depth: int) -> None:
    experience, asked = Experience(), []

    def costs_of(widths: list[int]) -> list[float]:
        asked.append(widths)
        return [COSTS[cost](width) for width in widths]

    assert Pace(experience, 5, compiled=True).settle(8, costs_of) == depth
    assert Pace(experience, 5, compiled=True).settle(6, costs_of) == depth  # of the same size: there are graphs
    assert asked == [[8, 16, 24, 32, 40, 48]]
    assert Pace(experience, 1, compiled=True).settle(8, costs_of) == 1  # a draft that has no more
    assert Pace(experience, 5, compiled=True).settle(1, costs_of) == 5
    assert len(asked) == 1


def test_a_draft_that_would_guess_deeper_than_is_counted_is_held_to_that() -> None:
    pace = Pace(Experience(), DEEPEST + 4, compiled=True)
    assert pace.settle(1, lambda widths: None) == DEEPEST
    for _ in range(40):
        depth = pace.depth(1)
        pace.stepped(1, depth, 1.0 + depth / 100, [depth], [depth // 2])
    assert pace.depth(1) == DEEPEST
    assert Pace(Experience(), DEEPEST + 4, adapts=False).depth(1) == DEEPEST + 4  # what is asked for stays


def test_what_was_accepted_counts_where_compiled_depths_are_settled() -> None:
    experience = Experience()
    for _ in range(20):
        experience.accepted([5], [1])
    pace = Pace(experience, 5, compiled=True)
    assert pace.settle(8, lambda widths: [1 + (width - 8) / 100 for width in widths]) == 1
    assert pace.settle(4, lambda widths: None) == 5  # nothing can be told of this model


def test_a_batch_over_static_slots_guesses_as_deep_as_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = copy.deepcopy(target()), prompts(4, (9, 6, 3, 5), vocab_size=60)
    options = {"max_new_tokens": 40, "do_sample": False, "cache_implementation": "static"}
    monkeypatch.setattr(loop, "costs_of_widths", lambda model, widths: [width / widths[0] for width in widths])
    out = model.generate(**inputs, **options, speculator=draft(), return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**inputs, **options))
    depths = set(re.findall(r"(\w+) in \d+%", str(out.speculation.pace)))
    assert depths == {"1", "none"}


def test_what_wide_forwards_cost_is_measured_on_layers_of_the_model() -> None:
    few, many = costs_of_widths(target(), [1, 4096]) or ()
    assert few == 1.0
    assert many > 1.0  # four thousand times as much work
    assert costs_of_widths(build("gpt2"), [1, 2]) is None  # has no layer that is known
