"""Evidence of a diagnosis: the target's answers, which draft tokens were accepted, and which should have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafts.base import Speculator
from ..drafts.modeling import DraftModel
from ..metrics import RowStats, SpeculationStats
from ..scoring.features import Features
from ..scoring.plain import input_device, position_limit
from ..settings import SpeculationConfig
from ..unroll.feedback import UnrollInput


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer, decoded speculatively: token ids (1, length), ``row`` its statistics.

    ``start`` is the length of the prompt, ``most`` the length at which the answer is cut off. ``reads_prompt``: the
    first step drafted after the prompt's last token.
    """

    ids: Tensor
    start: int
    row: RowStats
    most: int
    reads_prompt: bool

    @property
    def roots(self) -> list[int]:
        """Return the positions of the roots of all steps: the tokens that were not draft tokens."""
        own = [self.start + i for i, is_draft in enumerate(self.row.drafted[:-1]) if not is_draft]
        return [self.start - 1] * self.reads_prompt + own

    def max_draft_tokens(self, root: int) -> int:
        """Return how many draft tokens fit between the token at ``root`` and the last one allowed."""
        return self.most - 2 - root


@torch.no_grad()
def answered(
    target: PreTrainedModel,
    speculator: Speculator,
    prompts: Sequence[list[int]],
    depth: int,
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answer ``prompts`` (token ids) one by one with chains of ``depth``; ``advance`` is called after each."""
    config = SpeculationConfig(num_speculative_tokens=depth, tree=None)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    generate: Any = target.generate
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=input_device(target))
        mask = torch.ones_like(ids)
        out = generate(ids, attention_mask=mask, speculator=speculator, speculation_config=config, **options)
        stats: SpeculationStats = out.speculation
        start, reads_prompt = len(prompt), stats.first_tokens_in_steps > 0
        found.append(Answer(out.sequences, start, stats.per_row[0], start + max_new_tokens, reads_prompt))
        advance()
    return found


@torch.no_grad()
def survival(target: PreTrainedModel, draft: Any, answer: Answer, depth: int) -> Tensor:
    """Return which draft tokens would be accepted if a step began at each token: (tokens of the answer, depth) bool.

    Teacher forcing: the draft reads the answer, and each draft token after right ones is compared with it. Draft
    tokens after the end count as wrong. Row 0 drafts after the prompt's last token.
    """
    ids, length = answer.ids, answer.ids.shape[1]
    right = torch.zeros(length, depth, dtype=torch.bool)  # by the position of the root
    for step, tokens in enumerate(_draft_tokens(target, draft, answer, depth)):
        places = torch.arange(len(tokens))
        inside = places + 1 + step < length
        wanted = ids[0, (places + 1 + step).clamp(max=length - 1).to(ids.device)].cpu()
        right[: len(tokens), step] = (tokens.cpu() == wanted) & inside
    return right[answer.start - 1 : length - 1].cumprod(dim=1).bool()


def _draft_tokens(target: PreTrainedModel, draft: Any, answer: Answer, depth: int) -> list[Tensor]:
    """Return for each step the draft token for a root at each position of the text: (length,) target ids or -1."""
    ids = answer.ids
    if not isinstance(draft, DraftModel):  # a language model predicts at every position that it has
        best = draft(ids[:, : position_limit(draft)].to(draft.device)).logits[0].argmax(-1)
        best = torch.cat([best, best.new_full((ids.shape[1] - len(best),), -1)])
        return [torch.cat([best[step:], best.new_full((step,), -1)]) for step in range(depth)]
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    anchors[:, answer.start - 1 : -1] = True
    features = _features(target, draft, ids).to(draft.device)
    given = UnrollInput(ids.to(draft.device), None, features, anchors.to(draft.device))
    unrolled = draft.unroll(given, draft.unroll_steps(depth))
    found = []
    for step, states in enumerate(unrolled.states[:depth]):
        best = draft.to_target_ids(unrolled.head(step, states)[0].argmax(-1))
        # Position i of step k drafts token i + 2 + k. Its root is token i + 1, and the first token is no root.
        found.append(torch.cat([best.new_full((1,), -1), best]))
    return found


def _features(target: PreTrainedModel, draft: DraftModel, ids: Tensor) -> Tensor:
    """Let ``target`` read a text, (1, length), and return the features for ``draft``, (1, length, widths)."""
    features = Features(target, draft.feature_layers(target))
    with features.watching() as caught:
        outputs = target(ids, **features.asked, use_cache=False, return_dict=True)
    return cast(Tensor, features.joined(outputs, caught))
