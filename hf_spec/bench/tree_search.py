"""Search for the best static tree of a draft, from the accuracy of each rank at each depth.

The node of rank r at depth d is the draft's r-th best token after d - 1 right draft tokens. How often it is the
target's token is measured at every position of the target's own greedy text; the draft is forced along that text. A
path is accepted about as often as the product of its nodes' accuracies. Greedy expansion by that product gives the
best tree (Medusa, arXiv 2401.10774, section 3.3.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints.resolve import as_speculator
from ..drafts.base import AcceptedTokens, DraftContext, Drafter, Speculator
from ..drafts.ngram.speculator import NgramSpeculator
from ..drafts.plain.speculator import PlainSpeculator
from ..proposal import Proposal
from ..settings import SpeculationConfig
from .prompts import check_positions

Tree = list[tuple[int, ...]]


def search_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Tree:
    """Find the static tree of ``nodes`` draft tokens with the most accepted ones, if accuracies are independent.

    ``accuracies[d][r]`` is how often the token of rank r at depth d is right (``rank_accuracies``). A longer path is
    never right more often, so the best paths form a tree. Returns paths for ``SpeculationConfig(tree=...)``, fewer
    than ``nodes`` if no others are ever right.
    """
    found: Tree = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]  # (-probability, path), a heap
    while waiting and len(found) <= nodes:
        minus, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < len(accuracies):
            for rank, share in enumerate(accuracies[len(path)]):
                if share > 0:
                    heapq.heappush(waiting, (minus * share, (*path, rank)))
    return found[1:]  # without the root


def expected_length(accuracies: Sequence[Sequence[float]], tree: Tree) -> float:
    """Return the expected tokens per target forward with ``tree``, the target's own included."""
    length = 1.0
    for path in tree:
        share = 1.0
        for depth, rank in enumerate(path):
            share *= accuracies[depth][rank]
        length += share
    return length


@torch.no_grad()
def rank_accuracies(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    speculator: Any,
    depth: int,
    ranks: int = 10,
    max_new_tokens: int = 128,
) -> list[list[float]]:
    """Measure how often the draft token of each rank at each depth is the target's: (up to ``depth``, ``ranks``).

    ``prompts`` are token ids, (1, length) each. At depth d only positions count at which all earlier tokens were right
    with ranks below ``ranks``. Depths that the draft never reached are dropped.

    Errors: ValueError if the draft does not rank tokens, as n-grams do not, or if a prompt leaves no positions for an
    answer, and what ``generate`` raises.
    """
    probe = _Probe(as_speculator(speculator, target), ranks)
    refuse_unranked(probe.inner)
    check_positions(target, (ids[0].tolist() for ids in prompts), max_new_tokens)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    generate: Any = target.generate  # of a mixin that the type does not know
    for ids in prompts:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        probe.text = generate(**inputs, **options, speculator=False)[0].tolist()
        config = SpeculationConfig(num_speculative_tokens=depth)
        generate(**inputs, **options, speculator=probe, speculation_config=config)
    if not probe.tried:
        raise _unranked(probe.inner)
    return [[right / tried for right in row] for tried, row in zip(probe.tried, probe.right, strict=True)]


def refuse_unranked(speculator: Speculator) -> None:
    """Raise a ValueError for a draft that ranks no tokens, as far as its kind says."""
    if isinstance(speculator, NgramSpeculator | PlainSpeculator):
        raise _unranked(speculator)


def _unranked(speculator: Speculator) -> ValueError:
    return ValueError(
        f"{type(speculator).__name__} does not rank draft tokens, so no static tree can be searched for; use a draft "
        "with weights"
    )


class _Probe(Speculator):
    """A speculator that forces a draft along ``text`` and counts the ranks of its tokens; it proposes nothing."""

    def __init__(self, inner: Speculator, ranks: int) -> None:
        self.inner = inner
        self.ranks = ranks
        self.text: list[int] = []
        self.tried: list[int] = []  # by depth
        self.right: list[list[int]] = []  # by depth and rank

    @property
    def shares_target_cache(self) -> bool:
        return self.inner.shares_target_cache

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return self.inner.feature_layers(target)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        self.inner.check(target, config)

    def drafter(self, request: DraftContext) -> Drafter:
        return _ProbeDrafter(self, request)

    def count(self, depth: int, rank: int) -> None:
        """Count that the right token had ``rank`` at ``depth``."""
        if depth == len(self.tried):
            self.tried.append(0)
            self.right.append([0] * self.ranks)
        self.tried[depth] += 1
        if rank < self.ranks:
            self.right[depth][rank] += 1


class _ProbeDrafter(Drafter):
    """Teacher forcing of a draft along the known text: the text's next token becomes the draft's best token.

    The draft asks for log-probabilities once per depth. First the rank of the text's next token in the draft's own
    distribution is counted. Then the draft is given a distribution with all mass on that token::

        text after the root     the  cat  sat
        depth                    0    1    2
        rank in the draft        0    3    0     counted: depth 0 rank 0, depth 1 rank 3, depth 2 rank 0
    """

    def __init__(self, probe: _Probe, request: DraftContext) -> None:
        self._probe = probe
        self._known = request.input_ids.shape[1]  # tokens of the text that the draft was given
        self._next_tokens: list[int] = []  # the following tokens of the text, as many as are to be drafted
        self._depth = 0  # of the next draft token
        self._counts = True  # False after a rank that no tree holds, and where the text is not the target's
        self._log_probs = request.log_probs
        self._drafter = probe.inner.drafter(replace(request, log_probs=self._lead))

    def _lead(self, logits: Tensor) -> Tensor:
        """Turn draft logits (..., vocabulary) into log-probabilities that force the text; count its ranks."""
        log_probs = self._log_probs(logits)
        led = torch.full(log_probs.shape, -torch.inf, device=log_probs.device)
        # One distribution per depth: autoregressive drafts give one at a time, Medusa heads all at once.
        for own, one in zip(log_probs.flatten(0, -2), led.flatten(0, -2), strict=True):
            if self._depth == len(self._next_tokens):
                break
            token = self._next_tokens[self._depth]
            self._count(own, token)
            one[token] = 0.0  # a view: sets what is returned
            self._depth += 1
        return led

    def _count(self, own: Tensor, token: int) -> None:
        """Count the rank of ``token`` in the draft's own log-probabilities (vocabulary,)."""
        if self._counts:
            is_in_vocabulary = own[token] > -torch.inf
            rank = int((own > own[token]).sum()) if is_in_vocabulary else self._probe.ranks
            self._probe.count(self._depth, rank)
            self._counts = rank < self._probe.ranks

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Let the draft run but propose nothing, so that the text advances by one token and every position counts."""
        self._known += int(accepted.counts[0])
        known, text = self._known, self._probe.text
        self._next_tokens = text[known : known + limit]
        self._depth, self._counts = 0, text[known - 1 : known] == accepted.root.tolist()  # half precision may differ
        self._drafter.propose(accepted, limit)
        return Proposal.nothing(accepted.root)

    def keep_rows(self, rows: Tensor) -> None:
        """Do nothing, because there is only one row."""
