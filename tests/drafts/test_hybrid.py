"""A draft and a memory in one proposal: which of them guesses, and that the text stays the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from architectures import prompts
from test_distribution_end_to_end import VANILLA, distribution, guesser, sample
from test_ngram import news
from test_verification import (
    TOO_FAR,
    Rule,
    block_verification,
    continued,
    deviation,
    propose,
    seeded,
    tables,
    token_verification,
)
from test_verification import guesses as guesses_in
from torch import Tensor
from twins import BATCHES, CHAIN, TREE, Oracle, draft, paths_of, target

from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    HybridSpeculator,
    NgramSpeculator,
    Proposal,
    SpeculationConfig,
    Speculator,
    VanillaSpeculator,
    as_speculator,
)
from hf_spec.drafts.ngram.hybrid import HybridDrafter, with_branches, with_chains
from hf_spec.policy.acceptance import AcceptanceEstimator
from hf_spec.policy.base import DraftSource
from hf_spec.policy.fixed import unbounded
from hf_spec.proposal import PAD_NODE
from hf_spec.verify.result import VerificationResult

ROUNDS = 20_000
DEFAULT_HISTORY_SIZE = (2, 0, 1)  # what a memory says in every round


def p_of(name: str, proposal: Proposal) -> Tensor:
    """Look up the target's distribution behind every node, (rounds, nodes, vocabulary)."""
    vocabulary = tables(name)["p/len0"].shape[-1]
    p = torch.zeros(*proposal.tokens.shape, vocabulary)
    number, depth = torch.zeros_like(proposal.tokens), proposal.depth
    for node in range(1, proposal.tokens.shape[1]):
        above = proposal.parents[:, node].clamp(min=0)
        number[:, node] = number.gather(1, above[:, None])[:, 0] * vocabulary + proposal.tokens[:, node]
    for length in range(guesses_in(name) + 1):
        table = tables(name)[f"p/len{length}"].float().reshape(-1, vocabulary)
        here = (depth == length) & proposal.present
        p[here] = table.expand(vocabulary**length, -1)[number[here]]
    return p


def mixed(name: str, way: str, rounds: int = ROUNDS) -> Proposal:
    """Let a remembered path branch off in every round, or take every other round; or those with a certain draw."""
    proposal, _ = propose(name)
    assert proposal.q is not None
    tokens, parents, q = proposal.tokens[:rounds], proposal.parents[:rounds], proposal.q[:rounds]
    proposal = replace(proposal, tokens=tokens, parents=parents, q=q)
    path = DEFAULT_HISTORY_SIZE[: guesses_in(name)]
    if way == "branches":
        return with_branches(proposal, [{path[:end]: 0.5 for end in range(1, len(path) + 1)}] * rounds)
    takes = torch.arange(rounds) % 2 == 0 if way == "instead" else tokens[:, 1] == 0
    return with_chains(proposal, [path if take else None for take in takes.tolist()])


def is_lossless(name: str, rule: Rule, proposal: Proposal) -> bool:
    generator = seeded(1)
    verdict: VerificationResult = rule(proposal, p_of(name, proposal), generator)
    return deviation(continued(name, verdict, generator), tables(name)["target_joint"]) < TOO_FAR


WAYS = [("chain_v3_l3", "instead"), ("chain_v4_l2_edge", "branches"), ("tree_v4_k2_l2", "branches")]


@pytest.mark.parametrize("rule", [token_verification, block_verification])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_chosen_and_drawn_guesses_together(name: str, way: str, rule: Rule) -> None:
    proposal = mixed(name, way)
    assert proposal.deterministic is not None and proposal.q is not None
    assert bool(proposal.deterministic.any()) and not bool(proposal.deterministic.all())
    assert is_lossless(name, rule, proposal)


@pytest.mark.parametrize("rule", [token_verification, block_verification])
@pytest.mark.parametrize("way", ["instead", "branches"])
def test_chosen_guesses_taken_for_drawn_ones_are_seen(way: str, rule: Rule) -> None:
    assert not is_lossless("chain_v3_l3", rule, replace(mixed("chain_v3_l3", way), deterministic=None))


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_a_choice_that_looks_at_the_draw_is_seen(rule: Rule) -> None:
    assert not is_lossless("chain_v3_l3", rule, mixed("chain_v3_l3", "where a 0 was drawn", 4 * ROUNDS))


@pytest.mark.parametrize("rule", [token_verification, block_verification])
@pytest.mark.parametrize(("way", "lossless"), [("how sure the draft is", True), ("what was drawn", False)])
def test_chains_may_end_by_how_sure_a_draft_is_but_not_by_what_was_drawn(way: str, lossless: bool, rule: Rule) -> None:
    """A guess that was drawn stays. The tempting rule drops those that turned out unlikely."""
    proposal, _ = propose("chain_v3_l3")
    assert proposal.q is not None
    tokens, parents, q = proposal.tokens[:ROUNDS], proposal.parents[:ROUNDS].clone(), proposal.q[:ROUNDS, :3]
    peak = q.amax(-1)  # (rounds, guesses)
    if lossless:
        going = torch.cat([torch.ones(ROUNDS, 1), (peak[:, :-1] > 0.5).float()], dim=1).cumprod(1) > 0
    else:
        going = (q.gather(2, tokens[:, 1:, None])[..., 0] > 0.3).float().cumprod(1) > 0
    parents[:, 1:][~going] = PAD_NODE
    assert 0.1 < going.float().mean() < 0.9
    assert is_lossless("chain_v3_l3", rule, replace(proposal, tokens=tokens, parents=parents, q=q)) == lossless


def test_branches_share_what_is_there() -> None:
    tokens, parents = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 0]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, PAD_NODE]])
    found = [{(1,): 0.9, (1, 4): 0.5, (1, 4, 5): 0.4, (7,): 0.1}, {(1,): 0.9, (1, 2): 0.8}]
    proposal = with_branches(Proposal(tokens, parents, 2), found)
    assert paths_of(proposal, 0) == [(1,), (2,), (1, 3), (1, 4), (1, 4, 5), (7,)]
    assert paths_of(proposal, 1) == [(1,), (1, 2)]
    assert (proposal.max_depth, proposal.q, proposal.deterministic) == (3, None, None)
    assert with_branches(proposal, [{}, {}]) is proposal
    nothing = with_branches(Proposal.nothing(torch.tensor([9, 9])), found)
    assert paths_of(nothing, 1) == [(1,), (1, 2)]


def test_chains_beside_chains() -> None:
    root, drawn = torch.tensor([8, 9, 7]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    proposal = with_chains(Proposal.chain(root, drawn, torch.tensor([2, 1, 2])), [(5, 6, 7), None, (1,)])
    assert proposal.tokens[:, 0].tolist() == [8, 9, 7]
    assert [paths_of(proposal, row)[-1] for row in range(3)] == [(5, 6, 7), (3,), (1,)]
    assert proposal.is_chain and proposal.max_depth == 3
    assert torch.equal(proposal.depth[proposal.present], replace(proposal, is_chain=False).depth[proposal.present])
    assert with_chains(proposal, [None, None, None]) is proposal


# --- Who guesses -----------------------------------------------------------------------------------------------------


class Fixed(Speculator):
    """Always guess the same tokens, and count how often that is asked, and for how much text."""

    def __init__(self, guesses: list[int]) -> None:
        self.guesses, self.asked, self.read = guesses, 0, 0

    def drafter(self, request: DraftContext) -> Drafter:
        return _FixedDrafter(self)


class _FixedDrafter(Drafter):
    def __init__(self, fixed: Fixed) -> None:
        self._fixed = fixed

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        self._fixed.asked += 1
        self._fixed.read += int(news.counts[0])
        guesses = torch.tensor(self._fixed.guesses[:limit]).expand(len(news.tokens), -1)
        return Proposal.chain(news.root, guesses)

    def keep_rows(self, rows: Tensor) -> None:
        pass


def hybrid(draft: Any, *texts: list[int], **options: Any) -> HybridSpeculator:
    memory = NgramSpeculator(history_size=1_000)
    memory.learn(texts)
    return HybridSpeculator(draft, memory, **options)


def begin(
    speculator: HybridSpeculator, rows: int, acceptance: AcceptanceEstimator | None = None, tree: Any = None
) -> HybridDrafter:
    ids = torch.full((rows, 2), 90)
    settings = SpeculationConfig(num_speculative_tokens=8, tree=tree)
    policy = unbounded(acceptance or AcceptanceEstimator())
    context = DraftContext(target(), ids, torch.ones_like(ids), None, settings, lambda x: x, False, policy=policy)
    return cast(HybridDrafter, speculator.drafter(context))


LINE = list(range(10, 40))
CHANCES = [0.95, 0.85, 0.7, 0.6, 0.5, 0.3, 0.2, 0.1]  # one of each level


def trusted(acceptance: AcceptanceEstimator) -> float:
    return sum(acceptance.calibration[DraftSource.NGRAM](chance) for chance in CHANCES)


def of_model(acceptance: AcceptanceEstimator) -> float:
    return sum(acceptance.survival(DraftSource.MODEL, 3))


def test_each_row_takes_what_promises_more() -> None:
    fixed = Fixed([50, 51, 52])
    drafter = begin(hybrid(fixed, LINE, draft_tokens=3), 3)
    proposal = drafter.propose(news([[70], LINE[:10], [70, 71]]), 6)
    assert [paths_of(proposal, row)[-1] for row in range(3)] == [(50, 51, 52), tuple(LINE[10:16]), (50, 51, 52)]
    assert (fixed.asked, fixed.read) == (1, 1)


def test_a_draft_that_no_row_wants_is_not_asked_but_told_later() -> None:
    fixed = Fixed([50, 51, 52])
    drafter = begin(hybrid(fixed, LINE), 2)
    drafter.propose(news([LINE[:10], LINE[:10]]), 4)
    drafter.propose(news([LINE[10:15], LINE[10:12]]), 4)
    assert fixed.asked == 0
    proposal = drafter.propose(news([[70], [71]]), 4)
    assert (fixed.asked, fixed.read) == (1, 16)
    assert paths_of(proposal, 1)[-1] == (50, 51, 52)


@torch.no_grad()
@pytest.mark.parametrize(("draft_tokens", "depth"), [(None, 7), (2, 2)])
def test_a_static_tree_is_drafted_as_deep_as_it_was_given(draft_tokens: int | None, depth: int) -> None:
    speculator = hybrid(VanillaSpeculator(draft()), draft_tokens=draft_tokens)
    tree = [(1,), *[(0,) * length for length in range(1, 8)]]
    proposal = begin(speculator, 2, tree=tree).propose(news([[70], [71]]), 7)
    assert proposal.max_depth == depth
    assert sorted(map(len, paths_of(proposal, 0))) == [1, *range(1, depth + 1)]


def test_acceptance_decides() -> None:
    """A draft that is always right takes over from a short match, and the match from a draft that is always wrong."""
    speculator, acceptance = hybrid(Fixed([50, 51, 52]), LINE), AcceptanceEstimator()
    for accepted, guesses in ((3, (50, 51, 52)), (0, tuple(LINE[2:5]))):
        for _ in range(90):
            acceptance.record(DraftSource.MODEL, [3], [accepted])
        assert paths_of(begin(speculator, 1, acceptance).propose(news([LINE[:2]]), 3), 0)[-1] == guesses
    for _ in range(90):
        for chance in CHANCES:
            acceptance.calibration[DraftSource.NGRAM].record(chance, False)
        acceptance.record(DraftSource.MODEL, [3], [1])
    assert paths_of(begin(speculator, 1, acceptance).propose(news([LINE[:2]]), 3), 0)[-1] == (50, 51, 52)


def test_leaving_rows_take_the_memorys_chains_with_them() -> None:
    def calibrated(rows: list[int], second: list[int]) -> float:
        speculator, acceptance = hybrid(Fixed([50, 51, 52]), LINE, draft_tokens=3), AcceptanceEstimator()
        drafter = begin(speculator, 3, acceptance)
        drafter.propose(news([[70], LINE[:10], [71]]), 6)
        drafter.keep_rows(torch.tensor(rows))
        new = [[60], second, [50, 51, 52, 60]]
        drafter.propose(news([new[row] for row in rows]), 6)
        return trusted(acceptance)

    wrong, right = [*LINE[10:12], 70], LINE[10:17]
    assert calibrated([0], wrong) == calibrated([2], wrong) == sum(CHANCES)  # those had no match
    assert calibrated([1], wrong) == calibrated([2, 1], wrong) < sum(CHANCES) < calibrated([1], right)


def test_a_memory_that_is_not_taken_is_judged_all_the_same() -> None:
    """It said LINE[2:5] where the text went on so, but the draft's tokens were taken, of which none was right."""
    speculator, acceptance = hybrid(Fixed([50, 51, 52]), LINE, draft_tokens=3), AcceptanceEstimator()
    for _ in range(90):
        acceptance.record(DraftSource.MODEL, [3], [3])
        for chance in CHANCES:
            acceptance.calibration[DraftSource.NGRAM].record(chance, False)
    doubted = trusted(acceptance)
    drafter = begin(speculator, 1, acceptance)
    assert paths_of(drafter.propose(news([LINE[:2]]), 3), 0)[-1] == (50, 51, 52)
    drafter.propose(news([LINE[2:4]]), 3)
    assert trusted(acceptance) > doubted


# --- In generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "config", [CHAIN, TREE, SpeculationConfig(tree=[(0,), (1,), (0, 0)])], ids=["chain", "dynamic", "static"]
)
def test_text_is_that_of_plain_generate(batch: str, config: SpeculationConfig) -> None:
    rows, lengths = BATCHES[batch]
    inputs = prompts(rows, lengths)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    if rows > 1:  # rows end at different times
        options["eos_token_id"] = [3, 9, 14, 40]
    plain = target().generate(**inputs, **options)
    speculator, lengths_found = HybridSpeculator(draft(), NgramSpeculator(history_size=300)), []
    for _ in range(2):
        out = target().generate(
            **inputs, **options, speculator=speculator, speculation_config=config, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        lengths_found.append(out.speculation.mean_accepted_length)
    assert lengths_found[1] > lengths_found[0], "the second time, all of it was written before"


@pytest.mark.parametrize("name", ["mamba", "jamba", "mistral"])
def test_other_targets(name: str) -> None:
    inputs = prompts(1, (9,))
    plain = target(name).generate(**inputs, max_new_tokens=16, do_sample=False)
    speculator = HybridSpeculator(Oracle(plain, wrong=3), draft_tokens=2)
    for _ in range(2):
        config = SpeculationConfig(num_speculative_tokens=6)
        found = target(name).generate(
            **inputs, max_new_tokens=16, do_sample=False, speculator=speculator, speculation_config=config
        )
        assert torch.equal(found, plain)


HYBRID = {
    "chain": replace(VANILLA["chain, block"], num_speculative_tokens=3),
    "drawn tree": VANILLA["dynamic tree"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRID)
def test_sampled_text_has_the_targets_distribution(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[bool, bool]] = set()
    joined = with_chains if case == "chain" else with_branches

    def watched(proposal: Proposal, found: Any) -> Proposal:
        whole = joined(proposal, found)
        if whole.deterministic is not None:
            seen.add((bool(whole.deterministic[:, 1:].any()), not bool(whole.deterministic[:, 1:].all())))
        return whole

    monkeypatch.setattr(f"hf_spec.drafts.ngram.hybrid.{joined.__name__}", watched)
    memory = NgramSpeculator(history_size=2_000, min_token_prob=0.1)
    speculator = HybridSpeculator(VanillaSpeculator(guesser()), memory, draft_tokens=1 if case == "chain" else None)
    assert deviation(sample(speculator, HYBRID[case]), distribution()) < TOO_FAR
    assert (True, True) in seen, "no step had both"


def test_drafts_are_found_for_the_target() -> None:
    made = as_speculator(HybridSpeculator(draft()), target())
    assert isinstance(made, HybridSpeculator) and isinstance(made.draft, VanillaSpeculator)
    given = HybridSpeculator(draft(), draft_tokens=2)
    made = as_speculator(given, target())
    assert isinstance(made, HybridSpeculator)
    assert (made.history, made.draft_depth) == (given.history, 2)
    with pytest.raises(ValueError, match="no multi-token-prediction layers"):
        target().generate(**prompts(1, (4,)), max_new_tokens=2, speculator=HybridSpeculator("mtp"))


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="draft with weights"):
        HybridSpeculator("ngram")
    with pytest.raises(TypeError, match="draft is None: pass a draft"):
        HybridSpeculator(None)
    with pytest.raises(TypeError, match=r"NgramSpeculator\(history_size="):
        HybridSpeculator(draft(), NgramSpeculator())
    with pytest.raises(ValueError, match="draft_tokens"):
        HybridSpeculator(draft(), draft_tokens=0)
    with pytest.raises(ValueError, match="tokenizers differ"):
        target().generate(**prompts(1, (4,)), max_new_tokens=2, speculator=HybridSpeculator(target(vocab_size=5000)))
