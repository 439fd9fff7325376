"""Guess with a draft that is fed its own output: the drafter of EAGLE-like models.

What became text is read in one pass, each token beside the target's features of the position before it; every further
depth is one step in which a node reads its own token beside the hidden state of its parent::

    slots     x1|g0  x2|g1 ... x5|g4 │ a|h5   b|h5   c|ha          root x5, guesses a and b behind it, c behind a
              └── text, features g ──┘ └─ open forest, own h ─┘    (g: target's features, h: draft's hidden states)

The forest is forgotten when the target has spoken, because its nodes were read beside guesses of features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..proposal import Proposal
from ..slots import Slots
from .base import Drafter, News, Request
from .trees import grow

if TYPE_CHECKING:
    from .modeling import DraftModel, DraftOutput


class FeedbackDrafter(Drafter):
    """Keep the draft's slots of one call, one pair of token and features per slot."""

    def __init__(self, draft: DraftModel, request: Request) -> None:
        self._draft = draft
        self._request = request
        self._device = draft.device
        self._hidden: Tensor  # (batch, 1 + open nodes, hidden): behind the root, then of each open node
        cache = DynamicCache(config=draft.config.layers)
        mask = self._read_prompt(cache)  # (batch, pairs)
        self._slots = Slots(cache, len(request.input_ids), self._device, None if bool(mask.all()) else mask)
        self._first_position = mask.sum(1, keepdim=True)  # (batch, 1), of the first pair behind the prompt

    def _read_prompt(self, cache: DynamicCache) -> Tensor:
        """Read the pairs that lie in the prompt and return their mask (batch, pairs)."""
        request = self._request
        assert request.features is not None  # every draft of this kind names its feature layers
        # The target may have read more than these tokens (embeddings) or less (a cache handed in).
        pairs = max(0, min(request.input_ids.shape[1], request.features.shape[1]) - 1)
        first = request.input_ids.shape[1] - pairs
        mask = request.attention_mask[:, first - 1 : first - 1 + pairs].to(self._device)
        if pairs:
            self._draft(
                request.input_ids[:, first:].to(self._device),
                features=self._own(request.features[:, -pairs - 1 : -1]),
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                attention_mask=None if bool(mask.all()) else mask,
                past_key_values=cache,
                logits_to_keep=1,
            )
        return mask

    def propose(self, news: News, limit: int) -> Proposal:
        """Read what became text beside the target's features, then grow a proposal."""
        assert news.features is not None
        tokens, counts = news.tokens.to(self._device), news.counts.to(self._device)
        self._slots.commit(tokens[:, :0], [0] * len(tokens), in_place=True)  # forget the last forest
        logits, hidden = self._run(tokens, None, features=self._own(news.features))
        self._slots.commit(tokens, counts.tolist(), in_place=True)
        last = counts[:, None] - 1
        self._hidden = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1]))
        root = tokens.gather(1, last)[:, 0]
        law = self._law(logits.gather(1, last[:, :, None].expand(-1, -1, logits.shape[-1])))[:, 0]
        proposal = grow(root, law, self._step, self._request.config, limit, self._request.sample)
        return proposal.to(news.tokens.device)

    def _step(self, tokens: Tensor, parents: Tensor, ancestors: Tensor | None) -> Tensor:
        index = (parents + 1)[:, :, None].expand(-1, -1, self._hidden.shape[-1])
        logits, hidden = self._run(tokens, ancestors, hidden_states=self._hidden.gather(1, index))
        self._hidden = torch.cat([self._hidden, hidden], dim=1)
        return self._law(logits)

    def _run(self, tokens: Tensor, ancestors: Tensor | None, **beside: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step of the draft: logits (batch, new, draft vocabulary) and hidden states (batch, new, hidden)."""
        with self._slots.scoring(tokens.shape[1], ancestors, self._draft.config.layers) as block:
            output: DraftOutput = self._draft(
                tokens,
                position_ids=self._first_position + self._slots.advance(block),
                attention_mask=self._slots.mask(block),
                past_key_values=self._slots.cache,
                **beside,
            )
        assert output.logits is not None and output.hidden_states is not None
        return output.logits, output.hidden_states

    def _law(self, logits: Tensor) -> Tensor:
        """Turn logits over the draft vocabulary into the log-law of guesses over the target's."""
        logits = self._draft.over_target(logits)
        return self._request.law(logits.to(self._request.input_ids.device)).to(self._device)

    def _own(self, features: Tensor) -> Tensor:
        return features.to(self._device, self._draft.dtype)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        rows = rows.to(self._device)
        self._slots.keep_rows(rows)
        self._first_position = self._first_position.index_select(0, rows)
