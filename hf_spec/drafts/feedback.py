"""Guess with a draft that is fed its own output: the drafter of EAGLE-like models and of MTP layers.

What became text is read in one pass, each token beside the target's features of the position before it; every further
depth is one step in which a node reads its own token beside the hidden state of its parent::

    slots     x1|g0  x2|g1 ... x5|g4 │ a|h5   b|h5   c|ha          root x5, guesses a and b behind it, c behind a
              └── text, features g ──┘ └─ open forest, own h ─┘    (g: target's features, h: draft's hidden states)

The forest is forgotten when the target has spoken, because its nodes were read beside guesses of features.

A draft may have several *readers*, layers of its own for the first depths (DeepSeek-V3 with two MTP layers, arXiv
2412.19437, section 2.2). Reader k stands beside what reader k - 1 made of the token before, and gives the distribution
of depth k + 1; the last one is fed its own output from there on::

    reader 0   x1|g0  x2|g1  x3|g2 │                     distribution behind the root x3: a
    reader 1          x2|h1  x3|h2 │ a|h3                distribution behind a: b           (h: reader 0, i: reader 1)
                                     b|ia  c|ib ...      distributions behind b, c, ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..proposal import Proposal
from ..scoring.cache import SlotCache
from ..scoring.slots import Slots
from .base import Drafter, DraftOutput, News, Request, guess_log_probs
from .trees import grow


class FeedbackDrafter(Drafter):
    """Keep what the readers of a draft have read in one call.

    ``draft`` is a ``DraftModel`` or has its ``forward``, ``layer_config``, ``device``, ``dtype``, ``num_readers`` and
    ``over_target``. With several readers ``forward`` takes the number of one as ``reader``.
    """

    def __init__(self, draft: Any, request: Request) -> None:
        self._draft = draft
        self._request = request
        self._device = draft.device
        self._readers = [Reader(draft, number) for number in range(draft.num_readers)]
        self._hidden: list[Tensor] = []  # per reader (batch, 1 + open nodes, hidden): behind the root, then each node
        self._depth = 0  # of the nodes that were read last
        self._read_prompt()

    def _read_prompt(self) -> None:
        """Read the pairs that lie in the prompt."""
        tokens, mask, features = pairs_of_prompt(self._request, self._device)
        beside = {"features": features.to(self._draft.dtype)}
        for reader in self._readers:
            hidden = reader.read_prompt(tokens, mask, **beside)
            self._hidden.append(hidden[:, -1:])
            # Of the next reader's pairs the first has no token before it that was read.
            tokens, mask, beside = tokens[:, 1:], mask[:, :-1], {"hidden_states": hidden[:, :-1]}

    def propose(self, news: News, limit: int) -> Proposal:
        """Read what became text beside the target's features, then grow a proposal."""
        assert news.features is not None
        tokens, counts = news.tokens.to(self._device), news.counts.to(self._device)
        last = counts[:, None] - 1
        beside = {"features": self._own(news.features)}
        logits_by_reader = []
        for number, reader in enumerate(self._readers):
            logits, hidden = reader.read(tokens, counts.tolist(), **beside)
            logits_by_reader.append(logits.gather(1, last[:, :, None].expand(-1, -1, logits.shape[-1])))
            before = torch.cat([self._hidden[number][:, :1], hidden[:, :-1]], dim=1)
            beside = {"hidden_states": before}
            self._hidden[number] = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1]))
        self._depth = 0
        root = tokens.gather(1, last)[:, 0]
        log_probs = guess_log_probs(self._draft, self._request, logits_by_reader[0])[:, 0]
        proposal = grow(root, log_probs, self._step, self._request.config, limit, self._request.sample)
        return proposal.to(news.tokens.device)

    def _step(self, tokens: Tensor, parents: Tensor, ancestors: Tensor | None) -> Tensor:
        """Read new nodes, one level deeper than the last ones: log-probabilities (batch, new, vocabulary)."""
        self._depth += 1
        parent = (parents + 1)[:, :, None].expand(-1, -1, self._hidden[0].shape[-1])  # the root's state stands first
        several = self._depth < len(self._readers)
        logits, new = (self._read_by_several if several else self._read_by_last)(tokens, parent, ancestors)
        self._hidden = [torch.cat([old, hidden], dim=1) for old, hidden in zip(self._hidden, new, strict=True)]
        return guess_log_probs(self._draft, self._request, logits)

    def _read_by_last(self, tokens: Tensor, parent: Tensor, ancestors: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Let the last reader, which may be the only one, read nodes beside what it made of their parents itself.

        Return logits (batch, new, draft vocabulary) and for each reader hidden states (batch, new, hidden).
        """
        logits, hidden = self._readers[-1].run(tokens, ancestors, hidden_states=self._hidden[-1].gather(1, parent))
        return logits, [hidden] * len(self._readers)  # the others are not asked again, but nodes keep their numbers

    def _read_by_several(
        self, tokens: Tensor, parent: Tensor, ancestors: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Let reader ``depth`` and all later ones read nodes, each beside what the reader before made of the parents.

        The first of them says what follows; the later ones will be asked at the next depths. Return as
        ``_read_by_last`` does.
        """
        first = self._depth
        said = [
            reader.run(tokens, ancestors, hidden_states=self._hidden[number - 1].gather(1, parent))
            for number, reader in enumerate(self._readers[first:], start=first)
        ]
        logits, hidden = said[0]
        return logits, [hidden] * first + [states for _, states in said]  # those before are not asked again

    def _own(self, features: Tensor) -> Tensor:
        return features.to(self._device, self._draft.dtype)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        rows = rows.to(self._device)
        self._hidden = [hidden.index_select(0, rows) for hidden in self._hidden]
        for reader in self._readers:
            reader.keep_rows(rows)

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, unless some are padded."""
        assert isinstance(other, FeedbackDrafter)
        if not all(mine.join(theirs) for mine, theirs in zip(self._readers, other._readers, strict=True)):
            return False
        pairs = zip(self._hidden, other._hidden, strict=True)
        self._hidden = [torch.cat([mine[:, :1], theirs[:, :1]]) for mine, theirs in pairs]
        return True


def pairs_of_prompt(request: Request, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs that lie in the prompt: tokens, 0 where they are padded, and the features before them.

    They are (batch, pairs), (batch, pairs) and (batch, pairs, widths). The last position's feature comes with the
    first news.
    """
    assert request.features is not None  # every draft that reads pairs names its feature layers
    # The target may have read more than these tokens (embeddings) or less (a cache handed in).
    pairs = max(0, min(request.input_ids.shape[1], request.features.shape[1]) - 1)
    first = request.input_ids.shape[1] - pairs
    tokens = request.input_ids[:, first:].to(device)
    mask = request.attention_mask[:, first - 1 : first - 1 + pairs].to(device)
    return tokens, mask, request.features[:, -pairs - 1 : -1].to(device)


class Reader:
    """Keep the slots of one reader, one pair of token and hidden state per slot."""

    def __init__(self, draft: Any, number: int) -> None:
        self._draft = draft
        self._which = {"reader": number} if draft.num_readers > 1 else {}
        self._slots: Slots
        self._first_position: Tensor  # (batch, 1), of the first pair behind the prompt

    def read_prompt(self, tokens: Tensor, mask: Tensor, **beside: Tensor) -> Tensor:
        """Read pairs, padded where ``mask`` (batch, pairs) is 0, and return hidden states (batch, pairs, hidden).

        Without any pair they are zeros, (batch, 1, hidden).
        """
        cache = DynamicCache(config=self._draft.layer_config)
        hidden = torch.zeros(
            (len(tokens), 1, self._draft.layer_config.hidden_size), dtype=self._draft.dtype, device=tokens.device
        )
        padding = None if bool(mask.all()) else mask
        if tokens.shape[1]:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            given = {"position_ids": positions, "attention_mask": padding, "past_key_values": cache}
            output: DraftOutput = self._draft(tokens, **given, logits_to_keep=1, **self._which, **beside)
            assert output.hidden_states is not None
            hidden = output.hidden_states
        self._slots = Slots(SlotCache.adopt(cache, len(tokens), tokens.device), cache, padding)
        self._first_position = mask.sum(1, keepdim=True)
        return hidden

    def read(
        self, tokens: Tensor, counts: list[int], ancestors: Tensor | None = None, **beside: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Forget the last forest and read what became text, ``counts[b]`` of ``tokens`` (batch, m).

        What stands behind them, if ``ancestors`` say so, is read with them and forgotten.
        """
        self._slots.commit(tokens[:, :0], [0] * len(tokens), in_place=True)
        logits, hidden = self.run(tokens, ancestors, **beside)
        self._slots.commit(tokens, counts, in_place=True)
        return logits, hidden

    def run(self, tokens: Tensor, ancestors: Tensor | None, **beside: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step: logits (batch, new, draft vocabulary) and hidden states (batch, new, hidden)."""
        with self._slots.scoring(tokens.shape[1], ancestors, self._draft.layer_config) as block:
            output: DraftOutput = self._draft(
                tokens,
                position_ids=self._first_position + self._slots.advance(block),
                attention_mask=self._slots.mask(block),
                past_key_values=self._slots.cache,
                **self._which,
                **beside,
            )
        assert output.logits is not None
        assert output.hidden_states is not None
        return output.logits, output.hidden_states

    def join(self, other: Reader) -> bool:
        """Take over the rows of ``other`` behind one's own, and tell whether that is possible."""
        if (shift := self._slots.join(other._slots)) is None:
            return False
        self._first_position = torch.cat([self._first_position, other._first_position + shift])
        return True

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self._slots.keep_rows(rows)
        self._first_position = self._first_position.index_select(0, rows)
