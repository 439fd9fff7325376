"""EAGLE-1 and EAGLE-2 drafts (arXiv 2401.15077, 2406.16858): decoder layers over the target's last hidden state.

A position reads its token and the hidden state of the position before it: the target's at the first step, the draft's
own prediction of it later. The prediction goes directly through the target's head, without a final norm. The two
methods differ in the tree that is drafted, not in the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..base import DraftOutput
from ..files import Checkpoint
from ..layers import classes_of
from ..modeling import DraftModel, only_one
from .configuration import EagleSpeculatorConfig
from .formats import FORMATS, in_the_way, unserved


class EagleDraftModel(DraftModel):
    """An EAGLE-1 or EAGLE-2 draft."""

    config_class = EagleSpeculatorConfig
    ends_chains = True
    formats = FORMATS

    def __init__(self, config: EagleSpeculatorConfig) -> None:
        super().__init__(config, config.layers.vocab_size)
        layers = config.layers
        self.fc = nn.Linear(2 * layers.hidden_size, layers.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            classes_of(layers.model_type).layer(layers, i) for i in range(layers.num_hidden_layers)
        )
        self.layers[0].input_layernorm = nn.Identity()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> DraftOutput:
        """Run one step, as ``Eagle3DraftModel.forward``; both kinds of hidden state are (batch, length, hidden)."""
        both = [self.embed(input_ids), only_one(features, hidden_states)]
        hidden = self.fc(torch.cat(both, dim=-1))  # (batch, length, hidden)
        hidden = self.decode(hidden, (), position_ids, attention_mask, past_key_values)
        return DraftOutput(self.logits(hidden[:, -logits_to_keep:]), hidden, past_key_values)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Read ``hidden_states[-1]``, the one after the final norm."""
        return (-1,)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return unserved() if checkpoint is None else in_the_way(checkpoint, layout)
