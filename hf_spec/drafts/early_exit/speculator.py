"""Draft with the first layers of the target itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policy.base import DraftSource
from ...policy.cost import ModelShape, shape_of
from ...proposal import Proposal
from ...scoring.architectures import keeps_own_states, why_unsupported
from ...scoring.cache import has_states
from ...scoring.early_exit import FirstLayers, can_reuse, first_layers, why_no_early_exit
from ...scoring.plain import new_cache
from ...settings import SpeculationConfig, is_int
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator
from ..trees import grow

# Where a checkpoint names the layer that it was trained to exit after. The first one is transformers' own option.
NAMES = ("assistant_early_exit", "early_exit_layer", "exit_layer")


class EarlyExitSpeculator(Speculator):
    """Draft with the first ``layer`` layers of the target, its final norm and its head.

    They read the target's own key-value cache, so no weights are added and no prompt is read twice. By default
    ``layer`` is the one that the target's generation config or config names, as ``assistant_early_exit``,
    ``early_exit_layer`` or ``exit_layer``. Models trained for early exits (LayerSkip) accept many such draft tokens,
    other models few.

    Source: LayerSkip, arXiv 2404.16710.

    Raises:
        ValueError: for a ``layer`` that is no whole number of at least 1.
    """

    def __init__(self, layer: int | None = None) -> None:
        if layer is not None and not (is_int(layer) and layer >= 1):
            raise ValueError(f"layer must be a whole number of at least 1, or None, got {layer!r}")
        self.layer = layer

    def layer_of(self, target: PreTrainedModel) -> int:
        """Return how many layers of ``target`` draft; a ValueError if neither the user nor ``target`` names them."""
        found = self.layer or _named_in(target)
        count = target.config.get_text_config(decoder=True).num_hidden_layers
        name = type(target).__name__
        if found is None:
            raise ValueError(
                f"{name} names no layer to exit after ({NAMES[0]} in its generation config), so it was probably not "
                "trained for early exits, and few draft tokens will be accepted. Choose a layer: "
                f"speculator=hf_spec.EarlyExitSpeculator(layer), from 1 to {count - 1}, or use 'ngram'."
            )
        if not 1 <= found < count:
            raise ValueError(f"{name} has {count} layers, so it cannot exit after {found}; choose 1 to {count - 1}")
        return found

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError if ``target`` cannot run its first layers alone over its cache."""
        other = "use another draft, or 'ngram'"
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder model, and early exit runs the first layers of "
                f"decoder-only ones; {other}"
            )
        layer, cache = self.layer_of(target), new_cache(target)
        if (reason := why_unsupported(target, cache, batch=1)) is not None:
            raise ValueError(f"{reason}; {other}")
        if keeps_own_states(target) or has_states(cache):
            raise ValueError(
                f"{type(target).__name__} keeps recurrent states, which early exit would overwrite with those of "
                f"draft tokens; {other}"
            )
        if config is None or config.self_check:
            if (reason := why_no_early_exit(target, layer)) is not None:
                raise ValueError(f"{reason}; {other}")
            can_reuse(target, layer)  # tried before the call, and remembered

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        """Name the layer."""
        return (*super().profile_key, self.layer)

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List the forwards of the first layers, one for each draft token."""
        layer = self.layer_of(target)
        shapes = [ModelShape(layer + 1, shape_of(first_layers(target, layer)).parameters)]
        return lambda length: shapes * length

    @property
    def source(self) -> DraftSource:
        """Return that a model drafts: the target."""
        return DraftSource.MODEL

    @property
    def shares_target_cache(self) -> bool:
        """Return True."""
        return True

    def drafter(self, request: DraftContext) -> Drafter:
        """Start drafting over the cache of the target."""
        if request.runner is None:
            raise ValueError(
                "early exit drafts over the cache of the target, which this way of decoding does not lend; use "
                "generate(..., speculator=...) with another draft, or 'ngram'"
            )
        layer = self.layer_of(request.target)
        wants_states = request.runner.features.every  # of all layers, to return them
        reuses = request.config.self_check and not wants_states and can_reuse(request.target, layer)
        return EarlyExitDrafter(request, FirstLayers(request.runner, layer, reuses))


class EarlyExitDrafter(Drafter):
    """Runs the first layers of the target, which keeps their keys, and goes on from their output."""

    def __init__(self, request: DraftContext, layers: FirstLayers) -> None:
        self._request, self._first_layers = request, layers

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read the last accepted token, and grow a proposal after it."""
        root = accepted.root
        if limit == 0:
            return Proposal.nothing(root)
        request = self._request
        with self._first_layers.drafting() as runner:

            def step(tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
                if ancestors is not None:  # all draft tokens follow the root, which is a node, too
                    ancestors = torch.nn.functional.pad(ancestors, (1, 0), value=True)
                return self._log_probs(runner.score_nodes(tokens, ancestors, depth).logits)

            after_root = self._log_probs(runner.score_nodes(root[:, None]).logits)[:, 0]
            asked = (request.config, limit, request.sample)
            proposal = grow(root, after_root, step, *asked, keep_drafting=request.keep_drafting)
        self._first_layers.hand_over(proposal)
        return proposal

    def _log_probs(self, logits: Tensor) -> Tensor:
        # The processors keep tensors where the prompt is.
        return self._request.log_probs(logits.to(self._request.input_ids.device))

    def keep_rows(self, rows: Tensor) -> None:
        """Do nothing: the target drops the rows."""


def _named_in(target: Any) -> int | None:
    """Return the exit layer that the generation config or the config of ``target`` names."""
    text = target.config.get_text_config(decoder=True)
    configs = (getattr(target, "generation_config", None), target.config, text)
    found = (getattr(config, name, None) for config in configs for name in NAMES)
    return next((layer for layer in found if is_int(layer)), None)
