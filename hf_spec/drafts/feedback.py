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

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..proposal import Proposal
from ..scoring.plain import readable
from .base import AcceptedTokens, DraftContext, Drafter, draft_log_probs
from .readers import Reader, StaticDraftKV
from .static import StaticDrafter, take_rows
from .trees import Ahead, grow


class AutoregressiveDrafter(StaticDrafter):
    """Keep what the readers of a draft have read in one call.

    ``draft`` is a ``DraftModel`` or has its ``forward``, ``layer_config``, ``device``, ``dtype``, ``num_readers`` and
    ``over_target``. With several readers ``forward`` takes the number of one as ``reader``.
    """

    def __init__(self, draft: Any, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request
        self._static = static
        self._readers = [(StaticDraftKV if static else Reader)(draft, number) for number in range(draft.num_readers)]
        self._behind: list[Tensor] = []  # per reader (batch, 1, hidden): what it made of the root's pair
        self._read_prompt()

    def _read_prompt(self) -> None:
        """Read the pairs that lie in the prompt."""
        tokens, mask, features = pairs_of_prompt(self._request, self.device, self._draft.layer_config.vocab_size)
        beside = {"features": features.to(self.dtype)}
        for reader in self._readers:
            hidden = reader.read_prompt(tokens, mask, **beside)
            self._behind.append(hidden[:, -1:].clone())
            # Of the next reader's pairs the first has no token before it that was read.
            tokens, mask, beside = tokens[:, 1:], mask[:, :-1], {"hidden_states": hidden[:, :-1]}

    @property
    def vocabulary(self) -> int:
        return self._request.vocabulary

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read what became text beside the target's features, then grow a proposal."""
        on_draft = accepted.to(self.device, self.dtype)
        return self.grow_proposal(on_draft, limit).to(accepted.tokens.device)

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, ahead: Ahead | None = None) -> Proposal:
        readers, logits = self._read(accepted)
        growth = _Growth(self._draft, self._request, readers, self._behind)
        log_probs = draft_log_probs(self._draft, self._request, logits)[:, 0]
        request = self._request
        config, sample, more = request.config, request.sample, request.keep_drafting
        return grow(accepted.root, log_probs, growth.step, config, limit, sample, ahead=ahead, keep_drafting=more)

    def read(self, accepted: AcceptedTokens) -> None:
        self._read(accepted)

    def _read(self, accepted: AcceptedTokens) -> tuple[list[Any], Tensor]:
        """Let all readers read what became text; return them and the logits (batch, 1, ...) behind the root."""
        readers = [reader.opened() for reader in self._readers]
        beside: dict[str, Any] = {"features": accepted.features}
        logits, behind = [], []
        for number, reader in enumerate(readers):
            scores, hidden = reader.read(accepted.tokens, accepted, **beside)
            logits.append(accepted.last(scores))
            if number + 1 < len(readers):
                beside = {"hidden_states": torch.cat([self._behind[number], hidden[:, :-1]], dim=1)}
            last = accepted.last(hidden)
            if self._static:  # where a row may have no new token
                last = torch.where((accepted.counts > 0)[:, None, None], last, self._behind[number])
            behind.append(last)
        if self._static:
            for kept, new in zip(self._behind, behind, strict=True):
                kept.copy_(new)
        else:
            self._behind = behind
        return readers, logits[0]

    def keep_rows(self, rows: Tensor) -> None:
        rows = rows.to(self.device)
        if self._static:
            self._behind = [take_rows(hidden, rows) for hidden in self._behind]
        else:
            self._behind = [hidden.index_select(0, rows) for hidden in self._behind]
        for reader in self._readers:
            reader.keep_rows(rows)

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, unless some are padded."""
        assert isinstance(other, AutoregressiveDrafter)
        if not all(mine.join(theirs) for mine, theirs in zip(self._readers, other._readers, strict=True)):
            return False
        self._behind = [torch.cat(pair) for pair in zip(self._behind, other._behind, strict=True)]
        return True

    def make_room(self, columns: int) -> None:
        for reader in self._readers:
            cast(StaticDraftKV, reader).keys.make_room(columns)


class _Growth:
    """Remember what the readers made of the root and of each node behind it, while a proposal grows.

    ``behind`` are per reader the hidden states (batch, 1, hidden) that stand for the root.
    """

    def __init__(self, draft: Any, request: DraftContext, readers: list[Any], behind: list[Tensor]) -> None:
        self._draft, self._request, self._readers = draft, request, readers
        self._hidden = list(behind)  # per reader (batch, nodes that were read last, hidden)

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Read new nodes, as a ``Step`` does: log-probabilities (batch, new, vocabulary)."""
        read = self._read_by_several if depth < len(self._readers) else self._read_by_last
        logits, self._hidden = read(tokens, depth, self._of_parents(parents, tokens.shape[1]), ancestors)
        return draft_log_probs(self._draft, self._request, logits)

    def _of_parents(self, parents: Tensor | None, count: int) -> Callable[[int], Tensor]:
        """Return the function from the number of a reader to what it made of ``parents`` (batch, ``count``)."""
        if parents is None:
            return lambda number: self._hidden[number].expand(-1, count, -1)
        place = parents[:, :, None].expand(-1, -1, self._hidden[0].shape[-1])
        return lambda number: self._hidden[number].gather(1, place)

    def _read_by_last(
        self, tokens: Tensor, depth: int, above: Callable[[int], Tensor], ancestors: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Let the last reader, which may be the only one, read nodes beside what it made of their parents itself.

        Return logits (batch, new, draft vocabulary) and for each reader hidden states (batch, new, hidden).
        """
        logits, hidden = self._readers[-1].run(tokens, ancestors, depth - 1, hidden_states=above(-1))
        return logits, [hidden] * len(self._readers)  # the others are not asked again

    def _read_by_several(
        self, tokens: Tensor, depth: int, above: Callable[[int], Tensor], ancestors: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Let reader ``depth`` and all later ones read nodes, each beside what the reader before made of the parents.

        The first of them says what follows; the later ones will be asked at the next depths. Return as
        ``_read_by_last`` does.
        """
        said = [
            reader.run(tokens, ancestors, depth - 1, hidden_states=above(number - 1))
            for number, reader in enumerate(self._readers[depth:], start=depth)
        ]
        logits, hidden = said[0]
        return logits, [hidden] * depth + [states for _, states in said]  # those before are not asked again


def pairs_of_prompt(request: DraftContext, device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs that lie in the prompt: tokens, 0 where they are padded, and the features before them.

    Of tokens beyond the ``vocabulary`` 0 stands for each.

    They are (batch, pairs), (batch, pairs) and (batch, pairs, widths). The last position's feature comes with the
    first accepted tokens.
    """
    assert request.features is not None  # every draft that reads pairs names its feature layers
    # The target may have read more than these tokens (embeddings) or less (a cache handed in).
    pairs = max(0, min(request.input_ids.shape[1], request.features.shape[1]) - 1)
    first = request.input_ids.shape[1] - pairs
    tokens = readable(request.input_ids[:, first:], vocabulary).to(device)
    mask = request.attention_mask[:, first - 1 : first - 1 + pairs].to(device)
    return tokens, mask, request.features[:, -pairs - 1 : -1].to(device)
