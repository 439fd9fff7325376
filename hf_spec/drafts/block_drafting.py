"""Keep the context of a block draft, and grow proposals from what its blocks say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..proposal import Proposal
from .base import AcceptedTokens, DraftContext, Drafter, DraftOutput, guess_log_probs
from .static import OpenKeys, StaticDrafter, StaticKeys, Told, as_mask
from .trees import Ahead, at_depth, grow


class BlockGrowth:
    """What one block says about the guesses of one proposal: the same behind all guesses of a depth."""

    def __init__(self, draft: Any, request: DraftContext, root: Tensor, output: DraftOutput) -> None:
        assert output.logits is not None
        self._by_depth = guess_log_probs(draft, request, output.logits)  # (batch, guesses, vocabulary)

    @property
    def first(self) -> Tensor:
        """Return the log-probabilities (batch, vocabulary) behind the root."""
        return self._by_depth[:, 0]

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Return the log-probabilities behind new nodes, as a ``Step`` does."""
        return at_depth(self._by_depth, tokens, depth)

    @property
    def confidence(self) -> Callable[[], Tensor] | None:
        """Return what says how probable it is that the next guess will be accepted, where the draft can tell."""
        return None


class BlockDrafter(StaticDrafter):
    """Keep the context of one call, and let every block say what follows it."""

    growth: ClassVar[type[BlockGrowth]] = BlockGrowth

    def __init__(self, draft: Any, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request
        self._keys: StaticKeys | None = None  # the context, where slots are fixed
        self._cache = draft.new_cache(len(request.input_ids), self.device)
        self._padding: Tensor | None = None  # (batch, prompt), 0 where it is padded
        self.deepest = draft.config.num_guesses
        self._read_prompt(static)

    @property
    def vocabulary(self) -> int:
        return self._request.vocabulary

    def _read_prompt(self, static: bool) -> None:
        """Remember the prompt but for its last position, which comes with the first accepted tokens."""
        features, mask = self._request.features, self._request.attention_mask.to(self.device)
        assert features is not None  # every draft of this kind names its feature layers
        # The target may have read more than these tokens (embeddings) or less (a cache handed in).
        length = max(0, min(mask.shape[1], features.shape[1]) - 1)
        mask, features = mask[:, -length - 1 : -1], features[:, -length - 1 : -1]
        if static:
            self._keys = self._static_keys(features, mask)
        elif length:
            self._padding = None if bool(mask.all()) else mask
            self._remember(self.told(mask, mask.sum(1), features, [length] * len(mask)))

    def _static_keys(self, features: Tensor, mask: Tensor) -> StaticKeys:
        if not mask.shape[1]:  # what counts as padding teaches the shapes
            features = features.new_zeros((len(features), 1, features.shape[2]))
            mask = mask.new_zeros((len(mask), 1))
        context, cache = self._draft.fuse(features.to(self.device, self._draft.dtype)), DynamicCache()
        rotary = self._draft.rotary_emb(context, (mask.cumsum(1) - 1).clamp(min=0))
        self._draft.write_context(context, rotary, cache)
        return StaticKeys.adopt(cache, mask)

    def _remember(self, told: Told) -> Any:
        """Make the features of what became text context; return what the block is given as its cache."""
        assert told.features is not None
        context = self._draft.fuse(told.features)
        if self._keys is None:
            self._draft.remember(context, self._cache, self._padding)
            self._cache.commit(self._cache.rows.lengths[:, None], told.amounts, in_place=True, on_device=told.counts)
            return self._cache
        keys = self._keys.opened()
        rotary = self._draft.rotary_emb(context, keys.aim(context.shape[1]) - self._keys.before)
        self._draft.write_context(context, rotary, keys)
        keys.commit(told.counts)
        return keys

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Remember what became text before the root, read one block, and grow a proposal from it."""
        told = self.told(accepted.tokens, accepted.counts, accepted.features, accepted.amounts)
        return self.guess(told, min(limit, self._draft.config.num_guesses)).to(accepted.tokens.device)

    def guess(self, told: Told, limit: int, ahead: Ahead | None = None) -> Proposal:
        cache = self._remember(told)
        if limit == 0:
            return Proposal.nothing(told.root)
        positions, masks = None, self._padding
        if self._keys is not None:
            positions, masks = self._block(self._keys, cache, limit + (not self._draft.config.sample_from_anchor))
        given = {"position_ids": positions, "attention_mask": masks, "past_key_values": cache}
        output: DraftOutput = self._draft(told.root[:, None], **given, num_guesses=limit)
        said = self.growth(self._draft, self._request, told.root, output)
        config, sample = self._request.config, self._request.sample
        return grow(told.root, said.first, said.step, config, limit, sample, said.confidence, ahead)

    def _block(self, keys: StaticKeys, opened: OpenKeys, slots: int) -> tuple[Tensor, Any]:
        """Aim at a block; return the positions of the roots (batch, 1) and the masks by kind of layer."""
        column = torch.arange(keys.known.shape[1], device=keys.lengths.device)
        masks = {}
        for kind in dict.fromkeys(self._draft.config.layer_kinds):
            seen = self._draft.seen(opened.lengths, slots, column, kind) & keys.known[:, None]
            masks[kind] = as_mask(seen, self._draft.layer_config, self._draft.dtype)
        return opened.aim(slots)[:, :1] - keys.before, masks

    def read(self, told: Told) -> None:
        self._remember(told)

    def make_room(self, columns: int) -> None:
        cast(StaticKeys, self._keys).make_room(columns + self._draft.config.block_size)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        rows = rows.to(self.device)
        if self._keys is not None:
            self._keys.keep_rows(rows)
            return
        self._cache.keep_rows(rows)
        self._padding = None if self._padding is None else self._padding.index_select(0, rows)

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, unless some are padded."""
        assert isinstance(other, BlockDrafter)
        if self._padding is not None or other._padding is not None:
            return False
        self._cache.join(other._cache)
        return True
