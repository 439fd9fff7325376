"""The config of an EAGLE-3 draft."""

from __future__ import annotations

import itertools
from typing import Any

from transformers import PreTrainedConfig

from ...configuration import SpeculatorConfig, is_int

EAGLE3_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "norm_before_lm_head",
    "embed_requires_grad",
)
# How configs call the number of residual streams that run side by side (hyper-connections, AltUp).
STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")


class Eagle3SpeculatorConfig(SpeculatorConfig):
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

    speculators_model_type: str = "eagle3"
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_lm_head: bool = True
    embed_requires_grad: bool = False

    @property
    def num_features(self) -> int:
        """Count the hidden states of the target that the draft reads."""
        return 3 if self.eagle_aux_hidden_state_layer_ids is None else len(self.eagle_aux_hidden_state_layer_ids)

    @property
    def feature_size(self) -> int:
        """Return the width of one feature: the target's hidden size."""
        return int(self.target_hidden_size or self.layers.hidden_size)

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the ids that are read of a target with so many layers."""
        if self.eagle_aux_hidden_state_layer_ids is None:
            return (2, num_target_layers // 2, num_target_layers - 3)
        return tuple(self.eagle_aux_hidden_state_layer_ids)

    def describe(self) -> dict[str, str]:
        ids = self.eagle_aux_hidden_state_layer_ids
        reads = f"hidden_states{ids}" if ids else "hidden_states[2, n // 2, n - 3] of n layers"
        return super().describe() | {
            "reads": f"{reads} of width {self.feature_size}",
            "guesses": f"{self.draft_vocab_size} of {self.layers.vocab_size} tokens",
            "flags": ", ".join(f"{name}={getattr(self, name)}" for name in EAGLE3_FLAGS),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """Write beside the fields how many features there are if not three: vLLM's llama drafts look for it there."""
        config = super().to_diff_dict()
        layers = config.get("transformer_layer_config", {})
        layers.pop("num_aux_hidden_states", None)
        if self.num_features != 3:
            layers["num_aux_hidden_states"] = self.num_features
        return config

    def check_target(self, target: PreTrainedConfig) -> None:
        super().check_target(target)
        text = target.get_text_config()
        if streams := next((name for name in STREAMS if getattr(text, name, 1) > 1), None):
            raise ValueError(
                f"a {text.model_type} target has several residual streams ({streams}={getattr(text, streams)}), and "
                "EAGLE-3 reads one: use EAGLE-1, Medusa or MTP, which read what comes out of the final norm"
            )
        if self.feature_size != text.hidden_size:
            raise ValueError(
                f"target_hidden_size is {self.target_hidden_size} and the draft's hidden_size "
                f"{self.layers.hidden_size}, but the target's is {text.hidden_size}: the draft was made for another "
                f"target; use that one, or set target_hidden_size={text.hidden_size} and train"
            )
        ids, count = self.feature_layers(text.num_hidden_layers), text.num_hidden_layers
        if not all(0 <= i <= count for i in ids) or len(set(ids)) < len(ids):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids {list(ids)} do not fit a target of {count} layers; "
                f"name distinct ones of 0..{count}"
            )

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.layers.vocab_size

    def validate(self) -> None:
        super().validate()
        for name in EAGLE3_FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is {value!r}; set True or False")
        for name in ("draft_vocab_size", "target_hidden_size"):
            value = getattr(self, name)
            if value is not None and not (is_int(value) and value >= 1):
                raise TypeError(f"{name} is {value!r}; set a whole number of at least 1 or None")
        if self.draft_vocab_size > self.layers.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, larger than the target's vocabulary of "
                f"{self.layers.vocab_size} (transformer_layer_config.vocab_size); set at most that"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc are both True; norm each feature or their concatenation, not both"
            )
        self._check_layer_ids()

    def _check_layer_ids(self) -> None:
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is None:
            return
        if not isinstance(ids, list) or not ids or not all(is_int(i) and i >= 0 for i in ids):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids is {ids!r}; list whole numbers i >= 0, one per hidden_states[i]"
            )
        if any(a >= b for a, b in itertools.pairwise(ids)):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids {ids} are not ascending: vLLM sorts them and would feed the draft "
                f"permuted features; set {sorted(set(ids))} and order the columns of fc likewise"
            )
