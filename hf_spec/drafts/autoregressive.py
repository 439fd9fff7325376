"""Draft with a model that reads its own output: the drafter of EAGLE-like models and of MTP layers.

Accepted tokens are read in one pass, each with the target's features of the position before it. Every further
depth is one step, in which a node reads its own token with the hidden state of its parent::

    slots     x1|g0  x2|g1 ... x5|g4 │ a|h5   b|h5   c|ha          root x5, draft tokens a and b after it, c after a
              └── text, features g ──┘ └─ open forest, own h ─┘    (g: target's features, h: draft's hidden states)

Draft nodes are dropped after verification, because they were read with the draft's own hidden states.

A draft may have several *readers*, layers of its own for the first depths (DeepSeek-V3 with two MTP layers, arXiv
2412.19437, section 2.2). Reader k reads a token together with the output of reader k - 1 for the token before. It
gives the distribution of depth k + 1; the last one is fed its own output from there on::

    reader 0   x1|g0  x2|g1  x3|g2 │                     distribution after the root x3: a
    reader 1          x2|h1  x3|h2 │ a|h3                distribution after a: b            (h: reader 0, i: reader 1)
                                     b|ia  c|ib ...      distributions after b, c , ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..proposal import Proposal
from ..scoring.plain import readable
from .base import AcceptedTokens, DraftContext, Drafter, draft_log_probs
from .draft_kv import DraftKV, StaticDraftKV
from .static import PutBuffer, StaticDrafter
from .trees import PreparedDraft, grow


class AutoregressiveDrafter(StaticDrafter):
    """What the readers of a draft have read in one call.

    ``draft`` is a ``DraftModel`` or has its ``forward``, ``layer_config``, ``device``, ``dtype``, ``num_modules`` and
    ``over_target``. With several readers ``forward`` takes the number of one as ``module``.
    """

    def __init__(self, draft: Any, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request
        self._static = static
        self._kvs = [(StaticDraftKV if static else DraftKV)(draft, number) for number in range(draft.num_modules)]
        self._root_hidden: list[Tensor] = []  # per reader (batch, 1, hidden): what it made of the root's pair
        self._read_prompt()
        self._request = request.without_features

    def _read_prompt(self) -> None:
        """Read the pairs that lie in the prompt."""
        tokens, mask, features = pairs_of_prompt(self._request, self.device, self._draft.layer_config.vocab_size)
        inputs = {"features": features.to(self.dtype)}
        for kv in self._kvs:
            hidden = kv.read_prompt(tokens, mask, **inputs)
            self._root_hidden.append(hidden[:, -1:].clone())
            # Of the next reader's pairs the first has no token before it that was read.
            tokens, mask, inputs = tokens[:, 1:], mask[:, :-1], {"hidden_states": hidden[:, :-1]}

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        kvs, logits = self._read(accepted)
        growth = _Growth(self._draft, self._request, kvs, self._root_hidden)
        log_probs = draft_log_probs(self._draft, self._request, logits)[:, 0]
        request = self._request
        config, sample, more = request.config, request.sample, request.keep_drafting
        return grow(
            accepted.root, log_probs, growth.step, config, limit, sample, prepared=prepared, keep_drafting=more
        )

    def read(self, accepted: AcceptedTokens) -> None:
        self._read(accepted)

    def _read(self, accepted: AcceptedTokens) -> tuple[list[Any], Tensor]:
        """Let all readers read accepted tokens; return them and the logits (batch, 1, ...) after the root."""
        kvs = [kv.opened() for kv in self._kvs]
        inputs: dict[str, Any] = {"features": accepted.features}
        logits, root_hidden = [], []
        for number, kv in enumerate(kvs):
            scores, hidden = kv.read_last(accepted.tokens, accepted, **inputs)
            logits.append(scores)
            if number + 1 < len(kvs):
                inputs = {"hidden_states": torch.cat([self._root_hidden[number], hidden[:, :-1]], dim=1)}
            last = accepted.last(hidden)
            if self._static:  # where a row may have no new token
                last = torch.where((accepted.counts > 0)[:, None, None], last, self._root_hidden[number])
            root_hidden.append(last)
        if self._static:
            for kept, new in zip(self._root_hidden, root_hidden, strict=True):
                kept.copy_(new)
        else:
            self._root_hidden = root_hidden
        return kvs, logits[0]

    def keep_rows(self, rows: Tensor) -> None:
        rows = rows.to(self.device)
        self._root_hidden = [hidden.index_select(0, rows) for hidden in self._root_hidden]
        for kv in self._kvs:
            kv.keep_rows(rows)

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, unless some are padded."""
        assert isinstance(other, AutoregressiveDrafter)
        if not all(mine.join(theirs) for mine, theirs in zip(self._kvs, other._kvs, strict=True)):
            return False
        self._root_hidden = [torch.cat(pair) for pair in zip(self._root_hidden, other._root_hidden, strict=True)]
        return True

    def make_room(self, columns: int) -> bool:
        grown = [cast(StaticDraftKV, kv).keys.make_room(columns) for kv in self._kvs]
        return any(grown)

    def move(self, put: PutBuffer) -> None:
        self._root_hidden = [put((number, "root"), hidden) for number, hidden in enumerate(self._root_hidden)]
        for number, kv in enumerate(self._kvs):
            cast(StaticDraftKV, kv).keys.move(put, number)


class _Growth:
    """The outputs of the readers for the nodes that were read last, while a proposal grows.

    ``root_hidden`` are per reader the hidden states (batch, 1, hidden) that stand for the root.
    """

    def __init__(self, draft: Any, request: DraftContext, kvs: list[Any], root_hidden: list[Tensor]) -> None:
        self._draft, self._request, self._kvs = draft, request, kvs
        self._hidden = list(root_hidden)  # per reader (batch, nodes that were read last, hidden)

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Read new nodes, as a ``Step`` does: log-probabilities (batch, new, vocabulary)."""
        read = self._run_from if depth < len(self._kvs) else self._run_last
        logits, self._hidden = read(tokens, depth, self._of_parents(parents, tokens.shape[1]), ancestors)
        return draft_log_probs(self._draft, self._request, logits)

    def _of_parents(self, parents: Tensor | None, count: int) -> Callable[[int], Tensor]:
        """Return the function from the number of a reader to what it made of ``parents`` (batch, ``count``)."""
        if parents is None:
            return lambda number: self._hidden[number].expand(-1, count, -1)
        place = parents[:, :, None].expand(-1, -1, self._hidden[0].shape[-1])
        return lambda number: self._hidden[number].gather(1, place)

    def _run_last(
        self, tokens: Tensor, depth: int, above: Callable[[int], Tensor], ancestors: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Let the last reader, which may be the only one, read nodes together with its own output for their parents.

        Return logits (batch, new, draft vocabulary) and for each reader hidden states (batch, new, hidden).
        """
        logits, hidden = self._kvs[-1].run(tokens, ancestors, depth - 1, hidden_states=above(-1))
        return logits, [hidden] * len(self._kvs)  # the others are not asked again

    def _run_from(
        self, tokens: Tensor, depth: int, above: Callable[[int], Tensor], ancestors: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Let reader ``depth`` and all later ones read nodes, with the output of the reader before for the parents.

        The first of them says what follows; the later ones will be asked at the next depths. Return as
        ``_run_last`` does.
        """
        outputs = [
            kv.run(tokens, ancestors, depth - 1, hidden_states=above(number - 1))
            for number, kv in enumerate(self._kvs[depth:], start=depth)
        ]
        logits, hidden = outputs[0]
        return logits, [hidden] * depth + [states for _, states in outputs]  # those before are not asked again


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
