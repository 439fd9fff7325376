"""Faster versions of built-in stateless processors on the CPU, and one for rows that some of them refuse.

A block has a row for each node, so that warpers take longer than verification. transformers' top-p sorts the complete
vocabulary for each row. It keeps the most probable tokens, so it is enough to sort a few of them and to know the mass
of all. Its top-k looks through the complete vocabulary, although most parts of it have no token that is kept.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

from ..sampling import running_sums, widest_float
from ..scoring.rings import power_of_two

LARGE = 1 << 13  # vocabulary size from which on sorting takes longer
FIRST_SORTED, MOST_SORTED = (
    256,
    4096,
)  # most probable tokens that are sorted first, and then for rows that keep more than that
PART = 8  # scores of which the largest is compared first, in top-k
MANY_SCORES = 1 << 14  # from which on that takes less time: a few rows of small vocabularies do not pay for it
NEAR_TIE = 2e-6  # largest error of sums of float32 probabilities
# Numbers of warpers that a graph may take as tensors, so that it is not made again for each of them.
NUMBERS = {
    logits_process.EpsilonLogitsWarper: "epsilon",
    logits_process.MinPLogitsWarper: "min_p",
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopHLogitsWarper: "top_h",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.TypicalLogitsWarper: "mass",
}
REFUSING = (logits_process.EtaLogitsWarper, logits_process.TopHLogitsWarper)  # they raise for rows without a softmax


def in_less_time(processor: LogitsProcessor, nearly: bool = False) -> LogitsProcessor:
    """Return a faster processor with the same result as ``processor``, bit for bit; itself if there is none here.

    ``nearly``: the result may differ slightly. That is enough for draft tokens: whatever distribution they are sampled
    from, verification uses the same one.
    """
    if type(processor) is logits_process.TopKLogitsWarper:
        return TopK(processor, nearly)
    return TopP(processor, nearly) if type(processor) is logits_process.TopPLogitsWarper else processor


def for_graphs(processor: LogitsProcessor, device: torch.device) -> LogitsProcessor:
    """Return ``processor`` with tensors on ``device`` for its numbers, so that one graph serves many of them."""
    if type(processor) is logits_process.TopKLogitsWarper:
        place = torch.full((1,), processor.top_k - 1, device=device)
        return TopKOfMany(processor, power_of_two(processor.top_k), place)
    if (name := NUMBERS.get(type(processor))) is None:
        return processor
    copied, number = copy.copy(processor), getattr(processor, name)
    setattr(copied, name, torch.full((), number, dtype=widest_float(device), device=device))
    return copied


def lenient(processor: LogitsProcessor) -> LogitsProcessor:
    """Return ``processor`` for scores after draft tokens: it leaves rows alone for which it would raise."""
    return Lenient(processor) if type(processor) in REFUSING else processor


@dataclass(frozen=True)
class Lenient(LogitsProcessor):
    """A ``warper`` that leaves rows as they are that have a nan, or no finite maximum.

    It would raise a ValueError for them. But a draft token whose forward overflows is to be rejected, and a draft's
    own overflow is to end a chain. Nothing is asked of the scores, so that it may be part of a graph.
    """

    warper: LogitsProcessor

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        """Process ``scores`` (rows, vocabulary) float32."""
        is_usual = scores.amax(-1, keepdim=True).abs() < torch.inf  # (rows, 1); False for nan
        warped: Tensor = self.warper(input_ids, scores.masked_fill(~is_usual, 0.0))
        return torch.where(is_usual, warped, scores)


@dataclass(frozen=True)
class TopK(LogitsProcessor):
    """A faster version of transformers' ``warper``, which looks only at parts that may hold one of the k best tokens.

    A part has ``PART`` scores, of every n-th token. The k parts with the largest maxima hold the k largest scores.
    ``nearly``: all tokens are kept that reach the least of these maxima, such as 55 of 2,048 instead of 50.
    """

    warper: logits_process.TopKLogitsWarper
    nearly: bool = False

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        """Process ``scores`` (rows, vocabulary) float32."""
        kept, pays = self.warper.top_k, scores.device.type == "cpu" and scores.numel() >= MANY_SCORES
        if not pays or 2 * PART * kept > scores.shape[-1] or torch.compiler.is_compiling():
            plain: Tensor = self.warper(input_ids, scores)
            return plain
        missing = -scores.shape[-1] % PART
        whole = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf) if missing else scores
        parts = whole.unflatten(-1, (PART, -1))  # (rows, scores of a part, parts)
        best, part = parts.amax(1).topk(kept)  # (rows, kept)
        if not self.nearly:
            best = parts.gather(2, part[:, None].expand(-1, PART, -1)).flatten(1).topk(kept).values
        return torch.where(scores < best[:, -1:], self.warper.filter_value, scores)


@dataclass(frozen=True)
class TopKOfMany(LogitsProcessor):
    """Top-k with a tensor in place of k: the last token that is kept stands at ``place`` (1,) of the ``most`` best.

    Outside of graphs, for a draft that is not compiled, it is ``warper`` in less time.
    """

    warper: logits_process.TopKLogitsWarper
    most: int
    place: Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        """Process ``scores`` (rows, vocabulary) float32."""
        if not torch.compiler.is_compiling():
            return TopK(self.warper, nearly=True)(input_ids, scores)
        words = scores.shape[-1]
        best = scores.topk(min(self.most, words)).values  # (rows, most), the largest first
        least = best.index_select(-1, self.place.clamp(max=words - 1))  # (rows, 1)
        return scores.masked_fill(scores < least, self.warper.filter_value)


@dataclass(frozen=True)
class TopP(LogitsProcessor):
    """A faster version of transformers' ``warper``, which is called only for rows where rounding or ties would decide.

    ``nearly``: it is not called, and all ties are kept.
    """

    warper: logits_process.TopPLogitsWarper
    nearly: bool = False

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        """Process ``scores`` (rows, vocabulary) float32."""
        in_graph = torch.compiler.is_compiling()
        if scores.device.type != "cpu" or scores.shape[-1] < LARGE or (in_graph and not self.nearly):
            plain: Tensor = self.warper(input_ids, scores)
            return plain
        if in_graph:  # shapes in a graph must not depend on the scores
            last, _ = self._last_kept(scores, MOST_SORTED)
            return scores.masked_fill(scores < last, self.warper.filter_value)
        return self._process(input_ids, scores, FIRST_SORTED)

    def _process(self, ids: torch.LongTensor, scores: Tensor, count: int) -> Tensor:
        last, is_sure = self._last_kept(scores, count)
        processed = scores.masked_fill(scores < last, self.warper.filter_value)
        rows = (~is_sure).nonzero()[:, 0]
        if len(rows) and count == FIRST_SORTED:
            processed[rows] = self._process(ids, scores[rows], MOST_SORTED)
        elif len(rows) and not self.nearly:
            processed[rows] = self.warper(ids, scores[rows])
        return processed

    def _last_kept(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the score of the last token that is kept, (rows, 1), and whether that is certain, (rows,).

        A token is kept if the more probable ones have less than ``top_p`` together.
        """
        best, token = scores.topk(count := min(count, scores.shape[-1]))  # (rows, count)
        share = scores.softmax(-1).gather(-1, token).double()
        before = running_sums(share) - share - self.warper.top_p  # mass of the more probable tokens, minus top_p
        kept = (before < 0).sum(-1, keepdim=True).clamp_(min=self.warper.min_tokens_to_keep)
        last, next_one = (best.gather(-1, place.clamp(max=count - 1)) for place in (kept - 1, kept))
        is_sure = kept[:, 0] < count
        if not self.nearly:
            is_sure &= (before.abs() > NEAR_TIE).all(-1) & (next_one < last)[:, 0]
        return last, is_sure
