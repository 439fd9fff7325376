"""Built-in memoryless processors in less time, where a CPU would spend it.

transformers' top-p sorts the whole vocabulary for each row, and a block has a row for each node. What is kept are the
likeliest tokens, so that it is enough to sort a few of them, and to know the mass of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

LARGE = 1 << 13  # words, from which on sorting takes longer
FEW, MANY = 256, 4096  # likeliest tokens that are sorted first, and then for the rows of which more are kept
MARGIN = 2e-6  # what sums of float32 probabilities may be wrong by


def in_less_time(processor: LogitsProcessor, nearly: bool = False) -> LogitsProcessor:
    """Return what does the same as ``processor``, bit for bit; itself if nothing here does.

    ``nearly`` the same is enough for guesses, which follow whatever distribution a draft is given.
    """
    return TopP(processor, nearly) if type(processor) is logits_process.TopPLogitsWarper else processor


@dataclass(frozen=True)
class TopP(LogitsProcessor):
    """Do as transformers' ``warper``, which is asked about those rows alone where rounding or equals would decide.

    ``nearly``: it is not asked, and all equals are kept.
    """

    warper: logits_process.TopPLogitsWarper
    nearly: bool = False

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        """Process ``scores`` (rows, vocabulary) float32."""
        in_graph = torch.compiler.is_compiling()
        if scores.device.type != "cpu" or scores.shape[-1] < LARGE or (in_graph and not self.nearly):
            plain: Tensor = self.warper(input_ids, scores)
            return plain
        if in_graph:  # whose shapes depend on no scores
            last, _ = self._last_kept(scores, MANY)
            return scores.masked_fill(scores < last, self.warper.filter_value)
        return self._process(input_ids, scores, FEW)

    def _process(self, ids: torch.LongTensor, scores: Tensor, count: int) -> Tensor:
        last, is_sure = self._last_kept(scores, count)
        processed = scores.masked_fill(scores < last, self.warper.filter_value)
        rows = (~is_sure).nonzero()[:, 0]
        if len(rows) and count == FEW:
            processed[rows] = self._process(ids, scores[rows], MANY)
        elif len(rows) and not self.nearly:
            processed[rows] = self.warper(ids, scores[rows])
        return processed

    def _last_kept(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the score of the last token that is kept, (rows, 1), and whether it is that for sure, (rows,).

        A token is kept if those before it have less than ``top_p`` together.
        """
        best, token = scores.topk(count := min(count, scores.shape[-1]))  # (rows, count)
        share = scores.softmax(-1).gather(-1, token).double()
        before = share.cumsum(-1) - share - self.warper.top_p
        kept = (before < 0).sum(-1, keepdim=True).clamp_(min=self.warper.min_tokens_to_keep)
        last, behind = (best.gather(-1, place.clamp(max=count - 1)) for place in (kept - 1, kept))
        is_sure = kept[:, 0] < count
        if not self.nearly:
            is_sure &= (before.abs() > MARGIN).all(-1) & (behind < last)[:, 0]
        return last, is_sure
