"""Inflate a small Llama to the cost of a big one without changing what it says, to show speed with real acceptance.

Random weights of a big model would accept nothing, and a real big model does not ship with a package. Here the small
model's distribution stays and only the arithmetic grows: widths are padded with zeros, and heads that see nothing and
layers that add nothing are appended. RMSNorm divides by the mean square over the width, which the zeros lower by small
/ large: its epsilon shrinks by that factor, and its weights by the square root of it.

Hidden states are those of the small model, followed by zeros. So drafts of the small model draft for the big one, too
(``Narrowed``). Acceptance is then the small model's, which says nothing about any big model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..drafts.base import AcceptedTokens, DraftContext, Drafter, Speculator, network_of
from ..policy.cost import ModelShape
from ..proposal import Proposal
from ..settings import SpeculationConfig


def inflate(
    small: LlamaForCausalLM, hidden_size: int, intermediate_size: int, num_hidden_layers: int
) -> LlamaForCausalLM:
    """Return a model of the given sizes with the logits of ``small``, up to rounding.

    The head dimension and the ratio of query to key heads stay; the heads fill ``hidden_size``.

    Raises:
        ValueError: if a size is below that of ``small``, or ``hidden_size`` is not a multiple of the size of a head
        group.
    """
    config = _inflated_config(small.config, hidden_size, intermediate_size, num_hidden_layers)
    with torch.device(small.device):  # at once in its own precision: a big model may fit only once
        large: Any = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    ratio = (small.config.hidden_size / hidden_size) ** 0.5
    with torch.no_grad():
        for layer in large.model.layers[small.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for name, weight in small.named_parameters():
            _embed(weight * ratio if "norm" in name else weight, large.get_parameter(name))
    large.generation_config = copy.deepcopy(small.generation_config)
    return cast(LlamaForCausalLM, large.eval())


def _inflated_config(small: Any, hidden_size: int, intermediate_size: int, layers: int) -> LlamaConfig:
    changes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    for name, size in changes.items():
        if size < getattr(small, name):
            raise ValueError(f"{name} is {size}, below the small model's {getattr(small, name)}; choose at least that")
    group = small.num_attention_heads // small.num_key_value_heads
    key_heads, rest = divmod(hidden_size, small.head_dim * group)
    if rest:
        raise ValueError(
            f"hidden_size is {hidden_size}; choose a multiple of {small.head_dim * group}, so that no head is cut"
        )
    changes |= {"num_attention_heads": key_heads * group, "num_key_value_heads": key_heads}
    epsilon = small.rms_norm_eps * small.hidden_size / hidden_size
    return LlamaConfig(**small.to_dict() | changes | {"rms_norm_eps": epsilon})


def _embed(weight: Tensor, into: Tensor) -> None:
    """Put ``weight`` into the corner of a parameter that is zero elsewhere."""
    into.zero_()
    into[tuple(slice(size) for size in weight.shape)] = weight


class Narrowed(Speculator):
    """The ``draft`` of a model ``small`` as a draft of the model that ``small`` was inflated to."""

    def __init__(self, draft: Speculator, small: PreTrainedModel) -> None:
        self.draft, self.small = draft, small

    @property
    def model(self) -> Any:
        """Return the module that holds the draft's weights; profiles of step times are stored by it."""
        return network_of(self.draft)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Return the layers of ``small``, which come first; later ones add nothing."""
        return self.draft.feature_layers(self.small)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError if the draft cannot serve ``small``."""
        self.draft.check(self.small, config)

    def defaults(self) -> SpeculationConfig:
        """Return the draft's own settings."""
        return self.draft.defaults()

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List the draft's forwards."""
        return self.draft.draft_work(self.small)

    def drafter(self, request: DraftContext) -> Drafter:
        """Start the draft, for which ``small`` is the target."""
        return _NarrowedDrafter(self, request)

    def narrow(self, features: Tensor | None) -> Tensor | None:
        """Take the widths of ``small`` out of hidden states (batch, length, layers * inflated width)."""
        if features is None:
            return None
        parts = features.unflatten(-1, (len(self.draft.feature_layers(self.small)), -1))
        return cast(Tensor, parts[..., : self.small.config.hidden_size].flatten(-2))


class _NarrowedDrafter(Drafter):
    def __init__(self, speculator: Narrowed, request: DraftContext) -> None:
        self._narrow = speculator.narrow
        narrow = replace(request, target=speculator.small, features=speculator.narrow(request.features))
        self._inner = speculator.draft.drafter(narrow)

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        return self._inner.propose(replace(accepted, features=self._narrow(accepted.features)), limit)

    def keep_rows(self, rows: Tensor) -> None:
        self._inner.keep_rows(rows)
