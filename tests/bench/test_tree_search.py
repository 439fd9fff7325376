"""Static trees found from measured accuracies: no other tree promises more, and the measure is that of a slow twin."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import prompts
from golden import load_draft, load_target
from torch import Tensor
from twins import noisy, target

from hf_spec import SpeculationConfig
from hf_spec.bench import Tree, expected_length, rank_accuracies, search_tree

DEPTH, RANKS, NEW = 3, 6, 20


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_a_searched_tree_promises_more_than_any_other(nodes: int) -> None:
    accuracies = [[0.3, 0.45, 0.1], [0.5, 0.2, 0.25], [0.6, 0.1, 0.1]]
    everything = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def length(tree: Any) -> float:
        shares = [[accuracies[i][rank] for i, rank in enumerate(path)] for path in tree]
        return 1 + sum(float(torch.tensor(share).prod()) for share in shares)

    def is_tree(paths: Any) -> bool:
        return all(len(path) == 1 or path[:-1] in paths for path in paths)

    best = max(length(tree) for tree in itertools.combinations(everything, nodes) if is_tree(tree))
    tree = search_tree(accuracies, nodes)
    assert is_tree(tree)
    assert len(tree) == nodes
    assert length(tree) == pytest.approx(best)
    assert expected_length(accuracies, tree) == pytest.approx(best)
    assert SpeculationConfig(tree=tree).tree == tree


@pytest.mark.parametrize("accuracies", [[[0.5], [0.5]], [[0.5, 0.0], [0.5, 0.0]]])
def test_a_searched_tree_ends_where_nothing_is_right(accuracies: list[list[float]]) -> None:
    assert search_tree(accuracies, 10) == [(0,), (0, 0)]


# --- measuring -------------------------------------------------------------------------------------------------------

Distributions = Callable[
    [int, int], Tensor
]  # (text read, depth) -> scores (vocabulary,) of the guess behind depth right ones


def vanilla() -> tuple[Any, Any, Callable[[Tensor], Distributions], int]:
    draft = noisy(target(), noise=0.1)

    def distributions(text: Tensor) -> Distributions:
        scores = draft(text[None]).logits[0]
        return lambda read, depth: scores[read - 1 + depth]

    return target(), draft, distributions, 0  # its first guesses stand right behind the prompt


def medusa() -> tuple[Any, Any, Callable[[Tensor], Distributions], int]:
    model, draft = load_target("medusa_v1_pt"), load_draft("medusa_v1_pt")

    def distributions(text: Tensor) -> Distributions:
        scores = draft(features=model(text[None], output_hidden_states=True).hidden_states[-1]).logits[0]
        return lambda read, depth: scores[read - 2, depth]  # of the state before the root

    return model, draft, distributions, 1


@pytest.mark.parametrize("make", [vanilla, medusa])
@torch.no_grad()
def test_accuracies_are_those_of_every_position(make: Any) -> None:
    model, draft, distributions_of, first = make()
    asked = [prompts(1, (length,), 70, seed=length)["input_ids"] for length in (5, 8)]
    tried, right = torch.zeros(DEPTH), torch.zeros(DEPTH, RANKS)
    for ids in asked:
        text = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        distributions = distributions_of(text)
        for read in range(ids.shape[1] + first, len(text)):
            for depth in range(min(DEPTH, len(text) - read - 1)):  # the last token is never guessed
                guesses = distributions(read, depth).topk(RANKS).indices
                found = (guesses == text[read + depth]).nonzero().flatten().tolist()
                tried[depth] += 1
                right[depth, found] += 1
                if not found:
                    break
    accuracies = rank_accuracies(model, asked, draft, DEPTH, RANKS, max_new_tokens=NEW)
    assert 0 < accuracies[0][0] < 1
    torch.testing.assert_close(torch.tensor(accuracies), right / tried[:, None])


def test_what_ranks_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="NgramSpeculator does not rank draft tokens"):
        rank_accuracies(target(), [prompts(1)["input_ids"]], "ngram", 3, max_new_tokens=4)


def test_a_tree_keeps_what_it_promises() -> None:
    """But for the positions that generation skips, and that lie within an accepted path."""
    model, draft, ids = target(), noisy(target(), noise=0.1), prompts(1)["input_ids"]
    accuracies = rank_accuracies(model, [ids], draft, 1, max_new_tokens=150)
    tree: Tree = search_tree(accuracies, 3)
    call = {"max_new_tokens": 150, "do_sample": False, "return_dict_in_generate": True, "speculator": draft}
    out = model.generate(ids, **call, speculation_config=SpeculationConfig(tree=tree))
    assert out.speculation.mean_accepted_length == pytest.approx(expected_length(accuracies, tree), abs=0.15)
