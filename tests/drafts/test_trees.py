"""Trees that drafters grow, against slow twins that walk a table of distributions by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from twins import path_to, paths_of

from hf_spec import SpeculationConfig, sampling
from hf_spec.drafts.trees import bushy, grow
from hf_spec.proposal import PAD_NODE, Proposal
from hf_spec.sampling import draw_distinct, largest, likeliest
from hf_spec.verify.rules import block_verification

VOCABULARY = 6


class TableDraft:
    """A draft whose distribution after a path of guesses is a fixed random table, different in each row."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed
        self.root = torch.arange(rows) % VOCABULARY
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in range(rows)]  # of each node of the forest
        self.asked = 0  # nodes that were asked last

    def log_probs(self, row: int, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % (1 << 31))
        return (2 * torch.randn(VOCABULARY, generator=generator)).log_softmax(-1)

    def first(self) -> Tensor:
        return torch.stack([self.log_probs(row, ()) for row in range(self.rows)])

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        if ancestors is None:  # a chain
            assert parents is None
            parents = None if depth == 1 else torch.zeros_like(tokens)
            ancestors = torch.ones(self.rows, 1, len(self.paths[0]) + 1, dtype=torch.bool)
        assert (parents is None) == (depth == 1)
        for row in range(self.rows):
            last = self.paths[row][len(self.paths[row]) - self.asked :]
            above = [()] * tokens.shape[1] if parents is None else [last[place] for place in parents[row].tolist()]
            for token, path, seen in zip(tokens[row].tolist(), above, ancestors[row], strict=True):
                self.paths[row].append((*path, token))
                assert len(path) + 1 == depth
                mine = [i for i, above in enumerate(seen.tolist()) if above]
                # The ancestors a drafter is told are the nodes of the path, in order, and the node itself.
                assert [self.paths[row][i][-1] for i in mine[:-1]] == list(self.paths[row][-1][:-1])
        self.asked = new = tokens.shape[1]
        return torch.stack(
            [torch.stack([self.log_probs(row, p) for p in self.paths[row][-new:]]) for row in range(self.rows)]
        )

    def grow(self, limit: int, sample: bool = False, **config: object) -> Proposal:
        return grow(self.root, self.first(), self.step, SpeculationConfig(**config), limit, sample)  # type: ignore[arg-type]


def test_a_drawn_tree_with_a_gap_in_its_ranks() -> None:
    """Whatever its rank is called, the only child is the first one drawn: it follows q, and not what q left over."""
    rows, log_probs = 4000, torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    root = torch.zeros(rows, dtype=torch.long)
    torch.manual_seed(0)
    for tree, parents in {((1,),): [-1, 0], ((2,), (2, 3)): [-1, 0, 1], ((1,), (4,)): [-1, 0, 0]}.items():
        config = SpeculationConfig(tree=tree)
        proposal = grow(root, log_probs.expand(rows, -1), lambda *_: log_probs.expand(rows, 1, -1), config, 2, True)
        assert proposal.parents[0].tolist() == parents
        shares = torch.bincount(proposal.tokens[:, 1], minlength=4) / rows
        assert (shares - log_probs.exp()).abs().max() < 0.04  # five standard deviations


def test_a_chosen_chain_is_greedy() -> None:
    draft = TableDraft(3)
    proposal = draft.grow(4)
    for row in range(3):
        path: tuple[int, ...] = ()
        for _ in range(4):
            path = (*path, int(draft.log_probs(row, path).argmax()))
        assert tuple(proposal.tokens[row, 1:].tolist()) == path
    assert proposal.q is None
    assert proposal.is_chain


def test_a_drawn_chain_carries_the_distribution_of_every_guess() -> None:
    draft = TableDraft(4)
    proposal = draft.grow(3, sample=True)
    assert proposal.q is not None
    for row in range(4):
        path: tuple[int, ...] = ()
        for depth, token in enumerate(proposal.tokens[row, 1:].tolist()):
            torch.testing.assert_close(proposal.q[row, depth], draft.log_probs(row, path).exp())
            path = (*path, token)


def test_a_chain_ends_after_a_guess_without_confidence() -> None:
    draft = TableDraft(16)
    proposal = draft.grow(5, confidence_threshold=0.5)
    lengths = set()
    for row in range(16):
        path: tuple[int, ...] = ()
        for _ in range(5):
            log_probs = draft.log_probs(row, path)
            path = (*path, int(log_probs.argmax()))
            if log_probs.max().exp() < 0.5:
                break
        assert paths_of(proposal, row) == [path[:end] for end in range(1, len(path) + 1)]
        lengths.add(len(path))
    assert len(lengths) > 2  # otherwise this would show little


@pytest.mark.parametrize("has_head", [False, True])
def test_a_chain_goes_on_after_a_guess_as_sure_as_is_asked_for(has_head: bool) -> None:
    root, even = torch.zeros(2, dtype=torch.long), torch.tensor([math.log(0.5)] * 2).expand(2, -1)
    confidence = (lambda: torch.full((2,), 0.5)) if has_head else None
    config = SpeculationConfig(confidence_threshold=0.5)
    proposal = grow(root, even, lambda *_: even[:, None], config, 4, False, confidence)
    assert proposal.present.all() and proposal.max_depth == 4


@pytest.mark.parametrize(("top_k", "nodes", "depth"), [(2, 5, 3), (3, 12, 4), (6, 40, 3), (4, 3, 2)])
def test_a_dynamic_tree_keeps_the_most_probable_paths(top_k: int, nodes: int, depth: int) -> None:
    draft = TableDraft(3)
    proposal = draft.grow(depth, tree="dynamic", tree_topk=top_k, num_tree_tokens=nodes)
    for row in range(3):
        assert sorted(paths_of(proposal, row)) == sorted(_dynamic_by_hand(draft, row, top_k, nodes, depth))


def test_no_more_paths_are_followed_than_nodes_are_kept() -> None:
    draft = TableDraft(3)
    draft.grow(3, tree="dynamic", tree_topk=10**9, num_tree_tokens=4)
    assert draft.asked == 4


def _dynamic_by_hand(draft: TableDraft, row: int, top_k: int, nodes: int, depth: int) -> list[tuple[int, ...]]:
    """EAGLE-2 with lists: follow the best paths of each depth, then keep the best of all."""
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        found = {}
        for path in frontier:
            values, tokens = draft.log_probs(row, path).topk(top_k)
            found |= {
                (*path, token): scores.get(path, 0.0) + value
                for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
            }
        scores |= found
        frontier = sorted(found, key=found.__getitem__, reverse=True)[:top_k]
    return sorted(scores, key=scores.__getitem__, reverse=True)[:nodes]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 30])
def test_a_dynamic_tree_of_sure_guesses_keeps_every_parent(nodes: int) -> None:
    """Behind a guess of probability one a path is as probable as without it."""

    def log_probs(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        return logits.scatter(-1, (tokens + 1)[..., None] % VOCABULARY, 40.0).log_softmax(-1)

    root = torch.zeros(1, dtype=torch.long)
    config = SpeculationConfig(tree="dynamic", tree_topk=3, num_tree_tokens=nodes)
    found = paths_of(grow(root, log_probs(root), lambda tokens, *_: log_probs(tokens), config, 6, sample=False), 0)
    sure = (1, 2, 3, 4, 5, 0)
    assert {sure[:end] for end in range(1, 1 + min(nodes, len(sure)))} <= set(found)
    assert all(path[:-1] in {(), *found} for path in found)
    assert len(set(found)) == len(found) == nodes


def test_a_static_tree_takes_the_ranks_it_names() -> None:
    paths = [(0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0)]
    draft = TableDraft(3)
    proposal = draft.grow(9, tree=paths)
    for row in range(3):
        wanted = []
        for ranks in paths:
            path: tuple[int, ...] = ()
            for rank in ranks:
                path = (*path, int(draft.log_probs(row, path).topk(VOCABULARY).indices[rank]))
            wanted.append(path)
        assert sorted(paths_of(proposal, row)) == sorted(wanted)
    assert proposal.max_depth == 3


def test_a_static_tree_is_cut_where_the_text_must_end() -> None:
    proposal = TableDraft(2).grow(1, tree=[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    assert [len(path) for path in paths_of(proposal, 0)] == [1, 1]


def test_ranks_beyond_the_vocabulary_are_absent() -> None:
    proposal = TableDraft(2).grow(2, tree=[(VOCABULARY + 3,), (0,)])
    assert len(paths_of(proposal, 0)) == 1
    assert int(proposal.tokens.max()) < VOCABULARY


class NarrowDraft(TableDraft):
    """A draft of which one or two tokens are possible after every path."""

    def log_probs(self, row: int, path: tuple[int, ...]) -> Tensor:
        scores = super().log_probs(row, path)
        return scores.masked_fill(scores < scores.topk(1 + (row + sum(path)) % 2).values[-1], -torch.inf)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("tree", ["dynamic", "sampled", [(0,), (1,), (2,), (0, 0), (0, 2), (1, 1), (2, 0), (2, 0, 0)]])
def test_nothing_follows_a_guess_that_cannot_be(tree: object, sample: bool) -> None:
    """Neither it nor what would stand after it is in the tree."""
    draft, sizes = NarrowDraft(8), set()
    torch.manual_seed(0)
    proposal = draft.grow(3, sample=sample, tree=tree, tree_topk=3, num_tree_tokens=12)
    for row in range(8):
        paths = paths_of(proposal, row)
        for path in paths:
            assert path[:-1] in [(), *paths]
            assert draft.log_probs(row, path[:-1])[path[-1]] > -torch.inf
        sizes.add(len(paths))
    assert len(sizes) > 1


@pytest.mark.parametrize("tree", ["sampled", [(0,), (2,), (2, 5), (0, 0), (0, 1), (0, 1, 3)]])
def test_drawn_siblings_differ_and_carry_their_parents_distribution(tree: object) -> None:
    draft = TableDraft(5)
    proposal = draft.grow(3, sample=True, tree=tree, tree_topk=3, num_tree_tokens=14)
    assert proposal.q is not None
    for row in range(5):
        found = paths_of(proposal, row)
        assert len(set(found)) == len(found)
        for node, parent in enumerate(proposal.parents[row].tolist()):
            if node and parent != PAD_NODE:
                assert parent < proposal.q.shape[1]
                path = path_to(proposal, row, parent)
                torch.testing.assert_close(proposal.q[row, parent], draft.log_probs(row, path).exp())


@pytest.mark.parametrize("least", [1, 1 << 30], ids=["coins", "Gumbel variables"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_drawn_siblings_follow_the_distribution_without_replacement(
    dtype: torch.dtype, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "widest_float", lambda device: dtype)
    monkeypatch.setattr(sampling, "BY_COIN_FROM", least)
    log_probs = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()
    rounds = 60_000
    torch.manual_seed(0)
    drawn = draw_distinct(log_probs.expand(rounds, -1), 2)
    counts = Counter(map(tuple, drawn.tolist()))
    p = log_probs.exp().tolist()
    statistic = 0.0
    for first, second in itertools.permutations(range(3), 2):
        expected = rounds * p[first] * p[second] / (1 - p[first])
        statistic += (counts.pop((first, second), 0) - expected) ** 2 / expected
    assert not counts  # nothing of probability zero
    assert statistic < 25.7  # 5 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("vocabulary", [5, 64, 130, 1000])
@pytest.mark.parametrize("many", [1, 1 << 60], ids=["parts", "whole"])
def test_evenly_spaced_coins_give_each_token_its_share(
    vocabulary: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BY_COIN_FROM", 1)
    monkeypatch.setattr(sampling, "IN_PARTS_FROM", many)
    torch.manual_seed(0)
    p = torch.rand(vocabulary) ** 4
    p[[vocabulary // 2, -1]] = 0
    p, rounds = p / p.sum(), 20_000
    coins = (torch.arange(rounds, dtype=torch.float64)[:, None] + 0.5) / rounds
    drawn = torch.cat([draw_distinct(p.log().expand(len(part), -1), 1, part) for part in coins.split(1000)])
    shares = torch.bincount(drawn[:, 0], minlength=vocabulary)
    assert (shares - rounds * p).abs().max() < 1.01  # a coin more or less at each end
    assert not shares[p == 0].any()


def test_siblings_beyond_what_is_possible_have_probability_zero() -> None:
    log_probs = torch.full((7, 3, 2000), -torch.inf)
    log_probs[..., -1], log_probs[..., 5] = math.log(0.25), math.log(0.75)
    drawn = draw_distinct(log_probs, 4)
    assert (drawn[..., :2].sort().values == torch.tensor([5, 1999])).all()
    assert (log_probs.gather(2, drawn[..., 2:]) == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_token_is_the_first_of_equals(dtype: torch.dtype) -> None:
    scores = torch.randint(-9, 9, (4, 6, 3000)).to(dtype)
    assert torch.equal(likeliest(scores), scores.argmax(-1))
    first = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(likeliest(scores), first)
    value, token = largest(scores)
    assert torch.equal(value, scores.amax(-1)) and torch.equal(token, first)


def test_a_nan_is_larger_than_all_and_minus_infinity_than_none() -> None:
    scores = torch.randn(4, 6, 3000)
    scores[1, 2, 2999] = scores[3, 0, 0] = torch.nan
    scores[2, 5], scores[0, 0, 70] = -torch.inf, torch.inf
    value, token = largest(scores)
    assert torch.equal(value.isnan().nonzero(), torch.tensor([[1, 2], [3, 0]]))
    assert token[1, 2] == 2999 and token[3, 0] == 0 and token[2, 5] == 0 and token[0, 0] == 70
    assert value[2, 5] == -torch.inf and value[0, 0] == torch.inf


@pytest.mark.parametrize(("width", "nodes", "depth"), [(10, 60, 5), (2, 7, 3), (1, 9, 4), (3, 1, 1)])
def test_a_bushy_tree_spends_its_nodes_within_its_bounds(width: int, nodes: int, depth: int) -> None:
    paths = bushy(width, nodes, depth)
    assert len(paths) == min(nodes, sum(width**level for level in range(1, depth + 1)))
    assert all(len(path) <= depth and max(path) < width for path in paths)
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])


@pytest.mark.parametrize("tree", [None, "dynamic", "sampled", [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0)]])
@pytest.mark.parametrize("sample", [False, True])
def test_nothing_waits_for_the_device(tree: object, sample: bool) -> None:
    """Tensors without data cannot be read, so that reading one on the CPU raises here."""
    log_probs = torch.empty(2, VOCABULARY, device="meta")
    config = SpeculationConfig(tree=tree)  # type: ignore[arg-type]
    root = torch.zeros(2, dtype=torch.long, device="meta")
    proposal = grow(
        root, log_probs, lambda new, *_: log_probs[:, None].expand(-1, new.shape[1], -1), config, 3, sample
    )
    assert proposal.tokens.is_meta and proposal.tokens.shape[1] > 3
    if proposal.q is not None and proposal.shape is not None:  # whose shape the verifier need not ask for
        assert block_verification(
            proposal, torch.empty(2, proposal.tokens.shape[1], VOCABULARY, device="meta")
        ).path.is_meta
