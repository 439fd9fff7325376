"""N-gram drafts: what followed the last few tokens when they last occurred.

No weights, and no distribution: draft tokens are looked up, so they are deterministic, never sampled (``Proposal.q``
is None). Known as prompt lookup decoding; with a corpus to look in besides the text it becomes retrieval (REST, arXiv
2311.08252).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel

from ...device_tensors import to_device, to_list
from ...policy.base import DraftSource, Estimate
from ...proposal import NO_PARENT, PAD_NODE, Proposal
from ...scoring.plain import scored_vocabulary
from ...settings import SpeculationConfig, is_int
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator
from .beginnings import beginnings
from .history_file import SavedHistory, read_history, write_history
from .lookups import Lookups
from .suffix_decoding import Continuations, Path, Texts, calibrated, record_outcome, truncated
from .suffix_index import BREAK, LOOK_BACK, SuffixIndex, match_length

Match = Literal["recent", "frequent"]

# Draft length with a history by default: its chains end by themselves where they become improbable.
DEPTH = 16
DEFAULT_HISTORY_SIZE = 100_000  # tokens of a history, 10 MB, where nobody says how large it is to be


class NgramSpeculator(Speculator):
    """Continue the text as it, or a corpus, went on after the same last tokens.

    The longest of the last ``max_ngram`` to ``min_ngram`` tokens that occurred before decides. A chain copies one
    continuation. ``tree="dynamic"`` merges up to ``tree_topk`` different ones, those of longer matches first. The tree
    has at most ``num_tree_tokens`` draft tokens. In a static tree, rank r at a node is its r-th child in that merged
    tree. These draft tokens have no distribution: ``sample_draft`` and ``confidence_threshold`` do not apply.

    With ``history_size`` it keeps a history: prompts and outputs of finished calls, of all sequences and threads. The
    oldest are dropped first. Matches are then as long as the texts agree, and drafts as long as they are probable. The
    sequences of a batch look in each other's text, too (suffix decoding, arXiv 2411.04975; docs/history.md). The text
    stays the target's. But which draft tokens are tried, and so how many random numbers sampling takes, depends on
    earlier calls. ``save`` and ``load`` keep the history in a file.

    For an encoder-decoder target whose source has the tokens of its text, the source is looked in as the text is.

    Args:
        max_ngram: longest match that is tried.
        min_ngram: shortest match that is trusted; sequences without one get no draft tokens.
        match: which of several continuations comes first. ``"recent"``: the latest one. ``"frequent"``: at each of its
            tokens the most frequent one among the latest 32 occurrences.
        corpus: sequences of token ids to look in besides the text, after it where matches are equally long. They are
            indexed once, here.
        history_size: tokens that the history holds, about 100 bytes each; ``None`` for no history. ``max_ngram`` and
            ``match`` are for lookups without one.
        min_token_prob: with a history, drop draft tokens that are less probable than this. The probability of a draft
            token includes that of all before it. It is estimated from how often the token followed, and after how long
            a match.

    Raises:
        ValueError, TypeError: for values outside these.
    """

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 1,
        match: Match = "recent",
        corpus: Iterable[Sequence[int]] = (),
        *,
        history_size: int | None = None,
        min_token_prob: float = 0.1,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram} and max_ngram={max_ngram}")
        if match not in get_args(Match):
            raise ValueError(f"match must be one of {get_args(Match)}, got {match!r}")
        if history_size is not None and not (is_int(history_size) and history_size >= 1):
            raise ValueError(
                f"history_size must be a whole number of tokens, at least 1, or None, got {history_size!r}"
            )
        if not 0 < min_token_prob <= 1:
            raise ValueError(f"min_token_prob must be above 0 and at most 1, got {min_token_prob!r}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.match, self.min_token_prob = match, min_token_prob
        self.history = None if history_size is None else SuffixIndex(history_size)
        self.corpus = TextIndex(self.sizes)
        sequences = [_token_ids(sequence) for sequence in corpus]
        self._largest = max(chain.from_iterable(sequences), default=BREAK)
        # With a history, the corpus is one that keeps everything.
        self._lasting = SuffixIndex(sum(map(len, sequences)) + len(sequences)) if history_size and sequences else None
        for sequence in sequences:
            if self._lasting is not None:
                self._lasting.add(sequence)
            else:
                self.corpus.extend([*sequence, BREAK])

    def estimates_acceptance(self, batch_size: int) -> bool:
        """Tell whether there is a history, which knows it; for one sequence the length of a match says it, too.

        In batches without a history the average over all places is as fast, and simpler (docs/performance.md).
        """
        return self.history is not None or batch_size == 1

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        """Tell n-grams with a history, with a corpus and of other match lengths apart."""
        has_corpus = self._lasting is not None or bool(self.corpus.tokens)
        return (
            *super().profile_key,
            self.history is not None,
            has_corpus,
            self.sizes,
            self.match,
            self.min_token_prob,
        )

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError for a sampled tree, which cannot be looked up, or a corpus of unknown tokens."""
        if config is not None and config.tree == "sampled":
            raise ValueError(
                "tree='sampled' samples from a draft's distribution, and n-grams have none: "
                "use tree='dynamic', a list of paths, or None for a chain"
            )
        vocabulary = scored_vocabulary(target)
        if self._largest >= vocabulary:
            raise ValueError(
                f"the corpus holds token {self._largest} and the target knows {vocabulary} tokens: they were made by "
                "different tokenizers. Make the corpus with the target's."
            )
        if self.history is not None and self.history.largest >= vocabulary:
            raise ValueError(
                f"the history holds token {self.history.largest} and the target knows {vocabulary} tokens: it holds "
                "texts of another tokenizer. Take a NgramSpeculator(history_size=...) per tokenizer."
            )

    def defaults(self) -> SpeculationConfig:
        """Return chains of 16 with a history, which end by themselves; the common settings without one."""
        return SpeculationConfig(num_speculative_tokens=None if self.history is None else DEPTH)

    def drafter(self, request: DraftContext) -> Drafter:
        """Index the prompt of every row."""
        return NgramDrafter(self, request) if self.history is None else SuffixDrafter(self, request)

    def texts(self, request: DraftContext) -> Texts:
        """Start the texts of a call with a history, which hold the prompts of ``request``, and sources before them.

        Errors: a ValueError without a history.
        """
        if self.history is None:
            raise ValueError("this NgramSpeculator has no history; make it with NgramSpeculator(history_size=...)")
        histories = [self.history, *([] if self._lasting is None else [self._lasting])]
        texts = Texts(len(request.input_ids), histories, self.sizes[-1])
        for row, text in enumerate(beginnings(request)):
            texts.extend(row, text)
        return texts

    @property
    def learns(self) -> bool:
        return self.history is not None

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Remember the ``texts`` of a finished call, if there is a history."""
        if self.history is not None:
            for text in texts:
                self.history.add(text)

    def save(self, path: str | os.PathLike[str], tokenizer: Any) -> None:
        """Write what is remembered to a file, whole or not at all, for ``load`` with the same ``tokenizer``.

        It holds the texts of all calls, as readable as the texts themselves. Errors: a ValueError without a history,
        an OSError where nothing can be written.
        """
        if self.history is None:
            raise ValueError("there is no history to save; make one with NgramSpeculator(history_size=...)")
        write_history(path, SavedHistory(self.history.size, self.history.tokens()), tokenizer)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], tokenizer: Any, *, history_size: int | None = None, **options: Any
    ) -> NgramSpeculator:
        """Go on with the history that ``save`` wrote to ``path``; ``options`` are those of the constructor.

        ``history_size`` is by default that of the saved one; of a smaller one the latest tokens stay. Errors: a
        ValueError if it was written with another tokenizer or version, an OSError if it cannot be read or is damaged.
        """
        found = read_history(path, tokenizer)
        speculator = cls(history_size=found.size if history_size is None else history_size, **options)
        speculator.learn([*found.texts()])
        return speculator


class TextIndex:
    """An index from the n-grams of a growing sequence of tokens to what followed them."""

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._followers: dict[Path, list[int]] = {}  # n-gram -> positions right after its occurrences

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``, each in O(number of sizes)."""
        for token in tokens:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._followers.setdefault(tuple(self.tokens[end - size :]), []).append(end)
            self.tokens.append(token)

    def places(self, ngram: Path) -> list[int]:
        """Return the positions right after the latest occurrences of ``ngram``, the latest last."""
        return self._followers.get(ngram, [])[-LOOK_BACK:]

    def continuations(self, ngram: Path, depth: int) -> Iterator[Path]:
        """Yield up to ``depth`` tokens that followed each of the latest occurrences of ``ngram``, latest first."""
        for position in reversed(self.places(ngram)):
            # A copy that reaches the end of the text goes on with itself, so that a period continues.
            path = tuple(islice(cycle(self.tokens[position : position + depth]), depth))
            yield path[: path.index(BREAK)] if BREAK in path else path


class _Shape:
    """What ``config`` asks for: a chain, a dynamic tree, or one of the given ``ranks``."""

    def __init__(self, config: SpeculationConfig) -> None:
        tree = config.tree
        self.is_chain = tree is None
        self.most_nodes = config.num_tree_tokens if tree == "dynamic" else None
        self.most_continuations = 1 if tree is None else config.tree_topk if tree == "dynamic" else None
        self.ranks: set[Path] | None = None
        if tree is not None and not isinstance(tree, str):
            self.ranks = {tuple(path[:end]) for path in tree for end in range(1, len(path) + 1)}
        # children of a node that are looked at
        self.width = self.most_continuations or 1 + max(max(path) for path in self.ranks or {(0,)})
        count = config.num_speculative_tokens
        bounds = [count] if isinstance(count, int) else []
        self._depths = [*bounds, max(map(len, self.ranks))] if self.ranks else bounds

    def depth(self, limit: int) -> int:
        """Return the draft length where ``limit`` tokens are allowed."""
        return min([limit, *self._depths])


class NgramDrafter(Drafter):
    """An index of the text of each sequence of one ``generate`` call, on the CPU, to look up draft tokens in."""

    def __init__(self, speculator: NgramSpeculator, request: DraftContext) -> None:
        self._speculator, self._shape = speculator, _Shape(request.config)
        self._rows = [TextIndex(speculator.sizes) for _ in range(request.input_ids.shape[0])]
        self._policy = request.policy
        self._plans = self._shape.is_chain and speculator.estimates_acceptance(len(self._rows))
        self._lookups = Lookups(request.policy.acceptance, len(self._rows))
        for row, text in zip(self._rows, beginnings(request), strict=True):
            row.extend(text)

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Take in ``accepted``, look up what followed the same tokens before, at most ``limit`` tokens of it."""
        for row, tokens in zip(self._rows, accepted.emitted, strict=True):
            row.extend(tokens)
        depth = self._shape.depth(limit)
        trees = self._planned(depth) if self._plans else [self._tree(row, depth) for row in self._rows]
        return lay_out(trees, accepted.root, self._shape.is_chain)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with the texts of ``rows`` only."""
        kept = to_list(rows)
        self._rows = [self._rows[row] for row in kept]
        self._lookups.keep_rows(kept)

    def join(self, other: Drafter) -> bool:
        """Go on with the texts of ``other``, too."""
        assert isinstance(other, NgramDrafter)
        self._rows += other._rows
        self._lookups.join(other._lookups)
        return True

    def _planned(self, depth: int) -> list[list[Path]]:
        """Look up a chain for each row, as long as the policy says."""
        chains = [next(self._continuations(row, depth), ()) for row in self._rows]
        survival = [
            self._lookups.survival(number, row.tokens, chain, self._agreed(row)) if chain else []
            for number, (row, chain) in enumerate(zip(self._rows, chains, strict=True))
        ]
        plan = self._policy.plan(len(chains), [Estimate(DraftSource.NGRAM, survival)])
        return [[chain[:end] for end in range(1, 1 + len(chain[: plan.length]))] for chain in chains]

    def _agreed(self, row: TextIndex) -> int:
        """Count the tokens at the end of a row's text that also stand where they, or most of them, last occurred."""
        for size in self._speculator.sizes:
            ngram = tuple(row.tokens[-size:])
            for index in (row, self._speculator.corpus):
                if places := index.places(ngram):
                    return match_length(index.tokens, places[-1], row.tokens)
        return 0

    def _tree(self, row: TextIndex, depth: int) -> list[Path]:
        """List the nodes of a row's tree, each as its path from the root, parents before children."""
        nodes: dict[Path, None] = {}
        for path in islice(self._continuations(row, depth), self._shape.most_continuations):
            nodes.update(dict.fromkeys(path[:end] for end in range(1, len(path) + 1)))
        ranks = self._shape.ranks
        return list(nodes)[: self._shape.most_nodes] if ranks is None else _of_ranks(nodes, ranks)

    def _continuations(self, row: TextIndex, depth: int) -> Iterator[Path]:
        """Yield the different continuations of a row's text, best first."""
        seen: set[Path] = {()}
        corpus = self._speculator.corpus
        for size in self._speculator.sizes:
            ngram = tuple(row.tokens[-size:])
            found: Iterable[Path] = row.continuations(ngram, depth)
            if corpus.tokens:
                found = chain(found, corpus.continuations(ngram, depth))
            for path in _most_frequent_first(found) if self._speculator.match == "frequent" else found:
                if path not in seen:
                    seen.add(path)
                    yield path


class SuffixDrafter(Drafter):
    """The texts of one call, and the history of earlier ones, on the CPU."""

    def __init__(self, speculator: NgramSpeculator, request: DraftContext) -> None:
        self._rows = speculator.texts(request).rows()
        self._shape = _Shape(request.config)
        self._min_token_prob, self._policy = speculator.min_token_prob, request.policy
        self._calibration = request.policy.acceptance.calibration[DraftSource.NGRAM]
        self._last: list[Continuations] = [{} for _ in self._rows]  # chains, by row

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Take in ``accepted`` and look up what may follow, at most ``limit`` tokens of it."""
        shape, emitted = self._shape, accepted.emitted
        for (texts, number), tokens in zip(self._rows, emitted, strict=True):
            texts.extend(number, tokens)
        depth = shape.depth(limit)
        found = [
            texts.continuations(number, depth, shape.width, shape.most_nodes, self._min_token_prob)
            for texts, number in self._rows
        ]
        if shape.is_chain:
            for continuations, new in zip(self._last, emitted, strict=True):
                record_outcome(self._calibration, continuations, new, scored=True)
            self._last = found = self._planned(found)
        ranks = shape.ranks
        trees = [list(continuations) if ranks is None else _of_ranks(continuations, ranks) for continuations in found]
        return lay_out(trees, accepted.root, shape.is_chain)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only; the others' texts stay to be looked in."""
        kept = to_list(rows)
        self._rows, self._last = [self._rows[row] for row in kept], [self._last[row] for row in kept]

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too; each keeps looking in the texts of its own call."""
        assert isinstance(other, SuffixDrafter)
        self._rows += other._rows
        self._last += other._last
        return True

    def _planned(self, found: list[Continuations]) -> list[Continuations]:
        """Leave out of the rows' chains what the policy says is not worth its time."""
        survival = [calibrated(continuations, self._calibration) for continuations in found]
        plan = self._policy.plan(len(found), [Estimate(DraftSource.NGRAM, survival)])
        return [truncated(continuations, plan.length) for continuations in found]


def lay_out(trees: Sequence[Sequence[Path]], root: Tensor, is_chain: bool) -> Proposal:
    """Lay the rows' trees side by side below ``root`` (batch,), the smaller ones filled up with PAD_NODE nodes.

    A tree lists the paths to its nodes, parents before children. Where no row has one, nothing is sent to the device
    and the step is a plain one.
    """
    nodes = max(map(len, trees))
    if nodes == 0:
        return Proposal.nothing(root)
    rows = []
    for tree in trees:
        index = {(): 0} | {path: node for node, path in enumerate(tree, start=1)}
        absent = nodes - len(tree)
        above = [NO_PARENT, *(index[path[:-1]] for path in tree), *[PAD_NODE] * absent]
        rows.append([[0, *(path[-1] for path in tree), *[0] * absent], above])
    tokens, parents = to_device(rows, root.device).unbind(1)  # (batch, 1 + nodes)
    tokens[:, 0] = root
    depth = max(len(path) for tree in trees for path in tree)
    proposal = Proposal(tokens, parents, depth, is_chain=is_chain)
    return proposal.without_padding() if all(len(tree) == nodes for tree in trees) else proposal


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
