"""Guess by looking back: what followed the last few tokens when they last occurred?

No weights, and no distribution: guesses are looked up, so they are chosen, never drawn (``Proposal.q`` is None). Known
as prompt lookup decoding; with a corpus to look in besides the text it becomes retrieval (REST, arXiv 2311.08252).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, cycle, islice
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...proposal import ABSENT, NO_PARENT, Proposal
from ...settings import SpeculationConfig
from ..base import Drafter, News, Request, Speculator

Match = Literal["recent", "frequent"]
Path = tuple[int, ...]

# Occurrences of an n-gram that are looked at, the latest ones: bounds a step however common the n-gram is.
LOOK_BACK = 32
# Stands between the sequences of a corpus. No token id, so no text ends in it and no continuation may contain it.
BREAK = -1


class NgramSpeculator(Speculator):
    """Continue the text as it, or a corpus, went on after the same last tokens.

    The longest of the last ``max_ngram`` to ``min_ngram`` tokens that occurred before decides. A chain copies one
    continuation; ``tree="dynamic"`` merges up to ``tree_top_k`` different ones into a tree of at most ``tree_nodes``
    guesses, those of longer matches first; in a static tree, rank r at a node is its r-th child in that merged tree.
    There is no distribution behind these guesses: ``draft_sampling`` and ``min_confidence`` do not apply.

    Args:
        max_ngram: longest match that is tried.
        min_ngram: shortest match that is trusted; rows without one guess nothing.
        match: which of several continuations comes first, the most ``"recent"`` one, or at each of its tokens the most
            ``"frequent"`` one among the latest 32 occurrences.
        corpus: sequences of token ids to look in besides the text, after it where matches are equally long. They are
            indexed once, here.

    Raises:
        ValueError, TypeError: for values outside these.
    """

    def __init__(
        self, max_ngram: int = 4, min_ngram: int = 1, match: Match = "recent", corpus: Iterable[Sequence[int]] = ()
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram} and max_ngram={max_ngram}")
        if match not in get_args(Match):
            raise ValueError(f"match must be one of {get_args(Match)}, got {match!r}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.match = match
        self.corpus = TextIndex(self.sizes)
        for sequence in corpus:
            self.corpus.extend([*_token_ids(sequence), BREAK])
        self._largest = max(self.corpus.tokens, default=BREAK)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError for a tree of drawn guesses, which cannot be looked up, or a corpus of unknown tokens."""
        if config is not None and config.tree == "sampled":
            raise ValueError(
                "tree='sampled' draws its guesses from a draft's distribution, and n-gram guesses are looked up: "
                "use tree='dynamic', a list of paths, or None for a chain"
            )
        vocabulary = target.config.get_text_config(decoder=True).vocab_size
        if self._largest >= vocabulary:
            raise ValueError(
                f"the corpus holds token {self._largest} and the target knows {vocabulary} tokens: they were made by "
                "different tokenizers. Make the corpus with the target's."
            )

    def drafter(self, request: Request) -> NgramDrafter:
        """Index the prompt of every row."""
        return NgramDrafter(self, request)


class TextIndex:
    """Remember where the n-grams of a growing sequence of tokens were followed by what."""

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._followers: dict[Path, list[int]] = {}  # n-gram -> positions right behind its occurrences

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``, each in O(number of sizes)."""
        for token in tokens:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._followers.setdefault(tuple(self.tokens[end - size :]), []).append(end)
            self.tokens.append(token)

    def continuations(self, ngram: Path, depth: int) -> Iterator[Path]:
        """Yield up to ``depth`` tokens that followed each of the latest occurrences of ``ngram``, latest first."""
        for position in reversed(self._followers.get(ngram, [])[-LOOK_BACK:]):
            # A copy that reaches the end of the text goes on with itself, so that a period continues.
            path = tuple(islice(cycle(self.tokens[position : position + depth]), depth))
            yield path[: path.index(BREAK)] if BREAK in path else path


class NgramDrafter(Drafter):
    """Look up guesses for one ``generate`` call; every row has an index of its own text. Lives on the CPU."""

    def __init__(self, speculator: NgramSpeculator, request: Request) -> None:
        config, tree = request.config, request.config.tree
        self._speculator = speculator
        self._is_chain = tree is None
        self._most_nodes = config.tree_nodes if tree == "dynamic" else None
        self._most_continuations = 1 if tree is None else config.tree_top_k if tree == "dynamic" else None
        self._ranks: set[Path] | None = None
        if tree is not None and not isinstance(tree, str):
            self._ranks = {tuple(path[:end]) for path in tree for end in range(1, len(path) + 1)}
        count = config.num_speculative_tokens
        bounds = [count] if isinstance(count, int) else []
        self._depths = [*bounds, max(map(len, self._ranks))] if self._ranks else bounds
        self._rows = [TextIndex(speculator.sizes) for _ in range(request.input_ids.shape[0])]
        masks = request.attention_mask.tolist()
        for row, ids, mask in zip(self._rows, request.input_ids.tolist(), masks, strict=True):
            row.extend(compress(ids, mask))

    def propose(self, news: News, limit: int) -> Proposal:
        """Take in ``news`` and look up what followed the same last tokens before, at most ``limit`` tokens of it."""
        moved = torch.cat([news.counts[:, None], news.tokens], dim=1).tolist()  # in one transfer
        for row, (count, *tokens) in zip(self._rows, moved, strict=True):
            row.extend(tokens[:count])
        depth = min([limit, *self._depths])
        return self._proposal([self._tree(row, depth) for row in self._rows], news.tokens.device)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with the texts of ``rows`` only."""
        self._rows = [self._rows[row] for row in rows.tolist()]

    def join(self, other: Drafter) -> bool:
        """Go on with the texts of ``other``, too."""
        assert isinstance(other, NgramDrafter)
        self._rows += other._rows
        return True

    def _tree(self, row: TextIndex, depth: int) -> list[Path]:
        """List the nodes of a row's tree, each as its path from the root, parents before children."""
        nodes: dict[Path, None] = {}
        for path in islice(self._continuations(row, depth), self._most_continuations):
            nodes.update(dict.fromkeys(path[:end] for end in range(1, len(path) + 1)))
        return list(nodes)[: self._most_nodes] if self._ranks is None else _of_ranks(nodes, self._ranks)

    def _continuations(self, row: TextIndex, depth: int) -> Iterator[Path]:
        """Yield the different continuations of a row's text, best first."""
        seen: set[Path] = {()}
        for size in self._speculator.sizes:
            ngram = tuple(row.tokens[-size:])
            found: Iterable[Path] = chain(
                row.continuations(ngram, depth), self._speculator.corpus.continuations(ngram, depth)
            )
            for path in _most_frequent_first(found) if self._speculator.match == "frequent" else found:
                if path not in seen:
                    seen.add(path)
                    yield path

    def _proposal(self, trees: list[list[Path]], device: torch.device) -> Proposal:
        """Lay the rows' trees side by side, the smaller ones filled up with ABSENT nodes."""
        nodes = max(map(len, trees))
        tokens, parents = [], []
        for row, tree in zip(self._rows, trees, strict=True):
            index = {(): 0} | {path: node for node, path in enumerate(tree, start=1)}
            absent = nodes - len(tree)
            tokens.append([row.tokens[-1], *(path[-1] for path in tree), *[0] * absent])
            parents.append([NO_PARENT, *(index[path[:-1]] for path in tree), *[ABSENT] * absent])
        both = torch.tensor([tokens, parents], device=device)  # (2, batch, nodes)
        depth = max((len(path) for tree in trees for path in tree), default=0)
        return Proposal(both[0], both[1], depth, is_chain=self._is_chain)


def _most_frequent_first(found: Iterable[Path]) -> list[Path]:
    """Sort by how often the first token was found, then the first two, ...; ties stay as they came."""
    paths = list(found)
    counts = Counter(path[:end] for path in paths for end in range(1, len(path) + 1))
    return sorted(paths, key=lambda path: [-counts[path[:end]] for end in range(1, len(path) + 1)])


def _of_ranks(nodes: Iterable[Path], wanted: set[Path]) -> list[Path]:
    """Keep the nodes whose ranks among their siblings, from the root down, form one of the ``wanted`` paths."""
    children: Counter[Path] = Counter()
    ranks: dict[Path, Path] = {(): ()}
    for node in nodes:
        parent = node[:-1]
        ranks[node] = (*ranks[parent], children[parent])
        children[parent] += 1
    return [node for node in ranks if ranks[node] in wanted]


def _token_ids(sequence: Sequence[int]) -> list[int]:
    if isinstance(sequence, str) or not isinstance(sequence, (Sequence, Tensor)):
        raise TypeError(
            f"corpus must hold sequences of token ids, such as [tokenizer(text).input_ids], got {sequence!r:.60}"
        )
    tokens = [int(token) for token in sequence]
    if min(tokens, default=0) < 0:
        raise ValueError(f"corpus must hold token ids, got {min(tokens)}; leave out what masks labels or padding")
    return tokens
