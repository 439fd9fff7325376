"""The policy in ``generate``: which one a call has and why, and that the text is the target's whatever is chosen."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from architectures import build, prompts
from golden import load_draft, load_target
from layouts import take_layout
from lengths import force_lengths
from test_distribution_end_to_end import distribution, guesser, sample
from test_ngram import news
from test_verification import TOO_FAR, deviation
from torch import Tensor
from torch.distributions import Distribution
from twins import draft, target

import hf_spec
from hf_spec import DraftContext, HybridSpeculator, NgramSpeculator, SpeculationConfig, Speculator, as_speculator
from hf_spec.decode import draft_length
from hf_spec.decode.draft_length import Situation, draft_length_policy, most_nodes
from hf_spec.drafts.trees import grow
from hf_spec.parallel import ModelParallelGroup
from hf_spec.policy.acceptance import AcceptanceEstimator
from hf_spec.policy.adaptive import AdaptiveLength
from hf_spec.policy.base import DraftPlan, DraftSource
from hf_spec.policy.cost import MeasuredCost, ShapeCost
from hf_spec.policy.fixed import FixedLength
from hf_spec.sampling import is_seeded, set_seed

pytestmark = pytest.mark.clock

AUTO = SpeculationConfig(num_speculative_tokens="auto")


def policy_of(
    speculator: Any, asked: SpeculationConfig | None = None, samples: bool = False, model: Any = None, **more: Any
) -> FixedLength | AdaptiveLength:
    model = target() if model is None else model
    speculator = as_speculator(speculator, model)
    situation = Situation(model, speculator, samples, **{"batch_size": 1, "prompt_length": 7} | more)
    policy = draft_length_policy(speculator.settings(asked), asked, situation, ModelParallelGroup(model))[1]
    assert isinstance(policy, FixedLength | AdaptiveLength)
    return policy


# --- Which policy ----------------------------------------------------------------------------------------------------


def test_a_number_that_was_asked_for_is_kept() -> None:
    policy = policy_of(draft(), SpeculationConfig(num_speculative_tokens=3))
    assert isinstance(policy, FixedLength) and policy.length == policy.longest == 3
    assert str(policy) == "3 draft tokens in every step, as asked for"
    assert most_nodes(policy, SpeculationConfig(num_speculative_tokens=3), False) == 4


def test_by_default_time_is_measured_and_a_seed_does_without_a_clock() -> None:
    torch.manual_seed(5)
    for samples, asked, cost in (
        (False, None, MeasuredCost),
        (True, None, ShapeCost),
        (True, AUTO, MeasuredCost),
        (True, SpeculationConfig(verification="exact"), MeasuredCost),
    ):
        policy = policy_of(draft(), asked, samples, copy.deepcopy(target()))  # no step of it was measured yet
        assert isinstance(policy, AdaptiveLength) and type(policy.cost) is cost
        assert ("because a seed was set" in str(policy)) is (cost is ShapeCost)
        assert most_nodes(policy, SpeculationConfig(), False) is None
        for _ in range(2):
            policy.cost.observe(1, DraftSource.NONE, 0, 0.5)
        assert policy.plain_seconds(1) == (0.5 if cost is MeasuredCost else 0.0)  # shapes tell no seconds
    torch.seed()
    policy = policy_of(draft(), None, True)
    assert isinstance(policy, AdaptiveLength) and type(policy.cost) is MeasuredCost


def test_a_call_that_measured_plain_steps_tells_how_much_faster_it_was() -> None:
    options = {"do_sample": False, "speculator": draft(), "return_dict_in_generate": True}
    model = target("gpt2")
    for _ in range(3):
        stats = model.generate(**prompts(1), **options, max_new_tokens=40).speculation
    assert stats.speedup > 0 and "x plain steps" in repr(stats)
    fixed = model.generate(**prompts(1), **options, max_new_tokens=8, num_speculative_tokens=2).speculation
    assert fixed.speedup == 0


@pytest.mark.parametrize(("rule", "samples", "is_fixed"), [
    ("near_best", False, True), ("near_best", True, True), ("typical", True, True), ("typical", False, False),
])  # fmt: skip
def test_rules_that_are_not_lossless_have_a_fixed_length_unless_asked_for(
    rule: Any, samples: bool, is_fixed: bool
) -> None:
    torch.seed()
    policy = policy_of(draft(), SpeculationConfig(acceptance=rule), samples)
    assert isinstance(policy, FixedLength) is is_fixed
    assert (f'fixed, because acceptance="{rule}" is not lossless' in str(policy)) is is_fixed
    asked = SpeculationConfig(acceptance=rule, num_speculative_tokens="auto")
    assert isinstance(policy_of(draft(), asked, samples), AdaptiveLength)


@pytest.mark.parametrize("seed", [(1 << 53) - 1, 1 << 40])
def test_seeds_that_a_gpu_draws_itself_are_not_taken_for_set(seed: int) -> None:
    """CUDA and XPU draw 53 bits."""
    torch.manual_seed(seed)
    assert not is_seeded(torch.device("cpu"))
    torch.manual_seed((1 << 32) - 1)
    assert is_seeded(torch.device("cpu"))


def test_every_seed_of_commands_and_servers_counts_as_set_and_repeats() -> None:
    drawn = []
    for seed, process in ((5, 0), (5, 1), (5, 2), (1 << 40, 0), (-1, 3), (5, 0), (-1, 3)):
        torch.seed()
        set_seed(seed, process)
        assert is_seeded(torch.device("cpu"))
        drawn.append(torch.rand(()).item())
    assert drawn[5:] == [drawn[0], drawn[4]] and len(set(drawn[:5])) == 5


def test_what_changes_times_or_acceptance_has_a_profile_of_its_own() -> None:
    near = {"acceptance": "near_best", "num_speculative_tokens": "auto"}
    half = copy.deepcopy(target()).bfloat16()
    calls: list[Any] = [
        policy_of("ngram"),
        policy_of(NgramSpeculator(history_size=50)),
        policy_of(NgramSpeculator(corpus=[[1, 2, 3]])),
        policy_of(NgramSpeculator(max_ngram=2)),
        policy_of(HybridSpeculator(draft())),
        policy_of(draft()),
        policy_of("ngram", model=half),
        policy_of("ngram", prompt_length=5000),
        policy_of("ngram", is_static=True),
        policy_of("ngram", way=("requests",)),
        policy_of("ngram", SpeculationConfig(confidence_threshold=0.3)),
        policy_of("ngram", SpeculationConfig(tree="dynamic", tree_topk=3)),
        policy_of("ngram", SpeculationConfig(tree="dynamic", num_tree_tokens=3)),
        policy_of("ngram", SpeculationConfig(accept_tolerance=0.1, **near)),  # type: ignore[arg-type]
        policy_of("ngram", SpeculationConfig(accept_tolerance=0.2, **near)),  # type: ignore[arg-type]
        policy_of("ngram", SpeculationConfig(accept_k=2, **near)),  # type: ignore[arg-type]
    ]
    assert len({id(policy.acceptance) for policy in calls}) == len({id(policy.cost) for policy in calls}) == len(calls)
    assert policy_of("ngram").acceptance is calls[0].acceptance
    half.float()
    assert policy_of("ngram", model=half).cost is not calls[6].cost


def test_another_forward_has_a_profile_of_its_own() -> None:
    """Times of packed weights would have drafting go on after ``unpack``, where it pays no longer."""
    model = build("llama", num_hidden_layers=1, intermediate_size=4096)  # the output layer is too small to be packed
    plain = policy_of("ngram", model=model)
    with hf_spec.packed(model, force=True):
        packed = policy_of("ngram", model=model)
        with hf_spec.invariant(model):
            exact = policy_of("ngram", model=model)
    torch.set_num_threads(threads := torch.get_num_threads() + 1)
    try:
        others = policy_of("ngram", model=model)
    finally:
        torch.set_num_threads(threads - 1)
    assert policy_of("ngram", model=model).cost is plain.cost
    model.forward = torch.compile(model.forward, backend="eager")
    compiled = policy_of("ngram", model=model)
    assert len({id(one.cost) for one in (plain, packed, exact, others, compiled)}) == 5


def test_with_a_seed_a_second_token_costs_nothing_more_in_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=1, intermediate_size=4096)
    torch.manual_seed(5)

    def second_token() -> float:
        cost = policy_of("ngram", model=model, samples=True).cost
        assert isinstance(cost, ShapeCost)
        return cost.curve(1, DraftSource.NGRAM)[1]

    found = {"plain": second_token()}
    for name in ("kept", "in blocks"):
        take_layout(name, monkeypatch)
        with hf_spec.packed(model, force=True) as report:
            assert report.packed
            found[name] = second_token()
    assert found["kept"] == found["plain"] > found["in blocks"]


def test_confidence_ends_chains_in_half_precision_alone_and_where_no_threshold_does() -> None:
    half, small = copy.deepcopy(target()).bfloat16(), copy.deepcopy(draft()).bfloat16()
    threshold = SpeculationConfig(confidence_threshold=0.4)
    for speculator in (small, HybridSpeculator(small)):
        assert policy_of(speculator, model=half).stops_early
        assert not policy_of(speculator, threshold, model=half).stops_early
        assert not policy_of(speculator, SpeculationConfig(tree="dynamic"), model=half).stops_early
        assert not policy_of(speculator, model=half, is_static=True).stops_early
        assert not policy_of(speculator).stops_early
    assert not policy_of("ngram", model=half).stops_early


def test_drafts_that_step_are_asked_on_a_cpu() -> None:
    assert as_speculator(draft(), target()).supports_early_stop
    assert load_draft("eagle3_orig_a").supports_early_stop
    assert not load_draft("medusa_v1_pt").supports_early_stop
    assert not NgramSpeculator().supports_early_stop
    assert not load_draft("eagle3_orig_a").to("meta").supports_early_stop


def test_what_drafting_takes() -> None:
    """Forwards by kind; the Markov head of DSpark reads each draft token after the block."""

    def work(speculator: Speculator, length: int) -> list[int]:
        return [forward.layers for forward in speculator.draft_work(target())(length)]

    assert work(load_draft("eagle3_orig_a"), 4) == work(HybridSpeculator(load_draft("eagle3_orig_a")), 4) == [2] * 4
    assert work(load_draft("medusa_v1_pt"), 4) == work(load_draft("medusa_v1_pt"), 1) != []
    assert work(load_draft("medusa_v1_pt"), 0) == work(NgramSpeculator(), 4) == []
    with_head, *heads = work(load_draft("sp_dspark_qwen3"), 4)
    assert work(load_draft("zl_dflash_qwen3"), 4) == [with_head] and heads == [1] * 4


# --- The text is the target's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [None, "dynamic"])
@pytest.mark.parametrize("kind", ["ngram", "memory", "vanilla", "hybrid", "eagle3_orig_a", "late"])
def test_whatever_lengths_are_chosen_the_text_is_plain_generates(
    kind: str, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, plain_steps = random.Random(3), iter([0] * (20 if kind == "late" else 0))
    force_lengths(monkeypatch, lambda rows: next(plain_steps, chance.choice([0, 0, 1, 4, 7])))
    foreign = kind.startswith("eagle")
    model = load_target(kind) if foreign else target()
    memory = NgramSpeculator(history_size=1000)
    own = {"ngram": "ngram", "memory": memory, "hybrid": HybridSpeculator(draft(), memory)}
    speculator = load_draft(kind) if foreign else own.get(kind, draft())
    inputs = prompts(3, (9, 6, 3), vocab_size=60)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    options["eos_token_id"] = [int(plain[0, 14]), int(plain[1, 33])]
    expected = model.generate(**inputs, **options)
    for _ in range(2):
        out = model.generate(
            **inputs, **options, speculator=speculator, speculation_config=SpeculationConfig(tree=tree),
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, expected)
    assert out.speculation.proposed or kind == "ngram"


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["vanilla", "hybrid"])
def test_chains_that_end_early_leave_the_text_as_it_is(
    kind: str, rows: int, in_lockstep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lockstep no row's confidence says how many draft tokens count."""
    chance, asked, keep = random.Random(rows), set(), AdaptiveLength.keep_drafting

    def any_end(policy: AdaptiveLength, confidence: Tensor) -> bool:
        keep(policy, confidence)
        asked.add(len(confidence))
        return chance.random() < 0.6

    monkeypatch.setattr(draft_length, "HALF", (torch.float32,))
    monkeypatch.setattr(AdaptiveLength, "_choose", lambda _, rows, __: DraftPlan(5, (DraftSource.MODEL,) * rows, 5))
    monkeypatch.setattr(AdaptiveLength, "keep_drafting", any_end)
    speculator = HybridSpeculator(draft()) if kind == "hybrid" else draft()
    inputs = prompts(rows, (9, 6, 3)[:rows], vocab_size=60)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if in_lockstep:
        options["logits_processor"] = [lambda ids, scores: scores]
    expected = target().generate(**inputs, **options)
    for _ in range(2):
        out = target().generate(**inputs, **options, speculator=speculator, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
    assert (rows in asked) != (in_lockstep and rows > 1)


def test_chains_that_end_early_leave_the_distribution_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def while_sure(policy: AdaptiveLength, confidence: Tensor) -> bool:
        ended.append(bool(confidence.mean() < 0.5))
        return not ended[-1]

    monkeypatch.setattr(draft_length, "HALF", (torch.float32,))
    force_lengths(monkeypatch, lambda rows: 5)
    monkeypatch.setattr(AdaptiveLength, "keep_drafting", while_sure)
    assert deviation(sample(guesser(), AUTO), distribution()) < TOO_FAR
    assert set(ended) == {True, False}


def teach(speculator: Any, config: SpeculationConfig, samples: bool, rows: int, accepted: int) -> None:
    """Let earlier calls have found that of four draft tokens of a model so many are accepted."""
    known = policy_of(speculator, config.merge(num_speculative_tokens="auto"), samples, batch_size=rows).acceptance
    for _ in range(200):
        known.record(DraftSource.MODEL, [4] * rows, [accepted] * rows)


@pytest.mark.parametrize("kind", ["vanilla", "ngram", "hybrid"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_gives_the_same_text_in_every_call(kind: str, rows: int) -> None:
    """Earlier calls, a slow machine or a busy one change nothing."""
    made = {"vanilla": draft, "ngram": lambda: "ngram", "hybrid": lambda: HybridSpeculator(draft())}[kind]

    def sampled(**options: Any) -> Any:
        torch.manual_seed(5)
        return target().generate(
            **prompts(rows, (9, 6, 3)[:rows], vocab_size=60), speculator=made(), do_sample=True, max_new_tokens=30,
            pad_token_id=0, return_dict_in_generate=True, **options,
        )  # fmt: skip

    first = sampled()
    target().generate(**prompts(1), speculator=made(), do_sample=False, max_new_tokens=30)
    again = sampled()
    assert torch.equal(again.sequences, first.sequences)
    assert "because a seed was set" in again.speculation.draft_lengths
    texts = []
    for accepted in (4, 0):
        teach(made(), AUTO, True, rows, accepted)
        texts.append(sampled(num_speculative_tokens=4).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["vanilla", "hybrid"])
@pytest.mark.parametrize("rule", ["near_best", "typical"])
def test_rules_that_are_not_lossless_give_one_text(rule: Any, kind: str) -> None:
    config, samples = SpeculationConfig(acceptance=rule), rule == "typical"
    config = config.merge(accept_k=3) if rule == "near_best" else config
    texts = set()
    for accepted in (4, 0, 0):
        speculator = HybridSpeculator(draft()) if kind == "hybrid" else draft()
        teach(speculator, config, samples, 1, accepted)
        out = target().generate(
            **prompts(1, vocab_size=60), speculator=speculator, speculation_config=config, do_sample=samples,
            max_new_tokens=30,
        )  # fmt: skip
        texts.add(tuple(out[0].tolist()))
    assert len(texts) == 1


def test_nan_in_draft_logits_ends_chains_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile of an earlier test turns that off
    half, small = copy.deepcopy(target()).bfloat16(), copy.deepcopy(draft()).bfloat16()
    small.get_output_embeddings().weight.data.fill_(float("nan"))
    options = {**prompts(1), "do_sample": False, "max_new_tokens": 16}
    for _ in range(2):
        assert torch.equal(half.generate(**options, speculator=small), half.generate(**options))
    for warper in ({"eta_cutoff": 0.02}, {"top_h": 0.6}):  # they raise for a nan that they are given
        for more in ({}, {"num_speculative_tokens": 3}, {"speculation_config": SpeculationConfig(tree="dynamic")}):
            sampled = options | {"do_sample": True} | warper | more
            assert half.generate(**sampled, speculator=small).shape == half.generate(**options).shape


# --- Drafters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [False, True])
def test_a_chain_is_the_beginning_of_the_one_that_was_not_ended(sampling: bool) -> None:
    """How long a chain gets must not change what is in it, nor the distributions that its tokens are drawn from."""
    tables, told = torch.randn(9, 2, 40), []

    def step(tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        return tables[depth].log_softmax(-1)[:, None]

    def three(confidence: Tensor) -> bool:
        told.append(confidence)
        return len(told) < 3

    root, config = torch.tensor([1, 2]), SpeculationConfig(num_speculative_tokens=8)
    chains = []
    for ends in (lambda confidence: True, three):
        torch.manual_seed(0)
        chains.append(grow(root, tables[0].log_softmax(-1), step, config, 8, sampling, keep_drafting=ends))
    whole, ended = chains
    assert (whole.max_depth, ended.max_depth) == (8, 3)
    assert torch.equal(whole.tokens[:, :4], ended.tokens)
    assert torch.allclose(torch.stack(told), tables[:3].softmax(-1).amax(-1))
    if sampling:
        assert whole.q is not None and ended.q is not None and torch.equal(whole.q[:, :3], ended.q)


def test_a_memory_drafts_as_much_as_the_policy_says() -> None:
    memory = NgramSpeculator(history_size=99)
    memory.learn([list(range(20))])
    ids = torch.tensor([[1, 2]])
    asked = (target(), ids, torch.ones_like(ids), None, memory.defaults(), lambda x: x, False)
    assert memory.drafter(DraftContext(*asked)).propose(news([[3]]), 16).max_depth == 7
    two = DraftContext(*asked, policy=FixedLength(2, AcceptanceEstimator()))
    assert memory.drafter(two).propose(news([[3]]), 16).max_depth == 2
