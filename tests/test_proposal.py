"""A proposal answers about its trees what walking them by hand answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import prompts
from twins import target

from hf_spec import AcceptedTokens, DraftContext, Drafter, SpeculationConfig, Speculator
from hf_spec.drafts.base import ask
from hf_spec.proposal import NO_PARENT, PAD_NODE, Proposal, ancestors_of, tree_from_paths

VOCABULARY = 4


def random_trees(seed: int, nodes: int = 9, rows: int = 12) -> Proposal:
    """Hang nodes anywhere, repeat tokens, and leave out the last few nodes of most rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, nodes), generator=generator)
    parents = (torch.rand(rows, nodes, generator=generator) * torch.arange(nodes)).long()
    sizes = torch.randint(1, nodes + 1, (rows, 1), generator=generator)
    sizes[0] = nodes
    parents = parents.masked_fill(torch.arange(nodes) >= sizes, PAD_NODE)
    parents[:, 0] = NO_PARENT
    deepest = max(len(walk(row, node)) for row in parents.tolist() for node in range(nodes))
    return Proposal(tokens, parents, deepest)


def walk(parents: list[int], node: int) -> list[int]:
    """List the nodes from the first guess to ``node``."""
    path = []
    while parents[node] >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_paths(seed: int) -> None:
    proposal = random_trees(seed)
    nodes = proposal.tokens.shape[1]
    assert proposal.present.tolist() == [[parent != PAD_NODE for parent in row] for row in proposal.parents.tolist()]
    for node in range(nodes):
        for row, parents in enumerate(proposal.parents.tolist()):
            if parents[node] == PAD_NODE:
                continue
            path = walk(parents, node)
            assert proposal.depth[row, node] == len(path)
            assert set(proposal.ancestors[row, node].nonzero()[:, 0].tolist()) == {0, *path}


@pytest.mark.parametrize("seed", range(5))
def test_child(seed: int) -> None:
    proposal = random_trees(seed)
    rows, nodes = proposal.tokens.shape
    found = 0
    for node in range(nodes):
        for token in range(VOCABULARY):
            child = proposal.child(torch.full((rows,), node), torch.full((rows,), token)).tolist()
            for row in range(rows):
                fitting = [
                    i for i in range(1, nodes) if proposal.parents[row, i] == node and proposal.tokens[row, i] == token
                ]
                assert child[row] == (fitting[0] if fitting else -1)
                found += len(fitting) > 1
    assert found  # repeated siblings were among the cases


def test_absent_nodes_are_their_own_ancestor_only() -> None:
    parents = torch.tensor([[NO_PARENT, 0, PAD_NODE, 1, PAD_NODE]])
    ancestors = ancestors_of(parents, max_depth=2)
    assert ancestors[0, 2].tolist() == [False, False, True, False, False]
    assert not ancestors[0, [0, 1, 3], :][:, [2, 4]].any()


def test_chain() -> None:
    root, guesses = torch.tensor([7, 8]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    proposal = Proposal.chain(root, guesses, counts=torch.tensor([3, 1]))
    assert proposal.is_chain and proposal.max_depth == 3 and proposal.q is None
    assert proposal.tokens.tolist() == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert proposal.parents.tolist() == [[NO_PARENT, 0, 1, 2], [NO_PARENT, 0, PAD_NODE, PAD_NODE]]
    assert proposal.depth[0].tolist() == [0, 1, 2, 3] and proposal.depth[1, :2].tolist() == [0, 1]
    assert proposal.root.tolist() == [7, 8]
    assert Proposal.chain(root, guesses).present.all()


@pytest.mark.parametrize("counts", [None, torch.tensor([3, 1])])
def test_parts_keep_what_was_said_of_all(counts: torch.Tensor | None) -> None:
    proposal = Proposal.chain(torch.tensor([7, 8]), torch.tensor([[1, 2, 3], [4, 5, 6]]), counts=counts)
    chosen = torch.tensor([[True] * 4, [False] * 4])
    part = dataclasses.replace(proposal, deterministic=chosen)
    part = (part.without_padding() if counts is None else part).truncate(2).map_tensors(lambda one: one[:1])
    assert (
        part.tokens.tolist() == [[7, 1, 2]] and part.deterministic is not None and part.deterministic.shape == (1, 3)
    )
    assert part.is_unpadded == (counts is None)


def test_what_is_worked_out_is_kept() -> None:
    proposal = Proposal.chain(torch.tensor([7]), torch.tensor([[1, 2, 3]]))
    assert proposal.ancestors is proposal.ancestors and proposal.depth is proposal.depth
    assert Proposal.depth.__doc__  # asked of the class, as help() does


def test_nothing() -> None:
    proposal = Proposal.nothing(torch.tensor([7, 8]))
    assert proposal.tokens.tolist() == [[7], [8]]
    assert proposal.max_depth == 0 and proposal.is_chain and proposal.q is None
    assert proposal.child(torch.tensor([0, 0]), torch.tensor([7, 8])).tolist() == [-1, -1]


def test_tree_from_paths() -> None:
    assert tree_from_paths([(0,), (1,), (0, 0)]) == ([NO_PARENT, 0, 0, 1], [0, 0, 1, 0])
    assert tree_from_paths([(2, 1, 0), (0,)]) == ([NO_PARENT, 0, 0, 2, 3], [0, 0, 2, 1, 0])
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    parents, ranks = tree_from_paths(paths)
    assert sorted(tuple(ranks[i] for i in walk(parents, node)) for node in range(1, len(parents))) == sorted(paths)
    assert all(parent < node for node, parent in enumerate(parents))


# --- Of drafters that users write ------------------------------------------------------------------------------------

TREE = SpeculationConfig(tree="dynamic", num_speculative_tokens=2)


class Own(Speculator):
    """Say what ``say`` makes of news."""

    def __init__(self, say: Callable[[AcceptedTokens], Any]) -> None:
        self.say = say

    def drafter(self, request: DraftContext) -> Drafter:
        return OwnDrafter(self.say)


class OwnDrafter(Drafter):
    def __init__(self, say: Callable[[AcceptedTokens], Any]) -> None:
        self.say = say

    def propose(self, news: AcceptedTokens, limit: int) -> Any:
        return self.say(news)

    def keep_rows(self, rows: torch.Tensor) -> None:
        pass


def two(news: AcceptedTokens) -> torch.Tensor:
    return news.tokens.new_full((len(news.tokens), 2), 3)


def tree(news: AcceptedTokens, *parents: int) -> Proposal:
    tokens = torch.cat([news.root[:, None], two(news)], dim=1)
    return Proposal(tokens, torch.tensor([parents]).expand_as(tokens), max_depth=2)


WRONG: dict[str, tuple[Callable[[AcceptedTokens], Any], str]] = {
    "no proposal": (lambda news: None, r"returned None; return a hf_spec\.Proposal"),
    "floats": (lambda news: Proposal.chain(news.root, two(news).float()), "tokens are torch.float32"),
    "one row": (lambda news: Proposal.chain(news.root[:1], two(news)[:1]), r"shape \(1, 3\).*with 3 rows here"),
    "other root": (lambda news: Proposal.chain((news.root + 1) % 99, two(news)), "begin with accepted.root"),
    "negative": (lambda news: Proposal.chain(news.root, two(news) - 4, torch.zeros(3)), "negative tokens"),
    "two roots": (lambda news: tree(news, -1, -1, 0), "a draft token has no parent"),
    "child first": (lambda news: tree(news, -1, 2, 0), "one that comes after it"),
    "deeper than it says": (
        lambda news: replace(tree(news, -1, 0, 1), max_depth=1),
        "max_depth is 1, and a path has more draft tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_proposal_of_guesses(case: str) -> None:
    say, problem = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=rf"OwnDrafter\.propose.*{problem}"):
        target().generate(**prompts(3), max_new_tokens=8, speculator=Own(say), speculation_config=TREE)


def drawn(news: AcceptedTokens, q: torch.Tensor, counts: list[int] | None = None) -> Proposal:
    """Say that two tokens per row were drawn, from ``q`` (parents, vocabulary) in each row."""
    amounts = None if counts is None else torch.tensor(counts)
    return Proposal.chain(news.root, two(news), amounts, q=q.expand(len(news.tokens), *q.shape))


FAIR = torch.full((2, 99), 1 / 99)
WRONG_Q: dict[str, tuple[torch.Tensor, str]] = {
    "sum": (FAIR * 0.8, r"q sums to 0\.8 .*not to 1"),
    "sum of one parent": (torch.cat([FAIR[:1], FAIR[:1] * 1.1]), r"q sums to 1\.1 "),
    "logits": (torch.zeros(2, 99), "q sums to 0 "),
    "negative": (FAIR + torch.tensor([0.5, -0.5] + [0.0] * 97), "negative numbers or nan"),
    "nan": (FAIR * torch.nan, "negative numbers or nan"),
    "narrower": (torch.full((2, 98), 1 / 98), "q over 98 tokens, and the target's logits are over 99"),
    "too narrow for the token": (torch.full((2, 3), 1 / 3), "q, which has 3 tokens, and is none of them"),
    "wider": (torch.full((2, 100), 1 / 100), "q over 100 tokens, and the target's logits are over 99"),
    "parents": (torch.full((3, 99), 1 / 99), r"q has shape \(3, 3, 99\).*\(3, 2, \.\.\.\)"),
    "whole numbers": (torch.ones(2, 99, dtype=torch.long), "q has shape .* and is torch.int64"),
    "no parents": (torch.full((99,), 1 / 99), r"q has shape \(3, 99\)"),
}


@pytest.mark.parametrize("case", WRONG_Q)
def test_a_distribution_that_nothing_can_have_been_drawn_from(case: str) -> None:
    q, problem = WRONG_Q[case]
    options = {"max_new_tokens": 8, "do_sample": True, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=problem):
        target().generate(**prompts(3), **options, speculator=Own(lambda news: drawn(news, q)))


def test_a_tree_whose_distribution_ends_before_a_parent() -> None:
    def grow(news: AcceptedTokens) -> Proposal:
        return replace(tree(news, -1, 0, 1), q=FAIR[:1].expand(len(news.tokens), 1, 99))

    options = {"max_new_tokens": 8, "do_sample": True, "speculation_config": TREE}
    with pytest.raises(ValueError, match="q has 1 parents, and a draft token was sampled after a later one"):
        target().generate(**prompts(3), **options, speculator=Own(grow))


@pytest.mark.parametrize("counts", [None, [2, 0, 1]])
def test_only_distributions_that_were_drawn_from_are_looked_at(counts: list[int] | None) -> None:
    """What stands after a row's last draft token may be anything, and so may that of chosen draft tokens."""

    def say(news: AcceptedTokens) -> Proposal:
        proposal = drawn(news, FAIR, None if counts is None else counts[: len(news.tokens)])
        q, drawn_from = proposal.q.clone(), proposal.present[:, 1:].clone()
        chosen = torch.zeros_like(proposal.present)
        chosen[:, 1] = counts is None
        q[~drawn_from | chosen[:, 1:]] = torch.nan
        return replace(proposal, q=q, deterministic=chosen)

    news = AcceptedTokens(torch.tensor([[5], [6], [7]]), torch.ones(3, dtype=torch.long))
    assert ask(OwnDrafter(say), news, 2).max_depth == 2


def test_the_root_is_the_last_token_that_counts() -> None:
    news = AcceptedTokens(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]))
    assert ask(OwnDrafter(lambda news: Proposal.chain(news.root, two(news))), news, 2).root.tolist() == [7, 9]
    for column in (0, -1):
        with pytest.raises(ValueError, match=r"the texts end with \[7, 9\]"):
            ask(OwnDrafter(lambda news: Proposal.chain(news.tokens[:, column], two(news))), news, 2)  # noqa: B023


@pytest.mark.parametrize("layer", [99, -2])
def test_a_layer_that_the_target_has_not(layer: int) -> None:
    class Reading(Own):
        def feature_layers(self, target: Any) -> tuple[int, ...]:
            return (0, layer)

    with pytest.raises(ValueError, match=rf"feature layer {layer} was asked for, but LlamaForCausalLM has \d layers"):
        target().generate(**prompts(1), max_new_tokens=8, speculator=Reading(lambda news: Proposal.nothing(news.root)))


def test_what_is_no_drafter() -> None:
    class Nobody(Speculator):
        def drafter(self, request: DraftContext) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Speculator\.drafter returned None; return an object of a subclass"):
        target().generate(**prompts(1), max_new_tokens=8, speculator=Nobody())
