"""Drafting with a block draft: the KV cache of its context, and proposals from the logits of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..proposal import Proposal
from .base import AcceptedTokens, DraftContext, Drafter, DraftOutput, draft_log_probs
from .static import OpenKeys, PutBuffer, StaticDrafter, StaticKeys, as_mask
from .trees import PreparedDraft, at_depth, grow


class BlockGrowth:
    """The distributions of one block for one proposal: one per depth, whatever draft tokens come before.

    ``first`` (batch, vocabulary) are the log-probabilities after the root.
    """

    first: Tensor

    def __init__(self, draft: Any, request: DraftContext, root: Tensor, output: DraftOutput) -> None:
        assert output.logits is not None
        self._by_depth = draft_log_probs(draft, request, output.logits)  # (batch, depths, vocabulary)
        self.first = self._by_depth[:, 0]

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Return the log-probabilities after new nodes, as a ``Step`` does."""
        return at_depth(self._by_depth, tokens, depth)

    @property
    def confidence(self) -> Callable[[], Tensor] | None:
        """Return the function that predicts the acceptance of the next draft token; None if the draft has none."""
        return None


class BlockDrafter(StaticDrafter):
    """The context of one call as a KV cache, from which every block drafts."""

    def __init__(self, draft: Any, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request
        self._keys: StaticKeys | None = None  # the context, if slots are fixed
        self._cache = draft.new_cache(len(request.input_ids), self.device)
        self._padding: Tensor | None = None  # (batch, prompt), 0 at padding
        self.deepest = draft.config.num_draft_tokens
        self._read_prompt(static)
        self._request = request.without_features

    def _read_prompt(self, static: bool) -> None:
        """Cache the prompt without its last position, which comes with the first accepted tokens."""
        features, mask = self._request.features, self._request.attention_mask.to(self.device)
        assert features is not None  # every block draft names its feature layers
        # The target may have read more than these tokens (embeddings), or fewer (a cache passed by the user).
        length = max(0, min(mask.shape[1], features.shape[1]) - 1)
        mask, features = mask[:, -length - 1 : -1], features[:, -length - 1 : -1]
        if static:
            self._keys = self._static_keys(features, mask)
        elif length:
            self._padding = None if bool(mask.all()) else mask
            self._remember(
                AcceptedTokens(mask, mask.sum(1), features, [length] * len(mask)).to(self.device, self.dtype)
            )

    def _static_keys(self, features: Tensor, mask: Tensor) -> StaticKeys:
        if not mask.shape[1]:  # one position of padding, only to learn the shapes
            features = features.new_zeros((len(features), 1, features.shape[2]))
            mask = mask.new_zeros((len(mask), 1))
        context, cache = self._draft.fuse(features.to(self.device, self._draft.dtype)), DynamicCache()
        rotary = self._draft.rotary_emb(context, (mask.cumsum(1) - 1).clamp(min=0))
        self._draft.write_context(context, rotary, cache)
        return StaticKeys.adopt(cache, mask)

    def _remember(self, accepted: AcceptedTokens) -> Any:
        """Add the features of accepted tokens to the context; return the cache that the block is given."""
        assert accepted.features is not None
        context = self._draft.fuse(accepted.features)
        if self._keys is None:
            self._draft.remember(context, self._cache, self._padding)
            self._cache.commit(
                self._cache.rows.lengths[:, None], accepted.amounts, in_place=True, on_device=accepted.counts
            )
            return self._cache
        keys = self._keys.opened()
        rotary = self._draft.rotary_emb(context, keys.reserve(context.shape[1]) - self._keys.before)
        self._draft.write_context(context, rotary, keys)
        keys.commit(accepted.counts)
        return keys

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        cache = self._remember(accepted)
        if limit == 0:
            return Proposal.nothing(accepted.root)
        positions, masks = None, self._padding
        if self._keys is not None:
            positions, masks = self._block(self._keys, cache, limit + (not self._draft.config.sample_from_anchor))
        given = {"position_ids": positions, "attention_mask": masks, "past_key_values": cache}
        output: DraftOutput = self._draft(accepted.root[:, None], **given, num_draft_tokens=limit)
        said = self._draft.growth(self._draft, self._request, accepted.root, output)
        config, sample = self._request.config, self._request.sample
        return grow(accepted.root, said.first, said.step, config, limit, sample, said.confidence, prepared)

    def _block(self, keys: StaticKeys, opened: OpenKeys, slots: int) -> tuple[Tensor, Any]:
        """Choose a block's columns; return the positions of the roots (batch, 1) and the masks by kind of layer."""
        column = torch.arange(keys.known.shape[1], device=keys.lengths.device)
        masks = {}
        for kind in dict.fromkeys(self._draft.config.layer_kinds):
            seen = self._draft.seen(opened.lengths, slots, column, kind) & keys.known[:, None]
            masks[kind] = as_mask(seen, self._draft.layer_config, self._draft.dtype)
        return opened.reserve(slots)[:, :1] - keys.before, masks

    def read(self, accepted: AcceptedTokens) -> None:
        self._remember(accepted)

    def make_room(self, columns: int) -> bool:
        return cast(StaticKeys, self._keys).make_room(columns + self._draft.config.block_size)

    def move(self, put: PutBuffer) -> None:
        cast(StaticKeys, self._keys).move(put)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        rows = rows.to(self.device)
        if self._keys is not None:
            self._keys.keep_rows(rows)
            return
        self._cache.keep_rows(rows)
        self._padding = None if self._padding is None else self._padding.index_select(0, rows)

    def join(self, other: Drafter) -> bool:
        """Append the rows of ``other``; refuse if some are padded."""
        assert isinstance(other, BlockDrafter)
        if self._padding is not None or other._padding is not None:
            return False
        self._cache.join(other._cache)
        return True
