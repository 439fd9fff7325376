"""The KV state of a draft over pairs of a token and a hidden state: growing or static."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..device_tensors import cached_arange, to_device
from ..scoring.cache import TreeKVCache
from ..scoring.kv_view import KVView
from .base import LAST_LOGITS_FROM, AcceptedTokens, DraftOutput
from .static import StaticKeys


class DraftKV:
    """A growing KV state, with one slot per pair of token and hidden state."""

    def __init__(self, draft: Any, number: int) -> None:
        self._draft = draft
        self._module_argument = {"module": number} if draft.num_modules > 1 else {}
        self._slots: KVView
        self._origin: Tensor  # (batch, 1), the position of column 0, negative where it is padding

    def read_prompt(self, tokens: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
        """Read pairs, padded where ``mask`` (batch, pairs) is 0; return hidden states (batch, pairs, hidden).

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
            output: DraftOutput = self._draft(tokens, **given, logits_to_keep=1, **self._module_argument, **inputs)
            assert output.hidden_states is not None
            hidden = output.hidden_states
        self._hold(cache, mask, padding)
        return hidden

    def _hold(self, cache: DynamicCache, mask: Tensor, padding: Tensor | None) -> None:
        """Move the prompt's KV cache into slots; ``padding`` is the ``mask`` if anything is padded."""
        self._slots = KVView(TreeKVCache.adopt(cache, len(mask), mask.device), cache, padding)
        self._origin = mask.sum(1, keepdim=True) - mask.shape[1]

    def opened(self) -> Any:
        """Return the object that reads accepted tokens and the nodes after them for one proposal: itself."""
        return self

    def read(
        self, tokens: Tensor, accepted: AcceptedTokens, ancestors: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Drop the nodes of the last proposal, then read accepted tokens.

        They are the first ``accepted.counts`` (batch,) of ``tokens`` (batch, m). Further tokens are read in
        the same forward and dropped; ``ancestors`` say what they see.
        """
        self._slots.commit(tokens[:, :0], [0] * len(tokens), in_place=True)
        logits, hidden = self.run(tokens, ancestors, None, **inputs)
        self._slots.commit(tokens, accepted.amounts, in_place=True, on_device=accepted.counts)
        return logits, hidden

    def read_last(self, tokens: Tensor, accepted: AcceptedTokens, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Read accepted tokens, as ``read``; return the logits (batch, 1, draft vocabulary) after each row's last one.

        The hidden states (batch, m, hidden) are those of all tokens.
        """
        if tokens.shape[1] > LAST_LOGITS_FROM:
            return self._read_much(tokens, accepted, inputs)
        logits, hidden = self.read(tokens, accepted, **inputs)
        return accepted.last(logits), hidden

    def _read_much(self, tokens: Tensor, accepted: AcceptedTokens, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Read the tokens of many plain steps: logits of a large vocabulary take longer than a layer.

        They are read in parts that end where a row does, because a draft computes the last logits or all.
        """
        self._slots.commit(tokens[:, :0], [0] * len(tokens), in_place=True)
        amounts, parts = accepted.amounts, []
        ends = sorted({*amounts, tokens.shape[1]})
        for start, end in pairwise([0, *ends]):
            given = {name: states[:, start:end] for name, states in inputs.items()}
            parts.append(self.run(tokens[:, start:end], None, None, logits_to_keep=1, **given))
        self._slots.commit(tokens, amounts, in_place=True, on_device=accepted.counts)
        logits, hidden = (torch.cat(one, dim=1) for one in zip(*parts, strict=True))  # logits: (batch, ends, ...)
        place = to_device([ends.index(amount) for amount in amounts], tokens.device)
        return logits[cached_arange(len(tokens), tokens.device), place][:, None], hidden

    def run(
        self, tokens: Tensor, ancestors: Tensor | None, depth: int | None, logits_to_keep: int = 0, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Run one step: logits (batch, new, draft vocabulary) and hidden states (batch, new, hidden).

        ``depth`` and ``ancestors`` are those of ``KVView.scoring``. ``logits_to_keep`` > 0: only the last logits.
        """
        with self._slots.scoring(tokens.shape[1], ancestors, self._draft.layer_config, depth) as block:
            output: DraftOutput = self._draft(
                tokens,
                position_ids=self._slots.positions(self._origin, block),
                attention_mask=self._slots.mask(block),
                past_key_values=self._slots.cache,
                logits_to_keep=logits_to_keep,
                **self._module_argument,
                **inputs,
            )
        assert output.logits is not None
        assert output.hidden_states is not None
        return output.logits, output.hidden_states

    def join(self, other: DraftKV) -> bool:
        """Append the rows of ``other``, and tell whether that was possible."""
        if not self._slots.join(other._slots):
            return False
        self._origin = torch.cat([self._origin, other._origin])
        return True

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        self._slots.keep_rows(rows)
        self._origin = self._origin.index_select(0, rows)


class StaticDraftKV(DraftKV):
    """A static KV state: slots have fixed shapes, so that the forward over them can be one graph."""

    keys: StaticKeys

    def read_prompt(self, tokens: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
        """Do as ``DraftKV``; without any pair, read one that counts as padding, to learn the shapes."""
        if tokens.shape[1]:
            return super().read_prompt(tokens, mask, **inputs)
        tokens = tokens.new_zeros((len(tokens), 1))
        inputs = {name: states.new_zeros((len(tokens), 1, states.shape[2])) for name, states in inputs.items()}
        hidden = super().read_prompt(tokens, torch.ones_like(tokens), **inputs)
        self.keys.known[:, 0] = False
        self.keys.before.fill_(1)
        return torch.zeros_like(hidden)

    def _hold(self, cache: DynamicCache, mask: Tensor, padding: Tensor | None) -> None:
        self.keys = StaticKeys.adopt(cache, mask)

    def opened(self) -> Any:
        """Return the object that reads accepted tokens and the nodes after them for one proposal."""
        return OpenDraftKV(self._draft, self._module_argument, self.keys)

    def keep_rows(self, rows: Tensor) -> None:
        self.keys.keep_rows(rows)


class OpenDraftKV:
    """``DraftKV``'s methods over fixed slots, for one proposal: they read accepted tokens and the nodes after them."""

    def __init__(self, draft: Any, which: dict[str, int], keys: StaticKeys) -> None:
        self._draft, self._module_argument = draft, which
        self._keys = keys.opened()

    def read(
        self, tokens: Tensor, accepted: AcceptedTokens, ancestors: Tensor | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read accepted tokens, as ``DraftKV.read``."""
        outputs = self.run(tokens, ancestors, None, **inputs)
        self._keys.commit(accepted.counts)
        return outputs

    def read_last(self, tokens: Tensor, accepted: AcceptedTokens, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Read accepted tokens, as ``DraftKV.read_last``."""
        logits, hidden = self.read(tokens, accepted, **inputs)
        return accepted.last(logits), hidden

    def run(
        self, tokens: Tensor, ancestors: Tensor | None, depth: int | None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run one step, as ``DraftKV.run``."""
        draft = self._draft
        positions, masks = self._keys.begin(tokens.shape[1], ancestors, depth, draft.layer_config, draft.dtype)
        output: DraftOutput = self._draft(
            tokens,
            position_ids=positions,
            attention_mask=masks,
            past_key_values=self._keys,
            **self._module_argument,
            **inputs,
        )
        assert output.logits is not None
        assert output.hidden_states is not None
        return output.logits, output.hidden_states
