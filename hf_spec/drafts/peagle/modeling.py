"""P-EAGLE drafts (arXiv 2602.01469): EAGLE-3's layers, which predict all depths in one forward.

Accepted tokens are read as in EAGLE-3, each together with the features of the position before. One position more
follows the root for each further depth. It reads a mask token and ``mask_hidden``, in place of features that are not
known yet. So no depth depends on the draft tokens of the others::

    x1|g0  x2|g1  x3|g2 │ mask|m  mask|m         root x3; depths 1, 2 and 3 are predicted at the last three positions
    └──── kept ───────┘   └─ dropped ──┘         (m: mask_hidden, through the same norms and fc as a feature)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...proposal import Proposal
from ..autoregressive import pairs_of_prompt
from ..base import LAST_LOGITS_FROM, AcceptedTokens, DraftContext, Drafter, draft_log_probs
from ..draft_kv import DraftKV, StaticDraftKV
from ..files import Checkpoint
from ..fusing import FusingDraftModel
from ..fusing_files import sort_features
from ..static import PutBuffer, StaticDrafter
from ..trees import PreparedDraft, grow_at_once
from .configuration import PEagleSpeculatorConfig
from .formats import FORMATS, engines

if TYPE_CHECKING:
    from ...unroll.feedback import Unrolled, UnrollInput


class PEagleDrafter(StaticDrafter):
    """The KV cache of one call's text; all depths after it are drafted in one forward."""

    def __init__(self, draft: PEagleDraftModel, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request.without_features
        self._static = static
        self._kv = (StaticDraftKV if static else DraftKV)(draft, 0)
        tokens, mask, features = pairs_of_prompt(request, draft.device, draft.layer_config.vocab_size)
        self._kv.read_prompt(tokens, mask, features=features.to(draft.dtype))

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        more, is_long = max(0, limit - 1), accepted.tokens.shape[1] > LAST_LOGITS_FROM
        logits = self._read_much(accepted, more) if is_long and not self._static else self._read(accepted, more)
        log_probs = draft_log_probs(self._draft, self._request, logits)  # (batch, depths, vocabulary)
        return grow_at_once(accepted.root, log_probs, self._request.config, limit, self._request.sample, prepared)

    def _read(self, accepted: AcceptedTokens, more: int) -> Tensor:
        """Read accepted tokens and ``more`` masks: logits (batch, 1 + more, draft vocabulary) of root and masks."""
        assert accepted.features is not None
        width, device = accepted.tokens.shape[1], self._draft.device
        tokens, given = self._draft.with_masks(accepted.tokens, accepted.features, more)
        is_chain = len(accepted.counts) == 1 and not self._static  # nothing is padded
        seen = ancestors_after(accepted.counts, width, more) if more and not is_chain else None
        logits, _ = self._kv.opened().read(tokens, accepted, seen, features=given)
        later = torch.arange(width, width + more, device=device).expand(len(accepted.counts), -1)
        speaking = torch.cat([accepted.counts[:, None] - 1, later], dim=1)  # (batch, depths): root, masks
        return cast(Tensor, logits.gather(1, speaking[:, :, None].expand(-1, -1, logits.shape[-1])))

    def _read_much(self, accepted: AcceptedTokens, more: int) -> Tensor:
        """Read the tokens of many plain steps, of which no logits are needed, and then the masks."""
        assert accepted.features is not None
        width = accepted.tokens.shape[1]
        tokens, given = self._draft.with_masks(accepted.tokens, accepted.features, more)
        logits, _ = self._kv.read_last(accepted.tokens, accepted, features=given[:, :width])
        if not more:
            return logits
        later, _ = self._kv.run(tokens[:, width:], None, None, features=given[:, width:])
        return torch.cat([logits, later], dim=1)

    def read(self, accepted: AcceptedTokens) -> None:
        assert accepted.features is not None
        self._kv.opened().read(accepted.tokens, accepted, features=accepted.features)

    def make_room(self, columns: int) -> bool:
        return cast(StaticDraftKV, self._kv).keys.make_room(columns)

    def move(self, put: PutBuffer) -> None:
        cast(StaticDraftKV, self._kv).keys.move(put)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        self._kv.keep_rows(rows.to(self._draft.device))

    def join(self, other: Drafter) -> bool:
        """Append the rows of ``other``; refuse if some are padded."""
        assert isinstance(other, PEagleDrafter)
        return self._kv.join(other._kv)


class PEagleDraftModel(FusingDraftModel):
    """A P-EAGLE draft with any flags (see ``PEagleSpeculatorConfig``); ``forward`` is EAGLE-3's."""

    config_class = PEagleSpeculatorConfig
    config: PEagleSpeculatorConfig
    formats = FORMATS
    vllm_method = "eagle3"
    vllm_settings: ClassVar[dict[str, Any]] = {"parallel_drafting": True}
    drafter_class = PEagleDrafter
    _feeds_back = False

    def __init__(self, config: PEagleSpeculatorConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.num_features * config.feature_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.normal_(self.mask_hidden, std=self.layer_config.initializer_range)

    def with_masks(self, tokens: Tensor, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Append ``count`` mask tokens to ``tokens`` (batch, length), and ``mask_hidden`` to their features."""
        batch = len(tokens)
        masks = tokens.new_full((batch, count), self.config.mask_token_id or 0)
        hidden = self.mask_hidden.to(features).expand(batch, count, -1)
        return torch.cat([tokens, masks], dim=1), torch.cat([features, hidden], dim=1)

    def unroll(self, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
        """Predict all depths from every position of a text; each sees the text before it and its own depths."""
        from ...unroll.feedback import unroll_in_parallel  # compiles kernels, which only training needs

        return unroll_in_parallel(self, given, steps, recompute)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return engines(config, checkpoint)

    def sort_features(self) -> None:
        sort_features(self)


def ancestors_after(counts: Tensor, width: int, more: int) -> Tensor:
    """Return who sees whom if ``more`` positions follow ``counts[b]`` of ``width`` tokens.

    (batch, width + more, width + more) bool. Each of them sees the tokens that count, and the added ones before it.
    """
    place = torch.arange(width + more, device=counts.device)
    seen = (place <= place[:, None]).repeat(len(counts), 1, 1)
    seen[:, width:, :width] &= (place[:width] < counts[:, None])[:, None]
    return seen
