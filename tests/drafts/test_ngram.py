"""The n-gram drafter against a naive one that scans the whole text anew for every row and step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from twins import paths_of, target

from hf_spec.drafts.base import AcceptedTokens, DraftContext
from hf_spec.drafts.ngram.speculator import LOOK_BACK, NgramDrafter, NgramSpeculator
from hf_spec.settings import SpeculationConfig

PAD = 99
Path = tuple[int, ...]


def start(prompts: list[list[int]], speculator: NgramSpeculator | None = None, **config: Any) -> NgramDrafter:
    """Start a drafter on left-padded ``prompts``; the padding is a token that would make a tempting guess."""
    width = max(map(len, prompts))
    request = DraftContext(
        target=target(vocab_size=1000),
        input_ids=torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts], dtype=torch.long),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        features=None,
        config=SpeculationConfig(**config),
        log_probs=lambda logits: logits,
        sample=False,
    )
    return (speculator or NgramSpeculator()).drafter(request)


def news(rows: list[list[int]]) -> AcceptedTokens:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return AcceptedTokens(tokens, torch.tensor([len(row) for row in rows]))


def naive_continuations(text: list[int], depth: int, sizes: range, match: str, corpus: list[list[int]]) -> list[Path]:
    """Rescan the text and the corpus for every length of match; copy token by token."""
    books = [token for sequence in corpus for token in [*sequence, -1]]
    result: list[Path] = []
    for size in sizes:
        suffix = text[len(text) - size :] if size <= len(text) else None
        level: list[Path] = []
        for source in (text, books):
            ends = [end for end in range(size, len(source)) if source[end - size : end] == suffix]
            for end in reversed(ends[-LOOK_BACK:]):
                grown = list(source)
                for position in range(end, end + depth):
                    if grown[position] == -1:
                        break
                    grown.append(grown[position])
                level.append(tuple(grown[len(source) :]))
        if match == "frequent":
            starts = Counter(path[:n] for path in level for n in range(1, len(path) + 1))
            level.sort(key=lambda path: tuple(-starts[path[:n]] for n in range(1, len(path) + 1)))
        for path in level:
            if path and path not in result:
                result.append(path)
    return result


def naive_trie(continuations: list[Path]) -> list[Path]:
    nodes: list[Path] = []
    for path in continuations:
        nodes += [path[:end] for end in range(1, len(path) + 1) if path[:end] not in nodes]
    return nodes


def is_wanted(node: Path, nodes: list[Path], static: list[Path]) -> bool:
    ranks = []
    for end in range(len(node)):
        siblings = [other[-1] for other in nodes if len(other) == end + 1 and other[:end] == node[:end]]
        ranks.append(siblings.index(node[end]))
    return any(path[: len(ranks)] == tuple(ranks) for path in static)


def random_text(rng: random.Random, length: int) -> list[int]:
    """Mix noise over few tokens with repeats of what was there and runs of one token."""
    text: list[int] = []
    while len(text) < length:
        kind = rng.random()
        if kind < 0.4 or len(text) < 3:
            text += [rng.randrange(6) for _ in range(rng.randint(1, 6))]
        elif kind < 0.8:
            begin = rng.randrange(len(text))
            text += text[begin : begin + rng.randint(2, 10)] * rng.randint(1, 3)
        else:
            text += [rng.randrange(6)] * rng.randint(2, 50)
    return text[:length]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("match", ["recent", "frequent"])
def test_equals_naive_rescan(seed: int, match: str) -> None:
    """Chains, dynamic and static trees, with and without a corpus, over steps of ragged news and leaving rows."""
    rng = random.Random(seed)
    sizes = range(rng.randint(2, 5), rng.randint(0, 1), -1)
    corpus = [random_text(rng, rng.randint(0, 40)) for _ in range(rng.choice([0, 3]))]
    speculator = NgramSpeculator(sizes[0], sizes[-1], match, corpus)  # type: ignore[arg-type]
    static = [(0,), (1,), (2,), (7,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    top_k, most = rng.randint(1, 5), rng.randint(1, 12)
    texts = [random_text(rng, rng.randint(1, 160)) for _ in range(4)]
    drafters = {
        "chain": start(texts, speculator),
        "dynamic": start(texts, speculator, tree="dynamic", tree_topk=top_k, num_tree_tokens=most),
        "static": start(texts, speculator, tree=static),
    }
    for step in range(6):
        more = [random_text(rng, rng.randint(1, 5)) for _ in texts]
        texts = [text + new for text, new in zip(texts, more, strict=True)]
        limit = rng.randint(0, 6)
        for kind, drafter in drafters.items():
            proposal = drafter.propose(news(more), limit)
            assert proposal.root.tolist() == [text[-1] for text in texts]
            assert proposal.q is None
            assert proposal.max_depth == proposal.depth.masked_fill(~proposal.present, 0).max() <= limit
            assert proposal.is_chain == (kind == "chain" or proposal.max_depth == 0)
            for row, text in enumerate(texts):
                found = naive_continuations(text, min(limit, 3) if kind == "static" else limit, sizes, match, corpus)
                if kind == "chain":
                    expected = naive_trie(found[:1])
                elif kind == "dynamic":
                    expected = naive_trie(found[:top_k])[:most]
                else:
                    expected = [node for node in naive_trie(found) if is_wanted(node, naive_trie(found), static)]
                assert paths_of(proposal, row) == expected
        if step == 2:
            keep = torch.tensor([3, 1])
            texts = [texts[row] for row in keep.tolist()]
            for drafter in drafters.values():
                drafter.keep_rows(keep)


def test_periodic_text_predicts_itself() -> None:
    period = [5, 1, 5, 2, 7]
    proposal = start([period + period[:3]]).propose(news([[2]]), 17)
    assert paths_of(proposal, 0)[-1] == tuple((period * 5)[4 : 4 + 17])


def test_longer_matches_come_first() -> None:
    text = [1, 2, 3, 40, 9, 3, 50, 9, 1, 2]
    assert paths_of(start([text]).propose(news([[3]]), 1), 0) == [(40,)]
    assert paths_of(start([text], NgramSpeculator(max_ngram=1)).propose(news([[3]]), 1), 0) == [(50,)]
    assert paths_of(start([text], tree="dynamic").propose(news([[3]]), 1), 0) == [(40,), (50,)]


def test_recent_and_frequent_differ() -> None:
    text = [1, 7, 1, 7, 1, 8]
    assert paths_of(start([text]).propose(news([[1]]), 1), 0) == [(8,)]
    assert paths_of(start([text], NgramSpeculator(match="frequent")).propose(news([[1]]), 1), 0) == [(7,)]


def test_frequent_prefers_a_common_beginning_over_a_common_whole() -> None:
    text = [1, 7, 2, 1, 7, 3, 1, 7, 4, 1, 8, 8, 1, 8, 8]
    speculator = NgramSpeculator(max_ngram=1, match="frequent")
    assert paths_of(start([text], speculator).propose(news([[1]]), 2), 0)[0] == (7,)


def test_rows_without_a_match_propose_nothing() -> None:
    proposal = start([[1, 2, 3], [1, 2, 1]]).propose(news([[4], [2]]), 2)
    assert paths_of(proposal, 0) == []
    assert paths_of(proposal, 1) == [(1,), (1, 2)]
    assert proposal.present.tolist() == [[True, False, False], [True, True, True]]
    nothing = start([[1, 2, 3]]).propose(news([[4]]), 2)
    assert nothing.tokens.tolist() == [[4]]
    assert nothing.max_depth == 0


def test_rows_and_padding_are_never_looked_at() -> None:
    """Row 0 knows what follows 1; row 1 has padding before its 1 and must guess neither from it nor from row 0."""
    proposal = start([[1, 2, 3, 4], [5]], tree="dynamic").propose(news([[1], [1]]), 3)
    assert paths_of(proposal, 0) == [(2,), (2, 3), (2, 3, 4)]
    assert paths_of(proposal, 1) == []
    padded = start([[1, 2, 3, 4], [5]]).propose(news([[9], [PAD]]), 3)
    assert paths_of(padded, 1) == []


@pytest.mark.parametrize(("count", "limit", "depth"), [(2, 6, 2), (6, 2, 2), ("auto", 4, 4), (None, 4, 4)])
def test_depth(count: Any, limit: int, depth: int) -> None:
    proposal = start([[1, 2, 3, 4, 5, 6, 7, 8]], num_speculative_tokens=count).propose(news([[1]]), limit)
    assert proposal.max_depth == depth


def test_empty_prompt() -> None:
    drafter = start([[], []])
    assert drafter.propose(news([[1], [1]]), 2).max_depth == 0
    assert paths_of(drafter.propose(news([[2, 1], [3]]), 2), 0) == [(2,), (2, 1)]


def test_corpus_sequences_do_not_run_into_each_other() -> None:
    speculator = NgramSpeculator(corpus=[[1, 2, 3], torch.tensor([4, 5])])  # type: ignore[list-item]
    assert paths_of(start([[8, 1]], speculator).propose(news([[2]]), 4), 0) == [(3,)]
    assert paths_of(start([[8, 1]], speculator).propose(news([[3]]), 4), 0) == []


def test_bad_values_are_refused() -> None:
    for sizes in [(2, 3), (4, 0), (0, 0)]:
        with pytest.raises(ValueError, match="min_ngram"):
            NgramSpeculator(*sizes)
    with pytest.raises(ValueError, match="'recent', 'frequent'"):
        NgramSpeculator(match="first")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input_ids"):
        NgramSpeculator(corpus=["some text"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="input_ids"):
        NgramSpeculator(corpus=[1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="dynamic"):
        NgramSpeculator().check(None, SpeculationConfig(tree="sampled"))  # type: ignore[arg-type]
