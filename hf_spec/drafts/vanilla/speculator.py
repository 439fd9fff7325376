"""Draft with a smaller language model of the same vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...device_tensors import cached_arange, to_device, to_list
from ...proposal import Proposal
from ...scoring.architectures import arguments_of, cross_attends, why_unsupported
from ...scoring.checkpointing import drops_cache
from ...scoring.factory import runner_for
from ...scoring.plain import input_device, new_cache, position_limit
from ...settings import SpeculationConfig
from ..base import LAST_LOGITS_FROM, AcceptedTokens, DraftContext, Drafter, Speculator
from ..encoders import encoder_width, shares_encoder
from ..static import CompiledDrafter, not_compiled
from ..trees import grow
from .fixed import FixedVanillaDrafter, why_no_fixed_slots
from .vocabulary_padding import VocabularyPadding, vocabulary_of

# Vocabularies of one family are padded to different sizes (Qwen: 151,936 and 152,064), by less than this.
MOST_PADDING = 512
# How to pass a draft whose tokenizer is not the target's.
OTHER_TOKENIZERS = "generate(..., speculator=draft, tokenizer=tokenizer, assistant_tokenizer=the draft's tokenizer)"

logger = logging.get_logger(__name__)


class VanillaSpeculator(Speculator):
    """Draft with ``model``, any causal language model of transformers with the tokenizer of the target.

    It may sit on another device or in another dtype. Source: Leviathan et al., arXiv 2211.17192.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError if the vocabularies differ or the draft has no cache that can roll back draft tokens."""
        own, wanted = vocabulary_of(self.model), vocabulary_of(target)
        name = type(self.model).__name__
        if abs(own - wanted) >= MOST_PADDING or (own != wanted and min(own, wanted) < 16 * MOST_PADDING):
            raise ValueError(
                f"the draft {name} has a vocabulary of {own} tokens and the target one of {wanted}: their tokenizers "
                f"differ, so its token ids mean other words. Pass both: {OTHER_TOKENIZERS}. Or use a draft of the "
                "target's family, or 'ngram'."
            )
        if self.model is target:
            raise ValueError(
                "the draft is the target itself: a draft token would cost as much as a plain one. Use a smaller model."
            )
        if cross_attends(self.model) and not target.config.is_encoder_decoder:
            raise ValueError(
                f"the draft {name} attends to the states of an encoder, and the target {type(target).__name__} reads "
                "no source; use a decoder-only draft, or 'ngram'"
            )
        if drops_cache(self.model):
            raise ValueError(
                f"the draft {name} is in training mode with activation checkpointing, which drops its cache; call "
                "draft.eval() first"
            )
        cache = new_cache(self.model)
        if (reason := why_unsupported(self.model, cache, beside_encoder=True)) is not None:
            raise ValueError(f"{name} cannot be a draft: {reason}. Use another draft, or 'ngram'.")
        self._check_states(target)
        runner_for(self.model, cache, one_chain=False)  # has errors of its own

    def _check_states(self, target: PreTrainedModel) -> None:
        """Raise a ValueError if a draft without an encoder cannot read the states of the target's."""
        if self.model.config.is_encoder_decoder or not cross_attends(self.model):
            return
        width, own = encoder_width(target), self.model.config.get_text_config(decoder=True).hidden_size
        if width not in (None, own):
            raise ValueError(
                f"the draft {type(self.model).__name__} is a decoder without an encoder, and attends to states of "
                f"width {own}; those of {type(target).__name__} have {width}. Use a draft whose encoder is the "
                "target's, or load the complete draft with its own encoder, or use 'ngram'."
            )

    def encodes(self, target: PreTrainedModel) -> bool:
        """Tell whether the draft has an encoder of its own: one that is not the target's, too."""
        return bool(self.model.config.is_encoder_decoder) and not shares_encoder(self.model, target)

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether chains end where ``DraftContext.keep_drafting`` says so: on a CPU, where looking is free."""
        return input_device(self.model).type == "cpu"

    def drafter(self, request: DraftContext) -> Drafter:
        """Read the prompt with the draft."""
        if request.compiler is None or request.input_ids.shape[1] == 0:
            return VanillaDrafter(self.model, request)
        if (reason := why_no_fixed_slots(self.model)) is not None:
            not_compiled(self.model, reason)
            return VanillaDrafter(self.model, request)
        return CompiledDrafter(FixedVanillaDrafter(self.model, request), request, request.compiler)


def _states(model: PreTrainedModel, request: DraftContext) -> dict[str, Any] | None:
    """Return the arguments by which a draft is given an encoder's states; ``None`` for one that attends to none."""
    if request.source is None or not cross_attends(model):
        return None
    return request.source.states_for(model, request.target)


class VanillaDrafter(Drafter):
    """The state of a draft model in one call: its own slots, next to the target's.

    A draft whose table of positions ends before the text ends drafts no further. It may end earlier in a batch, where
    the longest row is read next to rows with more new tokens.
    """

    def __init__(self, model: PreTrainedModel, request: DraftContext) -> None:
        self._request = request
        self._padding = VocabularyPadding(model, request)
        self._is_chain = request.config.tree is None
        self._runner = runner_for(model, new_cache(model), one_chain=False)
        self._device = input_device(model)
        self._last_draft: list[
            tuple[Tensor, Tensor | None]
        ] = []  # tokens and parents of the last draft, level by level
        mask = request.attention_mask.to(self._device)
        self._limit = position_limit(model)
        # The positions that are taken, by row: those of models that are told none are columns, padding included.
        taken = mask if "position_ids" in arguments_of(model) else torch.ones_like(mask)
        self._lengths: list[int] = [] if self._limit is None else taken.sum(1).tolist()
        self._reads = self._positions_left is None or self._positions_left > 0
        if self._reads:
            ids = self._padding.readable(request.input_ids.to(self._device))
            self._runner.prefill_tokens(ids, mask, source=_states(model, request))

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read accepted tokens, except those that are in the cache already, then grow a proposal."""
        tokens, counts = accepted.tokens.to(self._device), accepted.counts.to(self._device)
        root = accepted.root.to(self._device)
        if self._limit is not None:
            self._lengths = [length + new for length, new in zip(self._lengths, accepted.amounts, strict=True)]
        if (positions_left := self._positions_left) is not None:
            self._reads = self._reads and positions_left > 0  # a drafter that missed tokens cannot continue
            limit = min(limit, positions_left)
        logits = self._read(self._padding.readable(tokens), counts, accepted.amounts) if self._reads else None
        if logits is None:
            self._reads = False
            logger.warning_once(
                f"the draft has positions for {self._limit} tokens only: longer text is decoded by plain steps"
            )
            return Proposal.nothing(root).to(accepted.tokens.device)
        log_probs = self._padding.log_probs(logits, self._device)
        self._last_draft = []
        request = self._request
        proposal = grow(
            root, log_probs, self._step, request.config, limit, request.sample, keep_drafting=request.keep_drafting
        )
        return proposal.to(accepted.tokens.device)

    @property
    def _positions_left(self) -> int | None:
        """Count the positions that the longest text leaves; ``None`` if there is no end to them."""
        return None if self._limit is None else self._limit - max(self._lengths)

    def _step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        tokens = self._padding.readable(tokens, drafted=True)
        self._last_draft.append((tokens, parents))
        return self._padding.log_probs(self._runner.extend(tokens, ancestors, depth - 1).logits, self._device)

    def _read(self, tokens: Tensor, counts: Tensor, amounts: list[int]) -> Tensor | None:
        """Commit ``tokens`` (batch, m) and return the logits after each row's last one (batch, vocabulary).

        ``counts`` (batch,), or ``amounts``, of them count. Accepted draft tokens are in its cache already;
        only what follows them is read. ``None``: the table of positions is too short for that.
        """
        if not self._last_draft or tokens.shape[1] == 1:
            self._runner.commit(tokens[:, :0], [0] * len(tokens), in_place=True)
            return self._read_on(tokens, counts, amounts)
        path, matched = self._accepted_path(tokens, counts)
        known = matched.tolist()
        # The accepted tokens may be more than the drafted ones: they came from another draft, too, or from plain
        # steps.
        self._runner.commit(path[:, : max(known)], known, self._is_chain, matched)
        rest = [count - seen for count, seen in zip(amounts, known, strict=True)]
        column = matched[:, None] + cached_arange(max(rest), tokens.device)
        block = tokens.gather(1, column.clamp(max=tokens.shape[1] - 1))  # (batch, width), right-padded
        return self._read_on(block, counts - matched, rest)

    def _read_on(self, tokens: Tensor, counts: Tensor, amounts: list[int]) -> Tensor | None:
        if self._limit is not None:
            # A long row that has few new tokens is padded beyond its end, to as many as another row has.
            starts = [length - new for length, new in zip(self._lengths, amounts, strict=True)]
            if max(starts) + tokens.shape[1] > self._limit:
                return None
        if tokens.shape[1] > LAST_LOGITS_FROM:
            return self._read_much(tokens, counts, amounts)
        logits = self._runner.extend(tokens).logits
        self._runner.commit(tokens, amounts, in_place=True, on_device=counts)
        if len(set(amounts)) == 1:
            return logits[:, amounts[0] - 1]
        return logits[cached_arange(len(tokens), tokens.device), counts - 1]

    def _read_much(self, tokens: Tensor, counts: Tensor, amounts: list[int]) -> Tensor:
        """Read the tokens of many plain steps: logits of a large vocabulary take longer than a few layers."""
        ends = sorted(set(amounts))
        logits = self._runner.read(tokens, [end - 1 for end in ends])  # (batch, ends, vocabulary)
        self._runner.commit(tokens, amounts, in_place=True, on_device=counts)
        place = to_device([ends.index(amount) for amount in amounts], tokens.device)
        return logits[cached_arange(len(tokens), tokens.device), place]

    def _accepted_path(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Follow ``tokens`` through the last draft: node numbers (batch, m), and how many of them count.

        The last token is not followed: its logits are needed again.
        """
        if self._is_chain:
            known = torch.cat([draft_tokens for draft_tokens, _ in self._last_draft], dim=1)[:, : tokens.shape[1] - 1]
            steps = cached_arange(known.shape[1], tokens.device)
            same = (known == tokens[:, : known.shape[1]]) & (steps < counts[:, None] - 1)
            return known, same.cumprod(1).sum(1)  # in a chain no node moves: the path is not looked at
        matched, going = torch.zeros_like(counts), torch.ones_like(counts, dtype=torch.bool)
        path: list[Tensor] = []
        place, before = torch.zeros_like(counts), 0  # of the last node in its level, and how many stand before that
        for column, (draft_tokens, parents) in zip(range(tokens.shape[1] - 1), self._last_draft, strict=False):
            same = draft_tokens == tokens[:, column, None]
            found, place = (same if parents is None else same & (parents == place[:, None])).max(dim=1)
            going = going & found & (column < counts - 1)
            matched += going
            path.append(place + before)
            before += draft_tokens.shape[1]
        return torch.stack(path, dim=1), matched

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        if self._limit is not None:
            self._lengths = [self._lengths[row] for row in to_list(rows)]
        if not self._reads:
            return
        rows = rows.to(self._device)
        self._runner.keep_rows(rows)
        self._last_draft = [
            (tokens[rows], None if above is None else above[rows]) for tokens, above in self._last_draft
        ]

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, unless a draft keeps states or has no positions for a long text.

        Draft tokens that are not verified yet are read again if they are accepted.
        """
        assert isinstance(other, VanillaDrafter)
        if self._limit is not None or not self._runner.join(other._runner):
            return False
        self._last_draft = []
        return True
