"""``tree="dynamic"`` when sampling: all draws are enumerated, and the text has the target's distribution.

Beside it the tempting wrong version: draw a whole tree, then keep its best guesses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import prompts
from test_trees import TableDraft
from test_verification import exact_distribution
from torch import Tensor
from twins import draft, path_to, paths_of, target

from hf_spec import SpeculationConfig
from hf_spec.drafts import drawn_trees, trees
from hf_spec.drafts.drawn_trees import _imagined
from hf_spec.proposal import PAD_NODE, Proposal
from hf_spec.verify.rules import block_verification, token_verification

Path = tuple[int, ...]


class SmallDraft(TableDraft):
    """Know ``vocabulary`` tokens; after a path the same distribution in every row."""

    def __init__(self, rows: int, vocabulary: int, seed: int = 1) -> None:
        super().__init__(rows, seed)
        self.root, self.vocabulary = torch.zeros(rows, dtype=torch.long), vocabulary

    def log_probs(self, row: int, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % (1 << 31))
        return (2.5 * torch.randn(self.vocabulary, generator=generator)).log_softmax(-1)


class EveryDraw:
    """Draw in place of ``draw_distinct``: each row is one way in which all draws of a tree can come out."""

    def __init__(self, vocabulary: int, siblings: int, draws: int) -> None:
        self.orders = torch.tensor(list(itertools.permutations(range(vocabulary), siblings)))
        self.ways = torch.tensor(list(itertools.product(range(len(self.orders)), repeat=draws)))  # (rows, draws)
        self.weights = torch.ones(len(self.ways), dtype=torch.float64)
        self.done = 0

    def __call__(self, log_probs: Tensor, count: int, noise: None = None) -> Tensor:
        new = log_probs.shape[1]
        drawn = self.orders[self.ways[:, self.done : self.done + new]][:, :, :count]  # (rows, new, count)
        self.done += new
        own = log_probs.double().softmax(-1).gather(2, drawn)
        self.weights *= (own / (1 - own.cumsum(2) + own)).prod(2).prod(1)
        return drawn


def distribution_of(proposal: Proposal, weights: Tensor, vocabulary: int, length: int, rule: Any) -> Counter[Path]:
    """Enumerate how probably each text of ``length`` comes out of a verified step that the target goes on from."""
    target, texts = SmallDraft(1, vocabulary, seed=5), Counter[Path]()

    def go_on(text: Path, share: float) -> None:
        if len(text) == length:
            texts[text] += share
            return
        for token, chance in enumerate(target.log_probs(0, text).exp().tolist()):
            go_on((*text, token), share * chance)

    assert proposal.q is not None
    leaves = proposal.tokens.shape[1] - proposal.q.shape[1]
    q = torch.nn.functional.pad(proposal.q, (0, 0, 0, leaves))
    for row, weight in enumerate(weights.tolist()):
        paths = [
            path_to(proposal, row, node) if proposal.present[row, node] else ()
            for node in range(proposal.tokens.shape[1])
        ]
        p = torch.stack([target.log_probs(0, path).exp() for path in paths])
        ends = exact_distribution(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), p, q[row], rule)
        for node, token in (ends > 0).nonzero().tolist():
            go_on((*paths[node], token), weight * float(ends[node, token]))
    return texts


def distance(texts: Counter[Path], vocabulary: int, length: int) -> float:
    """Return how far the probability of a text is from the target's at most."""
    target, far = SmallDraft(1, vocabulary, seed=5), 0.0
    for text in itertools.product(range(vocabulary), repeat=length):
        chance = sum(float(target.log_probs(0, text[:end])[text[end]]) for end in range(length))
        far = max(far, abs(texts[text] - float(torch.tensor(chance, dtype=torch.float64).exp())))
    return far


def enumerated(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    vocabulary: int,
    siblings: int,
    draws: int,
    limit: int,
    config: dict[str, Any],
) -> tuple[Proposal, Tensor]:
    every = EveryDraw(vocabulary, siblings, draws)
    monkeypatch.setattr(module, "draw_distinct", every)
    proposal = SmallDraft(len(every.ways), vocabulary).grow(limit, sample=True, **config)
    assert every.done == draws
    assert float(every.weights.sum()) == pytest.approx(1)
    return proposal, every.weights


@pytest.mark.parametrize("rule", [block_verification, token_verification])
@pytest.mark.parametrize(
    ("vocabulary", "top_k", "nodes", "limit", "draws"),
    [(3, 2, 4, 2, 3), (3, 3, 6, 2, 4), (2, 2, 5, 3, 5)],
)
def test_the_text_has_the_targets_distribution(
    vocabulary: int,
    top_k: int,
    nodes: int,
    limit: int,
    draws: int,
    rule: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"tree": "dynamic", "tree_topk": top_k, "num_tree_tokens": nodes}
    given = enumerated(monkeypatch, drawn_trees, vocabulary, min(top_k, vocabulary), draws, limit, config)
    assert len({tuple(parents) for parents in given[0].parents.tolist()}) > 1, "the shape follows from the draws"
    assert distance(distribution_of(*given, vocabulary, limit + 1, rule), vocabulary, limit + 1) < 1e-6


@pytest.mark.parametrize("rule", [block_verification, token_verification])
def test_dropping_drawn_guesses_is_found_out(rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    proposal, weights = enumerated(monkeypatch, trees, 3, 2, 3, 2, {"tree": tree})
    assert distance(distribution_of(proposal, weights, 3, 3, rule), 3, 3) < 1e-6
    assert proposal.q is not None
    worth = torch.ones_like(proposal.tokens, dtype=torch.float32)
    for node in range(1, 7):
        above = proposal.parents[:, node]
        rows = torch.arange(len(worth))
        worth[:, node] = worth[rows, above] * proposal.q[rows, above, proposal.tokens[:, node]]
    lost = worth < worth.topk(3).values[:, -1:]  # all but the root and the best two guesses
    wrong = replace(proposal, parents=proposal.parents.masked_fill(lost, PAD_NODE), shape=None)
    assert distance(distribution_of(wrong, weights, 3, 3, rule), 3, 3) > 100 * 1e-6


@pytest.mark.parametrize(("top_k", "nodes", "limit"), [(10, 12, 5), (2, 7, 3), (1, 4, 6), (4, 60, 3), (3, 1, 2)])
def test_a_drawn_tree_keeps_its_bounds(top_k: int, nodes: int, limit: int) -> None:
    draft = TableDraft(24)
    torch.manual_seed(0)
    proposal = draft.grow(limit, sample=True, tree="dynamic", tree_topk=top_k, num_tree_tokens=nodes)
    assert proposal.q is not None and proposal.max_depth == limit
    shapes = set()
    for row in range(24):
        paths = paths_of(proposal, row)
        shapes.add(tuple(map(len, paths)))
        assert len(paths) == len(set(paths)) <= nodes
        assert all(path[:-1] in [(), *paths] for path in paths) and max(map(len, paths)) <= limit
        for node, path in zip(proposal.present[row].nonzero()[:, 0].tolist(), [(), *paths], strict=True):
            if (proposal.parents[row] == node).any():
                torch.testing.assert_close(proposal.q[row, node], draft.log_probs(row, path).exp())
    assert nodes < 5 or len(shapes) > 1


def test_a_sure_draft_guesses_deeper_and_an_unsure_one_wider() -> None:
    def grown(log_probs: Tensor) -> Proposal:
        root = torch.zeros(1, dtype=torch.long)
        config = SpeculationConfig(tree="dynamic", num_tree_tokens=8)
        return trees.grow(
            root, log_probs[None], lambda new, *_: log_probs.expand(1, new.shape[1], -1), config, 6, sample=True
        )

    torch.manual_seed(0)
    sure, unsure = grown(torch.tensor([0.97, 0.01, 0.01, 0.01]).log()), grown(torch.full((20,), 0.05).log())
    assert int(sure.depth.max()) > int(unsure.depth.max())
    assert int((sure.depth <= 2).sum()) < int((unsure.depth <= 2).sum())


def test_siblings_are_promised_one_by_one() -> None:
    plan = drawn_trees.plan_drawn(4, 12, 5, 50, torch.device("cpu"))
    torch.manual_seed(0)
    q = (3 * torch.randn(20, 2, 50)).softmax(-1)
    own, parent = q.gather(2, trees.draw_distinct(q.log(), 4)), torch.rand(20, 2)  # (20, 2, siblings), (20, 2)
    promised = drawn_trees._after(parent, parent[..., None] * own, plan)
    for row, node in itertools.product(range(20), range(2)):
        first = own[row, node, 0]
        for rank, (base, share) in enumerate(zip(drawn_trees.BASE, drawn_trees.OWN, strict=True)):
            expected = parent[row, node] * (base * (1 - first if rank else 1) + share * own[row, node, rank])
            torch.testing.assert_close(promised[row, node, rank], expected)
        assert promised[row, node].min() >= 0 and promised[row, node].sum() <= parent[row, node]


def test_the_imagined_tree_is_the_best_of_its_kind() -> None:
    shares = drawn_trees._in_turn(drawn_trees.MEAN_ACCEPTANCE[:3])
    paths = [path for depth in range(1, 4) for path in itertools.product(range(3), repeat=depth)]
    worth = sorted((float(torch.tensor([shares[rank] for rank in path]).prod()) for path in paths), reverse=True)
    found = [shares[first] * below for first, below in _imagined(3, 10, 3)]
    assert sorted(found, reverse=True) == pytest.approx(worth[:10])


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7, "top_k": 5}, {"repetition_penalty": 1.2}])
def test_sampled_text_is_generated(kwargs: dict[str, Any]) -> None:
    config = SpeculationConfig(tree="dynamic", num_tree_tokens=8, num_speculative_tokens=4)
    torch.manual_seed(0)
    out = target().generate(
        **prompts(3),
        do_sample=True,
        max_new_tokens=20,
        speculator=draft(),
        speculation_config=config,
        return_dict_in_generate=True,
        **kwargs,
    )
    assert out.sequences.shape[1] == 33 and 0 < out.speculation.accepted < out.speculation.proposed
