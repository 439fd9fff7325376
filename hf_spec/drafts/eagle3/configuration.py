"""The config of an EAGLE-3 draft."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from ..features import FeatureSpeculatorConfig

EAGLE3_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "norm_before_lm_head",
    "embed_requires_grad",
)


class Eagle3SpeculatorConfig(FeatureSpeculatorConfig):
    """Describe an EAGLE-3 draft (arXiv 2503.01840) with the flags of the speculators library, all of them saved.

    Args:
        draft_vocab_size: tokens the draft can guess; ``None`` for the whole vocabulary of the target.
        target_hidden_size: width of the target's features; ``None`` if it is the draft's.
        eagle_aux_hidden_state_layer_ids: which ``hidden_states[i]`` of the target are read, i.e. the residual stream
            after i layers, ascending; the number of layers means the last one *before* the final norm. ``None``:
            ``[2, n // 2, n - 3]``.
        norm_before_residual: the residual carries the normed feature (speculators) instead of the raw one (EAGLE).
        norm_output: later steps are fed the output after the final norm ("EAGLE-3.1") instead of before it.
        norm_before_fc: norm the concatenated features. ``fc_norm``: norm each of them. Not both.
        norm_before_lm_head: ``False`` for SpecForge's ``norm_output: false``; only hf_spec knows this one.
        embed_requires_grad: train the embeddings too.
    """

    method: ClassVar[str] = "EAGLE-3"
    layer_ids_field: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    flags: ClassVar[tuple[str, ...]] = EAGLE3_FLAGS

    speculators_model_type: str = "eagle3"
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_lm_head: bool = True
    embed_requires_grad: bool = False

    def to_diff_dict(self) -> dict[str, Any]:
        """Write beside the fields how many features there are if not three: vLLM's llama drafts look for it there."""
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
