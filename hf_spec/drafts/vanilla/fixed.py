"""Draft with a language model over slots of fixed shape, so that the whole proposal is one graph.

What ``VanillaDrafter`` does, but that guesses which came true are read once more with the rest of what became text: a
graph is as wide at every step, and reading a few tokens more in it costs less than another graph.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...proposal import Proposal
from ...scoring.factory import TOLERANCE
from ...scoring.names import CACHE
from ...scoring.plain import (
    difference,
    input_device,
    new_cache,
    plain_logits,
    position_limit,
    precision,
    prompt_kwargs,
)
from ...scoring.trials import in_short, tried_once
from ..base import AcceptedTokens, DraftContext
from ..static import OpenKeys, StaticDrafter, StaticKeys, Told, why_not_static
from ..trees import Ahead, grow
from .words import Words

PROBE = 8  # tokens that tell whether a model reads fixed slots as it reads those that grow


class FixedReader:
    """Keep what a language model has read in fixed slots, from a prompt on.

    ``tokens`` (batch, prompt) are those of the prompt, ``mask`` (batch, prompt) is 0 at padding.
    """

    def __init__(self, model: Any, tokens: Tensor, mask: Tensor) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        kwargs = prompt_kwargs(model, tokens, mask, cache := new_cache(model))
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        model(tokens, **kwargs)
        assert cache is not None
        self.keys = StaticKeys.adopt(cache, mask)
        kinds = getattr(self.config, "layer_types", None) or ["all"] * len(cache.layers)
        self.windows: dict[str, int | None] = {
            kind: getattr(layer, "sliding_window", None) for kind, layer in zip(kinds, cache.layers, strict=True)
        }

    def run(self, keys: OpenKeys, tokens: Tensor, ancestors: Tensor | None, level: int | None = None) -> Tensor:
        """Read new nodes (batch, nodes) in the slots ``keys``: logits (batch, nodes, vocabulary)."""
        given = tokens.shape[1], ancestors, level, self.config, self.model.dtype, self.windows
        positions, masks = keys.begin(*given)
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        said = self.model(
            tokens, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: keys}
        )
        logits: Tensor = said.logits
        return logits


@tried_once
def why_no_fixed_slots(model: PreTrainedModel) -> str | None:
    """Say why ``model`` cannot read over fixed slots, or return ``None`` if it can."""
    config, cache = model.config.get_text_config(decoder=True), new_cache(model)
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    if position_limit(model) is not None:
        return "its positions come from a table, which ends"
    if cache is None or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return "not all of its layers keep keys and values alone"
    if (reason := why_not_static(config)) is not None:
        return reason
    return _why_read_differently(model)


def _why_read_differently(model: PreTrainedModel) -> str | None:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = (torch.arange(2 * PROBE, device=input_device(model))[None] * 7 % 31 + 11) % vocabulary
    prompt, rest = ids[:, :PROBE], ids[:, PROBE:]
    mask = torch.ones_like(prompt)
    expected = plain_logits(model, prompt, mask, [rest])
    try:
        reader = FixedReader(model, prompt, mask)
        logits = reader.run(reader.keys.opened(), rest, None)
    except Exception as error:  # whatever a model makes of slots that are no cache of transformers
        return f"it takes no fixed slots ({in_short(error)})"
    if not bool((difference(logits, expected) <= TOLERANCE.get(precision(model), 1e-3)).all()):
        return "it reads fixed slots differently"
    return None


class FixedVanillaDrafter(StaticDrafter):
    """Guess with a language model over fixed slots; compiled by what stands around it."""

    def __init__(self, model: PreTrainedModel, request: DraftContext) -> None:
        self._draft, self._request = model, request
        self._words = Words(model, request)
        tokens = self._words.readable(request.input_ids.to(self.device))
        self._reader = FixedReader(model, tokens, request.attention_mask.to(self.device))

    @property
    def device(self) -> torch.device:
        """Return where it computes."""
        return input_device(self._draft)

    @property
    def vocabulary(self) -> int:
        return self._words.vocabulary

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Take in what became text and guess."""
        told = self.told(accepted.tokens, accepted.counts, None)
        return self.guess(told, limit).to(accepted.tokens.device)

    def guess(self, told: Told, limit: int, ahead: Ahead | None = None) -> Proposal:
        keys, logits = self._read(told)
        request, words = self._request, self._words

        def step(tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
            logits = self._reader.run(keys, words.readable(tokens, drafted=True), ancestors, depth - 1)
            return words.log_probs(logits, self.device)

        behind = words.log_probs(told.last(logits)[:, 0], self.device)  # (batch, vocabulary), the root
        return grow(told.root, behind, step, request.config, limit, request.sample, ahead=ahead)

    def read(self, told: Told) -> None:
        self._read(told)

    def _read(self, told: Told) -> tuple[OpenKeys, Tensor]:
        """Read what became text; return the slots behind it and the logits (batch, m, vocabulary)."""
        keys = self._reader.keys.opened()
        logits = self._reader.run(keys, self._words.readable(told.tokens), None)
        keys.commit(told.counts)
        return keys, logits

    def make_room(self, columns: int) -> None:
        self._reader.keys.make_room(columns)

    def keep_rows(self, rows: Tensor) -> None:
        self._reader.keys.keep_rows(rows.to(self.device))
