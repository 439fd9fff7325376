"""Guesses weighed by their chances: who guesses and how deep, where a memory says how likely it is to be right."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from architectures import prompts
from golden import load_draft, load_target
from test_distribution_end_to_end import distribution, guesser, sample
from test_ngram import news
from test_verification import TOO_FAR, deviation
from torch import Tensor
from twins import draft, target

from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    HybridSpeculator,
    NgramSpeculator,
    Proposal,
    SpeculationConfig,
    Speculator,
    as_speculator,
)
from hf_spec.decoding import loop
from hf_spec.decoding.experience import Experience
from hf_spec.decoding.pace import Pace
from hf_spec.decoding.worth import PLAIN, Worth
from hf_spec.drafts.foresight import Foresight
from hf_spec.drafts.lazy import LazyDrafter
from hf_spec.drafts.ngram.recall import chances_of, judge
from hf_spec.drafts.trees import grow
from hf_spec.drafts.trust import TrackRecord, Trust, mean_chances

pytestmark = pytest.mark.clock


@pytest.fixture(autouse=True)
def weighed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small targets of the tests be weighed, too, which compute in float32."""
    monkeypatch.setattr(loop, "WEIGHED", (torch.float32,))


def weigher() -> Worth:
    return Worth(defaultdict(Experience).__getitem__)


def measured(seconds: dict[str, Callable[[int], float]], rows: int = 1) -> Worth:
    """Return one that saw steps of every kind, one to eight deep, and ordinary ones."""
    worth = weigher()
    for depth in [0, *range(1, 9)] * 2:
        for kind, taken in seconds.items():
            worth.stepped(rows, kind, depth, taken(depth))
    return worth


# --- What guesses are worth ------------------------------------------------------------------------------------------


def test_guesses_go_as_deep_as_their_chances_pay_for() -> None:
    worth = measured({"recalled": lambda depth: 1 + 0.1 * depth, "drafted": lambda depth: 1 + 0.4 * depth})
    likely, unlikely = [0.9**j for j in range(1, 9)], [0.3**j for j in range(1, 9)]
    for chances in (likely, unlikely):
        for kind, cost in (("recalled", 0.1), ("drafted", 0.4)):
            speeds = [(1 + sum(chances[:depth])) / (1 + cost * depth) for depth in range(9)]
            depth, speed = worth(1, kind, chances)
            assert (depth, speed) == pytest.approx((speeds.index(max(speeds)), max(speeds)))
    assert worth(1, "recalled", [])[0] == worth(1, "drafted", [0.2, 0.1])[0] == 0


def test_what_costs_more_than_it_promises_is_left() -> None:
    worth = measured({"recalled": lambda depth: 1 + 2 * (depth > 0)})
    assert worth(1, "recalled", [1.0, 1.0]) == (0, 1.0)
    assert worth(1, "recalled", [1.0, 1.0, 1.0])[0] == 3


@pytest.mark.parametrize(("second", "expected"), [(1.2, {1, 2}), (1.7, {0})])
def test_depths_below_the_measured_ones_are_tried(second: float, expected: set[int]) -> None:
    """The line through 4 and 16 guesses is nearly level, and says that two take as long: they are looked at."""
    worth, taken = weigher(), {0: 1.0, 1: second, 2: second, 3: second, 4: 1.7, 16: 1.8}
    for depth in [0, 4, 16] * 8:
        worth.stepped(1, "recalled", depth, taken[depth])
    steps = []
    for _ in range(40):
        steps.append(worth(1, "recalled", [0.3, 0.1])[0])
        worth.stepped(1, "recalled", steps[-1], taken[steps[-1]])
    assert steps[0] == 2
    assert set(steps[-20:]) == expected


def test_rows_that_wait_for_each_other_are_worth_less() -> None:
    seconds = {"recalled": lambda depth: 1 + 0.3 * depth}
    of_four, apart = measured(seconds, rows=4), [0.3]
    for depth in [0, 1] * 3:
        of_four.stepped(2, "recalled", depth, (1 + 0.3 * depth) * 0.95)  # fewer rows take nearly as long
    assert measured(seconds)(1, "recalled", [0.4])[0] == of_four(1 << 6, "recalled", apart)[0] == 1
    assert of_four(4, "recalled", [0.36])[0] == 0
    assert measured(seconds, rows=4)(4, "recalled", [0.36])[0] == 1


def test_every_kind_is_tried_first_and_again() -> None:
    worth, taken = weigher(), {"": 1.0, "recalled": 1.2, "drafted": 9.0}
    steps: list[str] = []
    for _ in range(4000):
        best = max(("recalled", "drafted"), key=lambda kind: worth(1, kind, [0.5])[1])
        depth = worth(1, best, [0.5])[0]
        kind = best if depth else PLAIN
        worth.stepped(1, kind, depth, taken[kind])
        steps.append(kind)
    assert {"recalled", "drafted", PLAIN} == set(steps[:8])
    assert {"recalled", "drafted", PLAIN} == set(steps[-1500:])
    seconds = {kind: taken[kind] * steps.count(kind) for kind in taken}
    assert seconds["drafted"] + seconds[PLAIN] < 0.03 * sum(seconds.values())


def test_steps_that_are_no_usual_ones_teach_nothing() -> None:
    experiences: dict[str, Experience] = defaultdict(Experience)
    Worth(experiences.__getitem__).stepped(1, "drafted", 3, None)
    assert not any(one.seconds for one in experiences.values())


def test_a_batch_begins_with_few_guesses() -> None:
    assert weigher()(1, "recalled", [0.9] * 16)[0] == 16
    assert weigher()(16, "recalled", [0.9] * 16)[0] == 3


# --- Chances as they turn out ----------------------------------------------------------------------------------------


def test_trust_follows_what_came_true() -> None:
    trust, chance = Trust(), random.Random(0)
    assert [trust.of(one) for one in (0.9, 0.5, 0.2)] == pytest.approx([0.9, 0.5, 0.2])
    for _ in range(600):
        trust.learn(0.9, chance.random() < 0.45)
        trust.learn(0.3, chance.random() < 0.5)
    assert [trust.of(one) for one in (0.9, 0.3)] == pytest.approx([0.45, 0.5], abs=0.08)
    assert trust.of(0.6) == 0.6  # of which nothing is known
    assert trust.of(0.3) < trust.of(0.37) <= 1
    for _ in range(600):
        trust.learn(0.4, True)
    assert trust.of(0.49) == 1.0


def test_a_chain_that_was_not_scored_is_judged_as_far_as_the_text_goes() -> None:
    scored, seen = Trust(), Trust()
    guesses = {(5,): 0.9, (5, 6): 0.7, (5, 6, 7): 0.4}
    for _ in range(50):
        judge(scored, guesses, [5], scored=True)
        judge(seen, guesses, [5], scored=False)
    assert chances_of(guesses, seen) == pytest.approx([1.0, 0.7, 0.4], abs=0.1)
    assert chances_of(guesses, scored)[1:] == pytest.approx([0.0, 0.0], abs=0.1)


def test_no_guess_is_likelier_than_those_before_it() -> None:
    trust = Trust()
    for _ in range(50):
        trust.learn(0.9, False)
    assert chances_of({(5,): 0.9, (5, 6): 0.6}, trust) == [pytest.approx(0.09, abs=0.05)] * 2


def test_means_are_over_all_rows() -> None:
    assert mean_chances([[0.8, 0.6], [], [0.4]]) == pytest.approx([0.4, 0.2])


# --- Guess by guess --------------------------------------------------------------------------------------------------


def foresight(chances: Callable[[str, list[float]], tuple[int, float]], first: int = 5) -> Foresight:
    return Foresight(lambda rows, kind, found: chances(kind, found), TrackRecord(), first)


def test_chains_end_where_a_guess_is_not_worth_it() -> None:
    worth = measured({"drafted": lambda depth: 1 + 0.2 * depth})
    ending = Foresight(worth, TrackRecord(), 5)
    assert ending.limit(1, 8) == 8
    assert ending.goes_on(torch.tensor([0.95]))
    assert not ending.goes_on(torch.tensor([0.1]))
    of_two = Foresight(measured({"drafted": lambda depth: 1 + 0.2 * depth}, rows=2), TrackRecord(), 5)
    of_two.begin([True, True], 8)
    assert of_two.goes_on(torch.tensor([0.99, 0.3]))  # on average
    of_two.begin([False, True], 8)
    assert not of_two.goes_on(torch.tensor([0.99, 0.5]))  # the memory guesses for the first row


def test_nobody_is_asked_where_not_one_guess_promises_enough() -> None:
    worth, record = measured({"drafted": lambda depth: 1 + 0.5 * depth}), TrackRecord()
    assert Foresight(worth, record, 5).limit(1, 8) == 8
    for _ in range(200):
        record.fade()
        record.learn(3, 0)
    assert Foresight(worth, record, 5).limit(1, 8) == 0


def test_what_was_not_measured_is_tried_as_deep_as_is_usual() -> None:
    assert foresight(lambda kind, chances: (len(chances), math.inf)).limit(1, 16) == 5
    assert foresight(lambda kind, chances: (1, 1.0)).limit(1, 16) == 16  # and ended guess by guess


def test_each_row_teaches_how_far_a_draft_can_be_trusted() -> None:
    ending = foresight(lambda kind, chances: (len(chances), 1.0))
    assert ending.limit(3, 3) == 3
    assert ending.goes_on(torch.tensor([0.9, 0.3, 0.3])) and ending.goes_on(torch.tensor([0.9, 0.3, 0.3]))
    ending.proposed([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    ending.keep_rows([0, 2])
    unknown = ending.record.of(3)
    ending.became_text([[1, 2, 3, 60], [70]])
    assert ending.record.trust.of(0.9) > 0.9 and ending.record.trust.of(0.3) < 0.3
    assert ending.record.of(3)[2] > unknown[2]
    ending.became_text([[4], [4]])  # an ordinary step teaches nothing
    assert ending.sure == []


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("is_hybrid", [False, True])
@torch.no_grad()
def test_drafters_that_end_their_own_chains_are_asked_each_by_itself(is_hybrid: bool, ends: bool) -> None:
    prompt, worth = torch.tensor([[5, 6, 7]]), (lambda rows, kind, chances: (len(chances), 1.0)) if ends else None
    own, memory = as_speculator(draft(), target()), NgramSpeculator(remember=100)

    def start() -> Drafter:
        request = DraftContext(
            target(), prompt, torch.ones_like(prompt), None, own.defaults(), lambda x: x, False, worth=worth
        )
        if is_hybrid:
            return cast(HybridSpeculator, as_speculator(HybridSpeculator(draft(), memory), target())).drafter(request)
        ending = None if worth is None else Foresight(worth, TrackRecord(), 5)
        return LazyDrafter(lambda: own.drafter(request), ending)

    one, other = start(), start()
    for drafter in (one, other):
        drafter.propose(news([[8]]), 3)
    assert one.join(other) is not ends
    one.propose(news([[9]]) if ends else news([[9], [10]]), 3)


@pytest.mark.parametrize("sample", [False, True])
def test_a_chain_is_the_beginning_of_the_one_that_was_not_ended(sample: bool) -> None:
    """How long a chain gets must not change what is in it, nor the distributions that its guesses are drawn from."""
    tables, told = torch.randn(9, 2, 40), []

    def step(tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        return tables[depth].log_softmax(-1)[:, None]

    def goes_on(sure: Tensor) -> bool:
        told.append(sure)
        return len(told) < 3

    root, config = torch.tensor([1, 2]), SpeculationConfig(num_speculative_tokens=8)
    chains = []
    for ends in (lambda sure: True, goes_on):
        torch.manual_seed(0)
        chains.append(grow(root, tables[0].log_softmax(-1), step, config, 8, sample, goes_on=ends))
    whole, ended = chains
    assert (whole.max_depth, ended.max_depth) == (8, 3)
    assert torch.equal(whole.tokens[:, :4], ended.tokens)
    assert torch.allclose(torch.stack(told), tables[:3].softmax(-1).amax(-1))
    if sample:
        assert whole.q is not None and ended.q is not None
        assert torch.equal(whole.q[:, :3], ended.q)


def test_scores_of_any_sum_say_how_sure_a_draft_is() -> None:
    logits, root = torch.randn(3, 50), torch.zeros(3, dtype=torch.long)
    sure: list[Tensor] = []

    def ends(one: Tensor) -> bool:
        sure.append(one)
        return False

    for scores in (logits, logits.log_softmax(-1), logits.bfloat16()):
        grow(root, scores, lambda *_: logits[:, None], SpeculationConfig(), 2, False, goes_on=ends)
    assert torch.allclose(sure[0], sure[1]) and torch.allclose(sure[0], sure[2], atol=0.02)


def test_drafts_that_step_are_asked_on_a_cpu() -> None:
    assert as_speculator(draft(), target()).heeds_foresight
    assert load_draft("eagle3_orig_a").heeds_foresight
    assert not load_draft("medusa_v1_pt").heeds_foresight
    assert not NgramSpeculator().heeds_foresight
    assert not load_draft("eagle3_orig_a").to("meta").heeds_foresight


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["vanilla", "eagle3_orig_a", "hybrid"])
def test_ended_chains_leave_the_text_as_it_is(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, lengths = random.Random(rows), set()

    def any_end(self: Foresight, sure: Tensor) -> bool:
        lengths.add(len(sure))
        for kept, own in zip(self.sure, sure.tolist(), strict=True):
            kept.append(own)
        return chance.random() < 0.6

    monkeypatch.setattr(Foresight, "goes_on", any_end)
    monkeypatch.setattr(
        Worth, "__call__", lambda worth, rows, kind, chances: (chance.randint(0, len(chances)), chance.random())
    )
    model = load_target(kind) if kind.startswith("eagle") else target()
    speculator: Any = load_draft(kind) if kind.startswith("eagle") else draft()
    speculator = HybridSpeculator(speculator) if kind == "hybrid" else speculator
    inputs = prompts(rows, (9, 6, 3)[:rows], vocab_size=60)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain_text = model.generate(**inputs, **options)
    options["eos_token_id"] = [int(plain_text[0, 20])]
    expected = model.generate(**inputs, **options)
    out = model.generate(**inputs, **options, speculator=speculator, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert rows in lengths
    depths = {depth for row in out.speculation.per_row for depth in row.guessed}
    assert len(depths) > 1


def test_chains_that_end_early_leave_the_distribution_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def while_sure(self: Foresight, sure: Tensor) -> bool:
        ended.append(bool(sure.mean() < 0.62))
        return not ended[-1]

    monkeypatch.setattr(Foresight, "goes_on", while_sure)
    monkeypatch.setattr(Worth, "__call__", lambda worth, rows, kind, chances: (len(chances), 1.0))
    drawn = sample(guesser(), SpeculationConfig(num_speculative_tokens="auto"))
    assert deviation(drawn, distribution()) < TOO_FAR
    assert set(ended) == {True, False}


def test_min_confidence_ends_chains_itself() -> None:
    config = SpeculationConfig(min_confidence=0.4)
    speculator = as_speculator(draft(), target())
    assert Pace.of(target(), speculator, config, True, weighs=True).worth is None
    assert Pace.of(target(), speculator, SpeculationConfig(), True, weighs=True).worth is not None
    assert Pace.of(target(), speculator, SpeculationConfig(), False, weighs=True).worth is None


# --- Answers of a real model -----------------------------------------------------------------------------------------

REAL = json.loads((Path(__file__).parent / "fixtures" / "smollm2_answers.json").read_text())


class Known(Speculator):
    """Guess five deep, and be right as often as the draft was from which this was written down."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}

    def drafter(self, request: DraftContext) -> Drafter:
        return _KnownDrafter(self.answer)


class _KnownDrafter(Drafter):
    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer, self._done = answer, answer["prompt"]

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        self._done += int(news.counts[0])
        place = self._done - self._answer["prompt"] - 1
        right = int(self._answer["drafted"][place : place + 1] or 0)  # nothing is guessed behind the last but one
        guesses = (self._answer["ids"][self._done : self._done + right] + [10**9] * 5)[: min(limit, 5)]
        return Proposal.chain(news.root, torch.tensor([guesses]))

    def keep_rows(self, rows: Tensor) -> None:
        raise AssertionError("one row")


def decode(speculator: Speculator, pace: Pace, answer: dict[str, Any], costs: list[float], seed: int) -> float:
    """Decode an answer as the loop does, but for the target, whose text and times are known; return the seconds."""
    ordinary, wider, asking, guessing = costs
    ids, done, clock, chance = answer["ids"], answer["prompt"] + 1, 0.0, random.Random(seed)
    prompt = torch.tensor([ids[: answer["prompt"]]])
    request = DraftContext(
        target(), prompt, torch.ones_like(prompt), None, speculator.defaults(), lambda x: x, False, worth=pace.worth
    )
    drafter, new = LazyDrafter(lambda: speculator.drafter(request)), ids[done - 1 : done]
    while done < len(ids):
        room = len(ids) - done
        proposal = drafter.propose(news([new]), min(pace.depth(1), room)).within([room])
        guesses = proposal.tokens[0, 1 : 1 + proposal.max_depth].tolist()
        right = next((i for i, token in enumerate(guesses) if token != ids[done + i]), len(guesses))
        drafted = 0 if drafter.kind == "recalled" else min(5, len(guesses))
        taken = ordinary + wider * len(guesses) + (asking + guessing * drafted if drafted else 0)
        taken *= chance.uniform(0.94, 1.06)
        new = ids[done : min(done + right + 1, len(ids))]
        usual, kind = not drafter.caught_up, drafter.kind
        pace.stepped(1, len(guesses), taken if clock else None, [len(guesses)], [right], is_usual=usual, kind=kind)
        done, clock = done + len(new), clock + taken
    speculator.learn([ids])
    return clock


def took(kind: str, costs: list[float], weighs: bool = True, fixed: int | None = None) -> dict[str, float]:
    """Return the time of the answers of each category, one conversation after another.

    ``fixed`` is how deep to guess, instead of what the clock says.
    """
    known, memory = Known(), NgramSpeculator(remember=100_000)
    speculator = {
        "draft": known,
        "n-gram": NgramSpeculator(),
        "memory": memory,
        "hybrid": HybridSpeculator(known, memory),
    }[kind]
    experiences: dict[str, Experience] = defaultdict(Experience)
    times: dict[str, float] = defaultdict(float)
    for number, answer in enumerate(REAL["answers"]):
        known.answer = answer
        weighing = Worth(experiences.__getitem__) if weighs and speculator.knows_chances(1) else None
        pace = Pace(experiences["all"], fixed or 5, adapts=fixed is None, worth=weighing)
        times[answer["category"]] += decode(speculator, pace, answer, costs, number)
    return times


def plain(costs: list[float]) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for answer in REAL["answers"]:
        times[answer["category"]] += costs[0] * (len(answer["ids"]) - answer["prompt"] - 1)
    return times


@pytest.mark.parametrize("machine", REAL["milliseconds"])
def test_a_hybrid_is_as_fast_as_the_better_of_its_two(machine: str) -> None:
    costs = REAL["milliseconds"][machine]
    hybrid, draft_alone, memory = (took(kind, costs) for kind in ("hybrid", "draft", "memory"))
    total, better = sum(hybrid.values()), min(sum(draft_alone.values()), sum(memory.values()))
    assert total < better / 0.97
    assert all(hybrid[name] < seconds / 0.96 for name, seconds in plain(costs).items())
    assert all(memory[name] < seconds / 0.97 for name, seconds in plain(costs).items())


@pytest.mark.parametrize("machine", REAL["milliseconds"])
def test_ngrams_without_a_memory_are_as_fast_as_with_the_best_fixed_number(machine: str) -> None:
    costs = REAL["milliseconds"][machine]
    weighed, by_depth = (took("n-gram", costs, weighs) for weighs in (True, False))
    fixed = [took("n-gram", costs, weighs=False, fixed=count) for count in (2, 3, 4, 5, 8)]
    assert sum(weighed.values()) < min(sum(times.values()) for times in [*fixed, by_depth])
    for name, seconds in plain(costs).items():
        assert weighed[name] < min(times[name] for times in fixed) / 0.93  # two answers each
        assert weighed[name] < seconds / 0.97


def test_one_acceptance_for_both_is_slower() -> None:
    """What a draft gets accepted says nothing of what the memory will: with a slow draft it costs most."""
    for machine, gain in (("bfloat16", 1.0), ("a slow draft", 1.25)):
        costs = REAL["milliseconds"][machine]
        mixed, weighed = (sum(took("hybrid", costs, weighs).values()) for weighs in (False, True))
        assert mixed > gain * weighed


# --- In generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["n-gram", "memory", "hybrid"])
@pytest.mark.parametrize("rows", [1, 3])
def test_whatever_is_worth_it_the_text_is_plain_generates(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, asked = random.Random(5), set()

    def any_worth(worth: Worth, rows: int, kind: str, chances: list[float]) -> tuple[int, float]:
        asked.add(kind)
        return chance.randint(0, len(chances)), chance.random()

    monkeypatch.setattr(Worth, "__call__", any_worth)
    memory = NgramSpeculator(remember=1000)
    speculator = {"n-gram": NgramSpeculator(), "memory": memory, "hybrid": HybridSpeculator(draft(), memory)}[kind]
    inputs = prompts(rows, (9, 6, 3)[:rows], vocab_size=60)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    ends = [int(target().generate(**inputs, **options)[0, 14])]
    expected = target().generate(**inputs, **options, eos_token_id=ends)
    for _ in range(3):
        out = target().generate(
            **inputs, **options, eos_token_id=ends, speculator=speculator, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, expected)
    alone = {"recalled"} if kind == "memory" or rows == 1 else set()  # n-grams of a batch are not weighed
    assert asked == ({"recalled", "drafted"} if kind == "hybrid" else alone)


def who_weighs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list to which each call adds whether its guesses are weighed."""
    seen: list[bool] = []
    call = loop.Call.__init__

    def spy(self: Any, *args: Any) -> None:
        call(self, *args)
        seen.append(self.pace.worth is not None)

    monkeypatch.setattr(loop.Call, "__init__", spy)
    return seen


@pytest.mark.parametrize(
    ("change", "weighs"),
    [
        ({}, True),
        ({"num_speculative_tokens": 4}, False),
        ({"speculation_config": SpeculationConfig(tree="dynamic")}, False),
        ({"cache_implementation": "static", "disable_compile": True}, False),
        ({"no_repeat_ngram_size": 3}, True),
        ({"logits_processor": [lambda ids, scores: scores]}, False),  # three rows in lockstep
    ],
)
def test_where_the_clock_weighs(change: dict[str, Any], weighs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = who_weighs(monkeypatch)
    inputs = prompts(3, (9, 6, 3), vocab_size=60)
    expected = target().generate(**inputs, **_plain(change), max_new_tokens=8, do_sample=False, pad_token_id=0)
    out = target().generate(
        **inputs, **change, max_new_tokens=8, do_sample=False, pad_token_id=0, speculator=NgramSpeculator(remember=99)
    )
    assert torch.equal(out, expected)
    assert seen == [weighs]


def _plain(change: dict[str, Any]) -> dict[str, Any]:
    own = "num_speculative_tokens", "speculation_config"
    return {name: value for name, value in change.items() if name not in own}


@pytest.mark.parametrize(("dtype", "weighs"), [(torch.float32, False), (torch.bfloat16, True)])
def test_guesses_of_weights_are_weighed_in_half_precision_alone(
    dtype: torch.dtype, weighs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    seen = who_weighs(monkeypatch)
    model, small = (copy.deepcopy(one).to(dtype) for one in (target(), draft()))
    options = {**prompts(1, (5,)), "max_new_tokens": 4, "do_sample": False}
    for speculator in (small, HybridSpeculator(small), NgramSpeculator(), NgramSpeculator(remember=99)):
        model.generate(**options, speculator=speculator)
    assert seen == [weighs, weighs, True, True]
    model.generate(**options | prompts(3, (9, 6, 3)), speculator=NgramSpeculator())
    model.generate(**options | prompts(3, (9, 6, 3)), speculator=NgramSpeculator(remember=99))
    assert seen[4:] == [False, weighs]


def test_a_request_without_a_clock_takes_what_is_found() -> None:
    memory = NgramSpeculator(remember=99)
    memory.learn([list(range(20))])
    ids = torch.tensor([[1, 2]])
    request = DraftContext(target(), ids, torch.ones_like(ids), None, memory.defaults(), lambda x: x, False)
    assert memory.drafter(request).propose(news([[3]]), 16).max_depth == 7
    shallow = replace(request, worth=lambda rows, kind, chances: (2, 1.0))
    assert memory.drafter(shallow).propose(news([[3]]), 16).max_depth == 2
