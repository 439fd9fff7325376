"""Layers of EAGLE-3 (arXiv 2503.01840): one or a few decoder layers over the target's own hidden states.

A position reads its token and one hidden state: at the first step the target's features of the position before, later
the draft's own output. The first layer attends over their concatenation; the residual carries only the hidden state::

    features ─ fc ─┐                  ┌─ hidden_norm ─┐
                   ├─ hidden ─────────┤               ├─ attention ─ (+ hidden) ─ mlp ─ ... ─ norm ─ lm_head
    own output ────┘                  │               │                       │
    token ─ embed ──── input_layernorm ───────────────┘                       └─ fed back at the next step
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..config_keys import Known, known
from ..configuration import GEMMA
from .base import DraftOutput
from .features import FeatureSpeculatorConfig
from .layers import classes_of
from .modeling import DraftModel, only_one

EAGLE3_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "norm_before_lm_head",
    "embed_requires_grad",
)


class FusingSpeculatorConfig(FeatureSpeculatorConfig):
    """The config of a draft of EAGLE-3's layers, with the flags of the speculators library, all of them saved.

    Args:
        eagle_aux_hidden_state_layer_ids: which ``hidden_states[i]`` of the target are read, i.e. the residual stream
            after i layers, ascending; the number of layers means the last one *before* the final norm. ``None``:
            ``[2, n // 2, n - 3]``.
        norm_before_residual: the residual carries the normed feature (speculators) instead of the raw one (EAGLE).
        norm_output: later steps are fed the output after the final norm ("EAGLE-3.1") instead of before it.
        norm_before_fc: norm the concatenated features. ``fc_norm``: norm each of them. Not both.
        norm_before_lm_head: ``False`` for ``norm_output: false`` of SpecForge before September 2026; only hf_spec
            knows this one.
        embed_requires_grad: train the embeddings too.
    """

    layer_ids_field: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    flags: ClassVar[tuple[str, ...]] = EAGLE3_FLAGS
    layer_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen3", GEMMA)

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_lm_head: bool = True
    embed_requires_grad: bool = False

    @classmethod
    def known_keys(cls, given: dict[str, Any]) -> Known:
        """Return the known keys of ``given``; one of the layers is written for vLLM, see ``to_diff_dict``."""
        found: Any = super().known_keys(given)
        inside = {**found["transformer_layer_config"], **known("num_aux_hidden_states")}
        return {**found, "transformer_layer_config": inside}

    def to_diff_dict(self) -> dict[str, Any]:
        """Write the number of features as well, if it is not three: vLLM's llama drafts read it there."""
        config = super().to_diff_dict()
        layers = config.get("transformer_layer_config", {})
        layers.pop("num_aux_hidden_states", None)
        if self.num_features != 3:
            layers["num_aux_hidden_states"] = self.num_features
        return config

    def validate(self) -> None:
        super().validate()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc are both True; norm each feature or their concatenation, not both"
            )
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and any(a >= b for a, b in itertools.pairwise(ids)):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids {ids} are not ascending: vLLM sorts them and would feed the draft "
                f"permuted features; set {sorted(set(ids))} and order the columns of fc likewise"
            )


class FusingDraftModel(DraftModel):
    """A draft of EAGLE-3's layers with any flags (see ``FusingSpeculatorConfig``)."""

    config: FusingSpeculatorConfig
    _no_split_modules = [  # noqa: RUF012
        *DraftModel._no_split_modules,
        *("LlamaFusingLayer", "Qwen3FusingLayer", "Gemma4FusingLayer"),
    ]

    _feeds_back: ClassVar[bool] = True  # whether later steps read the output of earlier ones
    input_norm: Any
    fc_norm: nn.ModuleList | None

    def __init__(self, config: FusingSpeculatorConfig) -> None:
        super().__init__(config, config.draft_vocab_size or config.layers.vocab_size)
        layers, count, width = config.layers, config.num_features, config.feature_size
        layer, fusing, norm, _ = classes_of(layers.model_type)
        first = fusing(layers, 0, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(layer(layers, i) for i in range(1, layers.num_hidden_layers))])
        self.input_norm = norm(count * width, eps=layers.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(norm(width, eps=layers.rms_norm_eps) for _ in range(count)) if config.fc_norm else None
        )
        self.fc = nn.Linear(count * width, layers.hidden_size, bias=False)
        self.norm = norm(layers.hidden_size, eps=layers.rms_norm_eps)
        # A parameter that nothing reads gets no gradient, for which distributed training would wait.
        self.norm.requires_grad_(config.norm_before_lm_head or (self._feeds_back and config.norm_output))
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(config.embed_requires_grad)

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
        """Run one step on ``input_ids`` (batch, length) together with either kind of hidden state.

        The first step takes ``features`` (batch, length, features x target width); ``features[:, i]`` are of the
        position before ``input_ids[:, i]``. Later steps take ``hidden_states`` (batch, length, hidden), an earlier
        output. ``logits_to_keep`` > 0: only the last logits. The rest: see ``DraftModel.decode``.
        """
        hidden = only_one(features, hidden_states)
        hidden = hidden if features is None else self.fuse(features)
        hidden = self.decode(hidden, (self.embed(input_ids),), position_ids, attention_mask, past_key_values)
        normed = self.norm(hidden)
        read = normed if self.config.norm_before_lm_head else hidden
        logits = self.logits(read[:, -logits_to_keep:])  # (batch, length, draft vocabulary)
        return DraftOutput(logits, normed if self.config.norm_output else hidden, past_key_values)

    def fuse(self, features: Tensor) -> Tensor:
        """Project the target's ``features`` (batch, length, features x width) to (batch, length, hidden)."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(features))

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        config: FusingSpeculatorConfig = self.config
        return config.feature_layers(target.config.get_text_config().num_hidden_layers)
