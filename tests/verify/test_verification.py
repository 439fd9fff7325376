"""The rules keep the target's distribution: measured against exact enumeration, beside rules that are wrong.

``fixtures/distribution_*.safetensors`` hold distributions ``p`` and ``q`` over tiny vocabularies and, computed by
exact enumeration in float64, how often each rule accepts which guesses and emits which token:
``<rule>/distribution/len{m}[a_1, ..., a_m, y]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_spec import SpeculationConfig, sampling
from hf_spec.proposal import NO_PARENT, PAD_NODE, Proposal
from hf_spec.sampling import draw, sums_by_doubling
from hf_spec.settings import AcceptanceRule, VerificationRule
from hf_spec.verify import residual, rules
from hf_spec.verify.result import VerificationResult
from hf_spec.verify.rules import (
    RULES,
    block_verification,
    rule_for,
    token_verification,
    verify_against_tokens,
    verify_target_samples,
)

Rule = Callable[[Proposal, Tensor, torch.Generator], VerificationResult]
Pick = Callable[[Tensor, int, torch.Generator], Tensor]

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHAINS = ("chain_v3_l3", "chain_v4_l2_edge")
TREES = ("tree_v3_k2_l3", "tree_v4_k2_l2")
ROUNDS = 40_000
TOO_FAR = 4.0  # standard deviations


# --- The bench: distributions as tables, a round per row, and a chi-square test
# ----------------------------------------------


@cache
def tables(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / f"distribution_{name}.safetensors")


def guesses(name: str) -> int:
    return sum(key.startswith("q/") for key in tables(name))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def after(table: Tensor, text: Tensor) -> Tensor:
    """Look up the distribution after each ``text`` (rounds, length): (rounds, vocabulary)."""
    return table[tuple(text.unbind(1))].expand(len(text), -1)


def drawn(distribution: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement: the first, the second, ... of clocks that run as fast as the distribution says."""
    return (distribution / torch.empty_like(distribution).exponential_(generator=generator)).topk(count).indices


def best(distribution: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return distribution.topk(count).indices


def drawn_with_replacement(distribution: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.multinomial(distribution, count, replacement=True, generator=generator)


@cache
def propose(name: str, pick: Pick = drawn) -> tuple[Proposal, Tensor]:
    """Guess once per row, level by level, as a drafter would; give the proposals and the target's distributions."""
    generator = seeded()
    case, depth, width = tables(name), guesses(name), 2 if name in TREES else 1
    texts = [torch.zeros(ROUNDS, 0, dtype=torch.long)]
    parents, q = [NO_PARENT], []
    level = [0]
    for length in range(depth):
        children = []
        for parent in level:
            distribution = after(case[f"q/len{length}"], texts[parent])
            q.append(distribution)
            for token in pick(distribution, width, generator).unbind(1):
                children.append(len(texts))
                texts.append(torch.cat([texts[parent], token[:, None]], dim=1))
                parents.append(parent)
        level = children
    p = torch.stack([after(case[f"p/len{text.shape[1]}"], text) for text in texts], dim=1)
    tokens = torch.stack([torch.zeros(ROUNDS, dtype=torch.long), *(text[:, -1] for text in texts[1:])], dim=1)
    proposal = Proposal(
        tokens=tokens,
        parents=torch.tensor(parents).expand(ROUNDS, -1),
        max_depth=depth,
        q=torch.stack(q, dim=1).float(),
        is_chain=width == 1,
    )
    return proposal, p.float()


def looked_up(proposal: Proposal, p: Tensor, generator: torch.Generator) -> VerificationResult:
    """Draw from the target after each node, and go on where that was guessed: what chosen guesses get."""
    rows = torch.arange(len(p))
    return verify_target_samples(proposal, lambda node: draw(p[rows, node], generator))


@cache
def verdict_of(name: str, rule: Rule) -> VerificationResult:
    return rule(*propose(name), seeded(1))


def deviation(outcomes: Tensor, distribution: Tensor) -> float:
    """Return how far ``outcomes`` (rounds,) are from ``distribution``, in standard deviations of a chi-square test."""
    distribution = torch.where(distribution.flatten() < 1e-12, 0, distribution.flatten().double())
    seen = torch.bincount(outcomes, minlength=len(distribution)).double()
    expected = distribution * len(outcomes)
    if seen[distribution == 0].any():
        return math.inf
    rare = (expected < 5) & (distribution > 0)
    seen = torch.cat([seen[expected >= 5], seen[rare].sum()[None]])
    expected = torch.cat([expected[expected >= 5], expected[rare].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = max(len(seen) - 1, 1)
    ratio = float(((seen - expected) ** 2 / expected).sum()) / freedom
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root is nearly normal
    return (ratio ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def outcomes_of(verdict: VerificationResult, vocabulary: int) -> Tensor:
    """Number what was emitted, (rounds,): all texts of length 1, then all of length 2, ..."""
    number = torch.zeros_like(verdict.counts)
    for j, token in enumerate(verdict.tokens.unbind(1)):
        number = torch.where(j < verdict.counts, (number + (j > 0)) * vocabulary + token, number)
    return number


def distribution_of(name: str, rule: str) -> Tensor:
    return torch.cat([tables(name)[f"{rule}/distribution/len{m}"].flatten() for m in range(guesses(name) + 1)])


def continued(name: str, verdict: VerificationResult, generator: torch.Generator) -> Tensor:
    """Go on drawing from the target until every row has ``guesses + 1`` tokens, and number the texts, (rounds,)."""
    text, number = verdict.tokens[:, :0], torch.zeros_like(verdict.counts)
    for j, token in enumerate(verdict.tokens.unbind(1)):
        distribution = after(tables(name)[f"p/len{j}"], text)
        own = torch.multinomial(distribution, 1, generator=generator)[:, 0]
        text = torch.cat([text, torch.where(j < verdict.counts, token, own)[:, None]], dim=1)
        number = number * distribution.shape[1] + text[:, -1]
    return number


def lossless(name: str, rule: Rule, pick: Pick = drawn) -> bool:
    generator = seeded(1)
    text = continued(name, rule(*propose(name, pick), generator), generator)
    return deviation(text, tables(name)["target_joint"]) < TOO_FAR


# --- The distribution
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "distribution", "rule"),
    [
        (name, distribution, rule)
        for name in CHAINS
        for distribution, rule in (("token", token_verification), ("block", block_verification))
    ]
    + [
        (name, distribution, rule)
        for name in TREES
        for distribution, rule in (("rrsw", token_verification), ("traversal", block_verification))
    ],
)
def test_drawn_guesses(name: str, distribution: str, rule: Rule) -> None:
    verdict = verdict_of(name, rule)
    assert deviation(outcomes_of(verdict, len(tables(name)["p/len0"])), distribution_of(name, distribution)) < TOO_FAR
    assert deviation(continued(name, verdict, seeded(2)), tables(name)["target_joint"]) < TOO_FAR


@pytest.mark.parametrize(("name", "distribution"), [("chain_v3_l3", "block"), ("tree_v4_k2_l2", "traversal")])
def test_drawn_guesses_without_float64(name: str, distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = verdict_of(name, block_verification)
    for module in (sampling, residual):
        monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)
    verdict = block_verification(*propose(name), seeded(1))
    assert deviation(outcomes_of(verdict, len(tables(name)["p/len0"])), distribution_of(name, distribution)) < TOO_FAR
    assert not torch.equal(verdict.counts, usual.counts)  # other coins


@pytest.mark.parametrize("name", CHAINS + TREES)
def test_chosen_guesses(name: str) -> None:
    proposal, p = propose(name, best)
    verdict = looked_up(replace(proposal, q=None), p, seeded(1))
    assert deviation(outcomes_of(verdict, p.shape[-1]), distribution_of(name, "pointmass")) < TOO_FAR
    assert deviation(continued(name, verdict, seeded(2)), tables(name)["target_joint"]) < TOO_FAR


@pytest.mark.parametrize("name", CHAINS + TREES)
def test_traverse_accepts_more(name: str) -> None:
    simple, longer = (
        (verdict_of(name, rule).counts - 1).double().mean() for rule in (token_verification, block_verification)
    )
    distributions = ("token", "block") if name in CHAINS else ("rrsw", "traversal")
    for accepted, distribution in zip((simple, longer), distributions, strict=True):
        assert accepted == pytest.approx(float(tables(name)[f"{distribution}/expected_accepted"]), abs=0.015)
    assert longer > simple + 0.03


@pytest.mark.parametrize("many", [0, 10**9], ids=["large", "small"])
@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_chain_equals_tree(rule: Rule, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "IN_PARTS_FROM", many)
    proposal, p = propose("chain_v3_l3")
    ragged = proposal.parents.masked_fill(torch.arange(4) > torch.arange(ROUNDS)[:, None] % 4, PAD_NODE)
    for chain in (proposal, replace(proposal, parents=ragged)):
        fast, slow = rule(chain, p, seeded(1)), rule(replace(chain, is_chain=False), p, seeded(1))
        assert torch.equal(fast.tokens, slow.tokens) and torch.equal(fast.path, slow.path)
    assert (fast.counts - 1 <= torch.arange(ROUNDS) % 4).all()


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_a_known_shape_changes_nothing(rule: Rule) -> None:
    proposal, p = propose("tree_v4_k2_l2")
    rows = torch.arange(10_000)
    assert proposal.q is not None
    proposal = replace(proposal, tokens=proposal.tokens[rows], parents=proposal.parents[rows], q=proposal.q[rows])
    p, shape = p[rows], tuple(proposal.parents[0].tolist())
    assert shape == (NO_PARENT, 0, 0, 1, 1, 2, 2)
    for count in (7, 6, 4):
        dropped = torch.arange(7) >= torch.where(rows % 2 == 0, 7, count)[:, None]
        asked = replace(proposal, parents=proposal.parents.masked_fill(dropped, PAD_NODE))
        verdicts = [rule(one, p, seeded(1)) for one in (asked, replace(asked, shape=shape))]
        assert all(torch.equal(getattr(verdicts[0], name), getattr(verdicts[1], name)) for name in ("tokens", "path"))


def test_drafter_may_stop_because_of_earlier_draws() -> None:
    def stopping(rule: Rule, proposal: Proposal, p: Tensor, generator: torch.Generator) -> VerificationResult:
        stopped = torch.nn.functional.pad((proposal.tokens[:, 1:-1] == 0).cumsum(1) > 0, (2, 0))
        return rule(replace(proposal, parents=proposal.parents.masked_fill(stopped, PAD_NODE)), p, generator)

    assert lossless("chain_v3_l3", partial(stopping, token_verification))
    assert lossless("chain_v3_l3", partial(stopping, block_verification))


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_siblings_drawn_with_replacement_are_fine(rule: Rule) -> None:
    assert lossless("tree_v4_k2_l2", rule, drawn_with_replacement)  # a repeat is passed over


# --- Irregular trees, another one in every row ----------------------------------------------------------------------


def exact_distribution(
    tokens: list[int], parents: list[int], p: Tensor, q: Tensor, rule: Rule, chosen: Sequence[bool] = ()
) -> Tensor:
    """Enumerate how often each node is the last accepted one and which token follows: (nodes, vocabulary) float64.

    The slow twin: recursive as in the papers, one child at a time. ``chosen`` children are drawn from point masses.
    """
    distribution = torch.zeros_like(p, dtype=torch.float64)

    def visit(node: int, reach: Tensor, turn: Tensor) -> Tensor:
        """Spend ``turn``, the probability that it is this node's turn; return what of it goes on to the next path."""
        left, guess, weight = p[node].double(), q[node].double(), turn
        for child in (i for i, parent in enumerate(parents) if parent == node):
            own, point = guess, bool(chosen) and chosen[child]
            guess = torch.zeros_like(own).index_fill(0, torch.tensor(tokens[child]), 1) if point else own
            ratio = left[tokens[child]] / guess[tokens[child]]
            if rule is token_verification:
                visit(child, reach, weight * ratio.clamp(max=1))
                weight = weight * (1 - ratio.clamp(max=1))
            else:
                weight = visit(child, (reach * ratio).clamp(max=1), weight)
            rest = (reach * left - guess).clamp(min=0)
            reach = rest.sum() / (rest.sum() + 1 - reach)
            left = rest / rest.sum() if rest.sum() > 0 else left
            guess = own if point else guess.index_fill(0, torch.tensor(tokens[child]), 0)
            guess = guess / guess.sum()
        distribution[node] += weight * reach * left
        return weight * (1 - reach)

    one = torch.ones((), dtype=torch.float64)
    visit(0, one, one)
    return distribution


def ends_of(verdict: VerificationResult, vocabulary: int) -> Tensor:
    return verdict.path[:, -1] * vocabulary + verdict.tokens[:, -1]


@pytest.mark.parametrize(("rule", "name"), [(token_verification, "rrsw"), (block_verification, "traversal")])
def test_fixed_tree(rule: Rule, name: str) -> None:
    case = tables("fixed_tree_a")
    tokens, parents, p, q = case["tokens"], case["parents"], case["p"], case["q"]
    distribution = case[f"{name}/out"]
    assert torch.allclose(exact_distribution(tokens.tolist(), parents.tolist(), p, q, rule), distribution, atol=1e-12)

    def rows(x: Tensor) -> Tensor:
        return x.expand(ROUNDS, *x.shape)

    verdict = rule(Proposal(rows(tokens), rows(parents), 3, rows(q.float())), rows(p.float()), seeded())
    assert deviation(ends_of(verdict, p.shape[1]), distribution) < TOO_FAR
    chosen = looked_up(Proposal(rows(tokens), rows(parents), 3), rows(p.float()), seeded())
    assert deviation(ends_of(chosen, p.shape[1]), case["pointmass/out"]) < TOO_FAR


def random_tree(nodes: int, vocabulary: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Grow a tree by hanging nodes anywhere; families interleave and siblings differ."""
    tokens, parents = [0], [NO_PARENT]
    while len(tokens) < nodes:
        parent = int(torch.randint(len(tokens), (), generator=generator))
        token = int(torch.randint(vocabulary, (), generator=generator))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_the_first_allowed_child_is_taken_from_the_root_on(share: float) -> None:
    generator, rows, widest = seeded(5), 200, 9
    trees = [random_tree(1 + row % widest, 5, generator)[1] for row in range(rows)]
    parents = torch.tensor([tree + [PAD_NODE] * (widest - len(tree)) for tree in trees])
    allowed = torch.rand(rows, widest, generator=generator) < share
    ends = []
    for tree, may in zip(trees, allowed.tolist(), strict=True):
        node: int | None = 0
        while node is not None:
            last = node
            node = next((child for child, above in enumerate(tree) if above == last and may[child]), None)
        ends.append(last)
    proposal = Proposal(torch.zeros_like(parents), parents, widest - 1)
    p = torch.full((rows, widest, 1), 1.0)
    verdict = rules._first_accepted(proposal, allowed, lambda node: p[range(rows), node], torch.zeros(rows, widest))
    assert verdict.path.gather(1, verdict.counts[:, None] - 1)[:, 0].tolist() == ends
    assert len(set(ends)) > 4


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_another_tree_in_every_row(rule: Rule) -> None:
    generator, vocabulary, widest, copies = seeded(3), 5, 9, 20_000
    sizes = (9, 1, 7, 2, 9, 4)
    trees = [random_tree(size, vocabulary, generator) for size in sizes]
    p, q = torch.randn(2, len(sizes), widest, vocabulary, generator=generator).mul(1.5).softmax(-1)
    tokens = torch.tensor([tree + [0] * (widest - len(tree)) for tree, _ in trees])
    parents = torch.tensor([tree + [PAD_NODE] * (widest - len(tree)) for _, tree in trees])
    proposal = Proposal(
        *(x.repeat_interleave(copies, dim=0) for x in (tokens, parents)),
        max_depth=widest - 1,
        q=q.repeat_interleave(copies, dim=0),
    )
    verdict = rule(proposal, p.repeat_interleave(copies, dim=0), generator)
    for row, ends in enumerate(ends_of(verdict, vocabulary).split(copies)):
        assert deviation(ends, exact_distribution(*trees[row], p[row], q[row], rule)) < TOO_FAR


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_chosen_guesses_beside_drawn_ones(rule: Rule) -> None:
    """Any nodes of any tree are chosen, before or after siblings that were drawn."""
    generator, vocabulary, copies = seeded(5), 4, 10_000
    trees = [random_tree(8, vocabulary, generator) for _ in range(5)]
    p, q = torch.randn(2, len(trees), 8, vocabulary, generator=generator).mul(1.5).softmax(-1)
    chosen = torch.rand(len(trees), 8, generator=generator) < 0.5
    tokens, parents = (torch.tensor(part) for part in zip(*trees, strict=True))
    whole = (x.repeat_interleave(copies, dim=0) for x in (tokens, parents, q, chosen, p))
    tokens, parents, some_q, some_chosen, some_p = whole
    proposal = Proposal(tokens, parents, 7, some_q, deterministic=some_chosen)
    verdicts = [rule(one, some_p, generator) for one in (proposal, replace(proposal, deterministic=None))]
    right, wrong = (ends_of(verdict, vocabulary).split(copies) for verdict in verdicts)
    seen = []
    for row, (ends, others) in enumerate(zip(right, wrong, strict=True)):
        expected = exact_distribution(*trees[row], p[row], q[row], rule, chosen[row].tolist())
        assert deviation(ends, expected) < TOO_FAR
        seen.append(deviation(others, expected) > TOO_FAR)
    assert any(seen)


# --- Wrong on purpose: the bench must see it ------------------------------------------------------------------------


def block(proposal: Proposal, p: Tensor, generator: torch.Generator, mistake: str | None = None) -> VerificationResult:
    """Verify chains by blocks as arXiv 2403.10444 writes it down, or with a ``mistake`` that somebody shipped."""
    assert proposal.q is not None
    rows, last = torch.arange(len(p)), proposal.max_depth
    reach, accepted = torch.ones(len(p)), torch.zeros(len(p), dtype=torch.long)
    stopped = torch.zeros(len(p), dtype=torch.bool)
    distributions = [p[:, 0] - proposal.q[:, 0]]
    for i in range(1, last + 1):
        token = proposal.tokens[:, i]
        reach = (reach * p[rows, i - 1, token] / proposal.q[rows, i - 1, token]).clamp(max=1)
        chance = reach
        if i < last:
            rest = (reach[:, None] * p[:, i] - proposal.q[:, i]).clamp(min=0)
            chance = (rest.sum(1) / (rest.sum(1) + 1 - reach)).nan_to_num(nan=1.0)
            distributions.append(p[:, i] - proposal.q[:, i] if mistake == "residual of the token rule" else rest)
        taken = torch.rand(len(p), generator=generator) <= chance
        if mistake == "stop at the first rejection":
            stopped |= ~taken
            taken = taken & ~stopped
        accepted = torch.where(taken, i, accepted)
    distribution = torch.stack([*distributions, p[:, last]], dim=1)[rows, accepted].clamp(min=0)
    token = draw(torch.where(distribution.sum(1, keepdim=True) > 0, distribution, p[rows, accepted]), generator)
    tokens = torch.cat([proposal.tokens[:, 1:], token[:, None]], dim=1).scatter(1, accepted[:, None], token[:, None])
    return VerificationResult(torch.arange(last + 1).clamp(max=accepted[:, None]), tokens, accepted + 1)


def test_block_twin_is_right() -> None:
    proposal, p = propose("chain_v3_l3")
    verdict = block(proposal, p, seeded(1))
    assert deviation(outcomes_of(verdict, p.shape[-1]), distribution_of("chain_v3_l3", "block")) < TOO_FAR
    assert lossless("chain_v3_l3", block)


@pytest.mark.parametrize("mistake", ["stop at the first rejection", "residual of the token rule"])
def test_wrong_block_rule_is_seen(mistake: str) -> None:
    assert not lossless("chain_v3_l3", partial(block, mistake=mistake))


@pytest.mark.parametrize("rule", [token_verification, block_verification])
@pytest.mark.parametrize("name", ["chain_v3_l3", "tree_v4_k2_l2"])
def test_chosen_guesses_verified_as_if_drawn_are_seen(name: str, rule: Rule) -> None:
    assert not lossless(name, rule, best)


@pytest.mark.parametrize("shrinks", [True, False])
def test_siblings_weighed_by_a_distribution_that_forgets_to_shrink_are_seen(shrinks: bool) -> None:
    def one_by_one(proposal: Proposal, p: Tensor, generator: torch.Generator) -> VerificationResult:
        """Verify the two children of the root as a chain of one guess each, the second against what is left."""
        assert proposal.q is not None
        tokens, p, q = proposal.tokens, p[:, :2], proposal.q[:, :1]
        first = token_verification(Proposal.chain(tokens[:, 0], tokens[:, 1:2], q=q), p, generator)
        left = torch.cat([(p[:, :1] - q).relu(), p[:, 1:]], dim=1)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
        left = left / left.sum(-1, keepdim=True)
        if shrinks:
            q = q.scatter(2, tokens[:, None, 1:2], 0)
            q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        guess = torch.cat([left[:, :1], p_after(tokens[:, 2:3])], dim=1)
        second = token_verification(Proposal.chain(tokens[:, 0], tokens[:, 2:3], q=q), guess, generator)
        taken = first.counts > 1
        text = torch.where(taken[:, None], first.tokens, second.tokens)
        return VerificationResult(
            first.path, torch.cat([text, text[:, :1]], dim=1), torch.where(taken, 2, second.counts)
        )

    def p_after(text: Tensor) -> Tensor:
        return after(tables("tree_v4_k2_l2")["p/len1"], text).float()[:, None]

    assert lossless("tree_v4_k2_l2", one_by_one) == shrinks


def test_guesses_dropped_after_they_were_drawn_are_seen() -> None:
    def dropping(proposal: Proposal, p: Tensor, generator: torch.Generator) -> VerificationResult:
        dropped = torch.nn.functional.pad((proposal.tokens[:, 1:] == 0).cumsum(1) > 0, (1, 0))
        return block_verification(
            replace(proposal, parents=proposal.parents.masked_fill(dropped, PAD_NODE)), p, generator
        )

    assert not lossless("chain_v3_l3", dropping)


def test_one_rule_is_not_another() -> None:
    proposal, p = propose("chain_v3_l3")
    assert (
        deviation(outcomes_of(block_verification(proposal, p, seeded(1)), 3), distribution_of("chain_v3_l3", "token"))
        > TOO_FAR
    )


# --- Looking up ------------------------------------------------------------------------------------------------------


def test_follow_against_a_walk_by_hand() -> None:
    generator, vocabulary = seeded(), 3
    trees = [random_tree(size, vocabulary, generator) for size in (8, 8, 5, 3, 1, 8)] * 5
    for tokens, parents in trees:  # a copy of node 1 and what hangs on it must not matter
        tokens += [tokens[1], 0] if len(tokens) == 8 else [0] * (10 - len(tokens))
        parents += [parents[1], 8] if len(parents) == 8 else [PAD_NODE] * (10 - len(parents))
    chosen = torch.randint(vocabulary, (len(trees), 10), generator=generator)
    calls = []

    def choose(node: Tensor) -> Tensor:
        calls.append(node)
        return chosen.gather(1, node[:, None])[:, 0]

    verdict = verify_target_samples(
        Proposal(*(torch.tensor(x) for x in zip(*trees, strict=True)), max_depth=9), choose
    )
    assert len(calls) <= 10
    for row, (tokens, parents) in enumerate(trees):
        path, emitted = [0], [int(chosen[row, 0])]
        while children := [
            i for i, token in enumerate(tokens) if parents[i] == path[-1] and i and token == emitted[-1]
        ]:
            path.append(children[0])
            emitted.append(int(chosen[row, path[-1]]))
        assert verdict.counts[row] == len(path)
        assert verdict.path[row].tolist() == path + [path[-1]] * (10 - len(path))
        assert verdict.tokens[row].tolist() == emitted + [emitted[-1]] * (10 - len(path))
    assert {1, 2, 3} <= set(verdict.counts.tolist())


def test_follow_keeps_the_token_of_a_row_that_stopped() -> None:
    proposal = Proposal.chain(torch.zeros(2, dtype=torch.long), torch.tensor([[1, 1], [1, 1]]))
    tokens = iter(torch.tensor([[1, 2], [1, 1], [3, 1]]))  # by call: row 1 says 2 first and must not be asked again
    verdict = verify_target_samples(proposal, lambda node: next(tokens))
    assert verdict.counts.tolist() == [3, 1]
    assert verdict.tokens.tolist() == [[1, 1, 3], [2, 2, 2]]


# --- Edges -----------------------------------------------------------------------------------------------------------


def chain_of(p: Tensor, q: Tensor, copies: int = 500) -> tuple[Proposal, Tensor]:
    """Repeat one distribution of the target and one of the draft at every node of chains of three drawn guesses."""
    tokens = torch.multinomial(q.expand(copies, -1), 3, replacement=True, generator=seeded())
    root = torch.zeros(copies, dtype=torch.long)
    return Proposal.chain(root, tokens, q=q.expand(copies, 3, -1)), p.expand(copies, 4, -1)


@pytest.mark.parametrize("rule", [token_verification, block_verification])
@pytest.mark.parametrize("is_chain", [True, False])
class TestEdges:
    def test_same_distributions_accept_everything(self, rule: Rule, is_chain: bool) -> None:
        distribution = torch.randn(50, generator=seeded()).softmax(-1)
        proposal, p = chain_of(distribution, distribution)
        assert (rule(replace(proposal, is_chain=is_chain), p, seeded()).counts == 4).all()

    def test_disjoint_distributions_accept_nothing(self, rule: Rule, is_chain: bool) -> None:
        proposal, p = chain_of(torch.tensor([0.5, 0.5, 0, 0]), torch.tensor([0, 0, 0.3, 0.7]))
        verdict = rule(replace(proposal, is_chain=is_chain), p, seeded())
        assert (verdict.counts == 1).all() and (verdict.tokens[:, 0] <= 1).all() and (verdict.path == 0).all()

    def test_certain_target(self, rule: Rule, is_chain: bool) -> None:
        proposal, p = chain_of(torch.tensor([0, 1.0, 0]), torch.tensor([0.2, 0.6, 0.2]))
        verdict = rule(replace(proposal, is_chain=is_chain), p, seeded())
        hits = (proposal.tokens[:, 1:] == 1).long().cumprod(1).sum(1)
        assert torch.equal(verdict.counts, hits + 1) and (verdict.tokens == 1).all()

    def test_rows_without_guesses(self, rule: Rule, is_chain: bool) -> None:
        proposal, p = chain_of(torch.tensor([0.1, 0.9]), torch.tensor([0.5, 0.5]), copies=20_000)
        parents = proposal.parents.masked_fill(torch.arange(4) > 0, PAD_NODE)
        verdict = rule(replace(proposal, parents=parents, is_chain=is_chain), p, seeded())
        assert (verdict.counts == 1).all()
        assert deviation(verdict.tokens[:, 0], torch.tensor([0.1, 0.9])) < TOO_FAR

    def test_a_coin_of_zero_accepts_nothing_impossible(
        self, rule: Rule, is_chain: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype))
        proposal, p = chain_of(torch.tensor([0, 0.4, 0.6]), torch.tensor([1.0, 0, 0]))
        verdict = rule(replace(proposal, is_chain=is_chain), p)
        assert (verdict.counts == 1).all() and (verdict.tokens == 1).all()

    def test_the_largest_coin_accepts_what_is_certain(
        self, rule: Rule, is_chain: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, 1 - 2**-53, dtype=dtype))
        distribution = torch.tensor([0.3, 0.7, 0])
        proposal, p = chain_of(distribution, distribution)
        verdict = rule(replace(proposal, is_chain=is_chain), p)
        assert (verdict.counts == 4).all() and (verdict.tokens[:, -1] == 1).all()

    def test_seed(self, rule: Rule, is_chain: bool) -> None:
        proposal, p = chain_of(torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.4, 0.4, 0.2]))
        proposal = replace(proposal, is_chain=is_chain)
        once, again, other = (rule(proposal, p, seeded(seed)).tokens for seed in (1, 1, 2))
        assert torch.equal(once, again) and not torch.equal(once, other)

    def test_nothing_waits_for_the_device(self, rule: Rule, is_chain: bool) -> None:
        """Tensors without data cannot be read, so a rule that reads one on the CPU raises here."""
        proposal, p = chain_of(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
        assert proposal.q is not None
        there = Proposal(
            proposal.tokens.to("meta"), proposal.parents.to("meta"), 3, proposal.q.to("meta"), is_chain, (-1, 0, 1, 2)
        )
        assert rule(there, p.to("meta")).tokens.shape == (500, 4)

    @pytest.mark.gpu
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_on_a_gpu(self, rule: Rule, is_chain: bool, deterministic: bool) -> None:
        case = tables("fixed_tree_a")
        tokens, parents, p, q = (case[key].cuda() for key in ("tokens", "parents", "p", "q"))
        if is_chain:  # the distribution of its first branch
            tokens, parents, p, q = tokens[[0, 1, 4, 7]], torch.arange(-1, 3).cuda(), p[[0, 1, 4, 7]], q[[0, 1, 4]]
        rows = [x.expand(ROUNDS, *x.shape) for x in (tokens, parents, q.float(), p.float())]
        generator = torch.Generator("cuda").manual_seed(0)
        proposal = Proposal(rows[0], rows[1], 3, rows[2], is_chain, tuple(parents.tolist()))
        rule(proposal, rows[3], generator)  # the first time a shape is seen, it goes to the device
        torch.use_deterministic_algorithms(deterministic)
        torch.cuda.set_sync_debug_mode("error")
        try:
            verdict = rule(proposal, rows[3], generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.use_deterministic_algorithms(False)
        q = torch.cat([q, q[:1]])[: len(p)]
        distribution = exact_distribution(tokens.tolist(), parents.tolist(), p.cpu(), q.cpu(), rule)
        assert deviation(ends_of(verdict, p.shape[1]).cpu(), distribution) < TOO_FAR


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_sums_by_doubling_are_running_sums(count: int) -> None:
    whole = torch.randint(0, 9, (3, count), generator=seeded()).double()
    assert torch.equal(sums_by_doubling(whole), whole.cumsum(-1))


def test_siblings_that_were_never_drawn_are_passed_over() -> None:
    """A one-hot draft has no second child to give: whatever stands there must not bend the distribution."""
    rounds, p = 60_000, torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.tensor([0, 1, 1, 2]).expand(rounds, -1)
    q = torch.tensor([0, 1.0, 0]).expand(rounds, 1, -1)
    proposal = Proposal(tokens, torch.tensor([-1, 0, 0, 0]).expand(rounds, -1), 1, q)
    for rule in (token_verification, block_verification):
        verdict = rule(proposal, p.expand(rounds, 4, -1), seeded())
        assert deviation(verdict.tokens[:, 0], p) < TOO_FAR
        assert (verdict.path < 2).all()


def test_tiny_q_does_not_overflow() -> None:
    q = torch.tensor([1.0, 1e-39])
    proposal = Proposal.chain(torch.zeros(1, dtype=torch.long), torch.tensor([[0, 1, 0]]), q=q.expand(1, 3, -1))
    verdict = block_verification(proposal, torch.tensor([0, 1.0]).expand(1, 4, -1), seeded())
    assert verdict.counts.tolist() == [1] and verdict.tokens.tolist() == [[1, 1, 1, 1]]


def test_distributions_that_differ_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding leaves nothing of ``p - q``, the next token comes from ``p`` and the path stays."""
    rounds = 2000
    p = torch.rand(rounds, 4, 5, generator=seeded()).index_fill(2, torch.tensor(0), 0)
    p = p / p.sum(-1, keepdim=True)
    q = torch.where(torch.rand(rounds, 3, 5, generator=seeded(1)) < 0.5, p[:, :3], p[:, :3] * (1 + 2**-23))
    tokens = torch.randint(1, 5, (rounds, 3), generator=seeded(2))
    proposal = Proposal.chain(torch.zeros(rounds, dtype=torch.long), tokens, q=q)
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, 1 - 2**-53, dtype=dtype))
    one, other = token_verification(proposal, p), block_verification(proposal, p)
    assert (one.tokens > 0).all() and (other.tokens > 0).all()
    assert (other.counts >= one.counts).all() and set(one.counts.tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_no_guesses(rule: Rule) -> None:
    p = torch.tensor([0.2, 0.8]).expand(20_000, 1, -1)
    nothing = Proposal.nothing(torch.zeros(20_000, dtype=torch.long))
    for verdict in (looked_up(nothing, p, seeded()), rule(replace(nothing, q=p[:, :0]), p, seeded())):
        assert verdict.tokens.shape == verdict.path.shape == (20_000, 1) and (verdict.counts == 1).all()
        assert deviation(verdict.tokens[:, 0], p[0, 0]) < TOO_FAR


def test_every_rule_that_a_config_can_name_is_in_the_table() -> None:
    assert set(RULES) == {*get_args(VerificationRule), *get_args(AcceptanceRule)} - {"lossless"}
    assert rule_for(SpeculationConfig(verification="token")).sampled is token_verification
    assert rule_for(SpeculationConfig(verification="block")).sampled is block_verification
    assert rule_for(SpeculationConfig(acceptance="typical")) is RULES["typical"]


@pytest.mark.parametrize("name", ["verification", "acceptance"])
def test_an_unknown_rule_is_an_error(name: str) -> None:
    config = SpeculationConfig()
    object.__setattr__(config, name, "blok")  # past its own checks, as a new name without an entry would be
    with pytest.raises(ValueError, match=r"'blok'.*'block'"):
        rule_for(config)


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_chosen_guesses_are_refused(rule: Rule) -> None:
    chosen = Proposal.chain(torch.zeros(1, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="not sampled from a q"):
        rule(chosen, torch.full((1, 3, 2), 0.5), seeded())


# --- One draw --------------------------------------------------------------------------------------------------------


def test_draw_has_the_distribution() -> None:
    weights = torch.tensor([0, 3.0, 0, 1e-3, 2, 0.5, 0])  # need not sum to one
    tokens = draw(weights.expand(400, 500, -1), seeded())
    assert tokens.shape == (400, 500)
    assert deviation(tokens.flatten(), weights / weights.sum()) < TOO_FAR
    assert draw(weights, seeded()).shape == ()


@pytest.mark.parametrize("coin", [0, 0.5, 1 - 2**-53])
def test_draw_never_gives_the_impossible(coin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, coin, dtype=dtype))
    distributions = torch.tensor([[0, 0, 1, 0], [0, 1e-38, 0, 0], [0, 1e-30, 1, 0], [0.5, 0, 0, 0.5]])
    assert (distributions.gather(1, draw(distributions)[:, None]) > 0).all()


def test_draw_says_where_nothing_can_be_drawn() -> None:
    distributions = torch.tensor([[0.0, 0, 0], [torch.nan, torch.nan, torch.nan], [0.5, torch.nan, 0.5], [0, 1, 0]])
    assert draw(distributions, seeded()).tolist() == [-1, -1, -1, 1]


def test_draw_reaches_the_tail_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = torch.full((150_001,), 1e-9)
    distribution[0] = 1  # in float32, 1 + 1e-9 is 1: a rounded sum would never move again
    coin = float(distribution[:75_001].double().sum() / distribution.double().sum())
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, coin, dtype=dtype))
    assert abs(int(draw(distribution)) - 75_001) <= 1


def test_match_is_follow_with_the_picks_known() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 5, (400,), generator=generator)
    root, guesses = torch.zeros(400, dtype=torch.long), torch.randint(0, 2, (400, 4), generator=generator)
    chain = Proposal.chain(root, guesses, counts)
    picks = torch.randint(0, 2, (400, 5), generator=generator)
    expected = verify_target_samples(chain, lambda node: picks.gather(1, node[:, None])[:, 0])
    found = verify_against_tokens(chain, picks)
    assert torch.equal(found.path, expected.path)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.counts, expected.counts)
    assert set(found.counts.tolist()) == {1, 2, 3, 4, 5}
