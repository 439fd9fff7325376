"""Drafting with a language model over slots of fixed shape, so that a complete proposal is one graph.

It does what ``VanillaDrafter`` does, but reads accepted draft tokens again, together with the other accepted tokens. A
graph has the same width in every step, and a few more tokens in it cost less than another graph.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...proposal import Proposal
from ...scoring.architectures import cross_attends
from ...scoring.names import CACHE
from ...scoring.plain import (
    difference,
    input_device,
    new_cache,
    plain_logits,
    position_limit,
    prompt_kwargs,
    rounding_of,
)
from ...scoring.prompts import tokens_for
from ...scoring.trials import in_short, tried_once
from ..base import AcceptedTokens, DraftContext
from ..static import OpenKeys, PutBuffer, StaticDrafter, StaticKeys, why_not_static
from ..trees import PreparedDraft, grow
from .vocabulary_padding import VocabularyPadding

PROBE_TOKENS = 8  # tokens for the test whether a model gives the same logits over fixed slots as over growing ones


class StaticModelKV:
    """The static KV cache of a language model, filled with a prompt.

    ``tokens`` (batch, prompt) are those of the prompt; ``mask`` (batch, prompt) is 0 at padding.
    """

    def __init__(self, model: Any, tokens: Tensor, mask: Tensor) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        kwargs = prompt_kwargs(model, tokens, mask, cache := new_cache(model))
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        model(tokens, **kwargs)
        assert isinstance(cache, DynamicCache)
        self.keys = StaticKeys.adopt(cache, mask)
        kinds = getattr(self.config, "layer_types", None) or ["all"] * len(cache.layers)
        self.windows: dict[str, int | None] = {
            kind: getattr(layer, "sliding_window", None) for kind, layer in zip(kinds, cache.layers, strict=True)
        }

    def run(self, keys: OpenKeys, tokens: Tensor, ancestors: Tensor | None, depth: int | None = None) -> Tensor:
        """Run the model on new nodes (batch, nodes) over the slots ``keys``: logits (batch, nodes, vocabulary)."""
        given = tokens.shape[1], ancestors, depth, self.config, self.model.dtype, self.windows
        positions, masks = keys.begin(*given)
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        said = self.model(
            tokens, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: keys}
        )
        logits: Tensor = said.logits
        return logits


@tried_once
def why_no_fixed_slots(model: PreTrainedModel) -> str | None:
    """Return why ``model`` cannot run over fixed slots, or ``None`` if it can."""
    config, cache = model.config.get_text_config(decoder=True), new_cache(model)
    if cross_attends(model):
        return "it attends to the states of an encoder"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    if position_limit(model) is not None:
        return "its positions come from a table, which ends"
    if not isinstance(cache, DynamicCache) or any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
    ):
        return "not all of its layers keep keys and values alone"
    if (reason := why_not_static(config)) is not None:
        return reason
    return _why_read_differently(model)


def _why_read_differently(model: PreTrainedModel) -> str | None:
    prompt, rest = tokens_for(model, 1, 2 * PROBE_TOKENS).split(PROBE_TOKENS, dim=1)
    mask = torch.ones_like(prompt)
    expected = plain_logits(model, prompt, mask, [rest])
    try:
        kv = StaticModelKV(model, prompt, mask)
        logits = kv.run(kv.keys.opened(), rest, None)
    except torch.OutOfMemoryError:  # which tells nothing of the model
        raise
    except Exception as error:  # a model may fail anyhow on slots that are no cache of transformers
        return f"it takes no fixed slots ({in_short(error)})"
    if not bool((difference(logits, expected) <= rounding_of(model)).all()):
        return "it reads fixed slots differently"
    return None


class FixedVanillaDrafter(StaticDrafter):
    """A drafter with a language model over fixed slots; ``CompiledDrafter`` compiles it."""

    def __init__(self, model: PreTrainedModel, request: DraftContext) -> None:
        self._draft, self._request = model, request
        self._padding = VocabularyPadding(model, request)
        tokens = self._padding.readable(request.input_ids.to(self.device))
        self._kv = StaticModelKV(model, tokens, request.attention_mask.to(self.device))

    @property
    def device(self) -> torch.device:
        """Return the device of the draft's inputs."""
        return input_device(self._draft)

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        keys, logits = self._read(accepted)
        request, padding = self._request, self._padding

        def step(tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
            logits = self._kv.run(keys, padding.readable(tokens, drafted=True), ancestors, depth - 1)
            return padding.log_probs(logits, self.device)

        first = padding.log_probs(accepted.last(logits)[:, 0], self.device)  # (batch, vocabulary), after the root
        return grow(accepted.root, first, step, request.config, limit, request.sample, prepared=prepared)

    def read(self, accepted: AcceptedTokens) -> None:
        self._read(accepted)

    def _read(self, accepted: AcceptedTokens) -> tuple[OpenKeys, Tensor]:
        """Read accepted tokens; return the slots after them and the logits (batch, m, vocabulary)."""
        keys = self._kv.keys.opened()
        logits = self._kv.run(keys, self._padding.readable(accepted.tokens), None)
        keys.commit(accepted.counts)
        return keys, logits

    def make_room(self, columns: int) -> bool:
        return self._kv.keys.make_room(columns)

    def move(self, put: PutBuffer) -> None:
        self._kv.keys.move(put)

    def keep_rows(self, rows: Tensor) -> None:
        self._kv.keys.keep_rows(rows.to(self.device))
