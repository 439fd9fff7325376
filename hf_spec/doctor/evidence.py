"""What a diagnosis rests on: the target's answers, which guesses in them were accepted, and which should have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafts.base import Speculator
from ..drafts.modeling import DraftModel
from ..drafts.unrolling import UnrollInput
from ..metrics import RowStats, SpeculationStats
from ..scoring.features import Features
from ..scoring.plain import input_device
from ..settings import SpeculationConfig


@dataclass(frozen=True)
class Answer:
    """Hold a prompt and what the target made of it, greedily, with guesses: token ids (1, length), ``row`` its counts.

    ``start`` is the length of the prompt, ``most`` that at which the answer is cut off. ``reads_prompt``: the first
    step guessed behind the prompt's last token.
    """

    ids: Tensor
    start: int
    row: RowStats
    most: int
    reads_prompt: bool

    @property
    def roots(self) -> list[int]:
        """Return the places of the tokens behind which a step guessed: those that no draft had guessed."""
        own = [self.start + i for i, guessed in enumerate(self.row.guessed[:-1]) if not guessed]
        return [self.start - 1] * self.reads_prompt + own

    def room(self, root: int) -> int:
        """Return how many guesses fit between the token at ``root`` and the last one there may be."""
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
    """Answer ``prompts`` (token ids) one by one, guessing chains of ``depth``; ``advance`` is called after each."""
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
    """Return which guesses would be accepted if a step began behind each token: (tokens of the answer, depth) bool.

    Teacher forcing: the draft reads the answer, and each guess behind right ones is compared with it. What lies behind
    the end counts as wrong. Row 0 guesses behind the prompt's last token.
    """
    ids, length = answer.ids, answer.ids.shape[1]
    right = torch.zeros(length, depth, dtype=torch.bool)  # by the place of the root
    for step, guesses in enumerate(_guesses(target, draft, answer, depth)):
        places = torch.arange(len(guesses))
        inside = places + 1 + step < length
        wanted = ids[0, (places + 1 + step).clamp(max=length - 1).to(ids.device)].cpu()
        right[: len(guesses), step] = (guesses.cpu() == wanted) & inside
    return right[answer.start - 1 : length - 1].cumprod(dim=1).bool()


def _guesses(target: PreTrainedModel, draft: Any, answer: Answer, depth: int) -> list[Tensor]:
    """Return for each step what is guessed behind a root at each place of the text: (length,) target ids or -1."""
    ids = answer.ids
    if not isinstance(draft, DraftModel):  # a language model says at every place what comes next
        best = draft(ids.to(draft.device)).logits[0].argmax(-1)
        return [torch.cat([best[step:], best.new_full((step,), -1)]) for step in range(depth)]
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    anchors[:, answer.start - 1 : -1] = True
    features = _features(target, draft, ids).to(draft.device)
    given = UnrollInput(ids.to(draft.device), None, features, anchors.to(draft.device))
    unrolled = draft.unroll(given, draft.unroll_steps(depth))
    found = []
    for step, states in enumerate(unrolled.states[:depth]):
        best = draft.to_target_ids(unrolled.head(step, states)[0].argmax(-1))
        # Place i of step k guesses token i + 2 + k: its root is token i + 1, and the first token is nobody's root.
        found.append(torch.cat([best.new_full((1,), -1), best]))
    return found


def _features(target: PreTrainedModel, draft: DraftModel, ids: Tensor) -> Tensor:
    """Let ``target`` read a text, (1, length), and return what ``draft`` reads of it, (1, length, widths)."""
    features = Features(target, draft.feature_layers(target))
    with features.watching() as caught:
        outputs = target(ids, **features.asked, use_cache=False, return_dict=True)
    return cast(Tensor, features.joined(outputs, caught))
