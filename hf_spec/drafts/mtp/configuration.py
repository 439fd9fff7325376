"""The config of a multi-token-prediction layer in files of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration import SpeculatorConfig

MTP_FLAGS = ("features_after_norm", "feedback_after_norm", "hidden_first")


class MTPSpeculatorConfig(SpeculatorConfig):
    """The config of one MTP layer outside its target, as speculators' ``mtp``; any llama-like layer works.

    vLLM serves such a layer only under the names of the target's own checkpoint: ``convert(..., to="native")``.

    Args:
        num_nextn_predict_layers: 1; the layer is fed its own output for further draft tokens.
        features_after_norm: read the target's last hidden state after its final norm, as engines do. ``False``: before
            it, as the speculators library trains.
        feedback_after_norm: feed the output back after the layer's last norm. ``False``: before it (MiMo).
        hidden_first: project (hidden state, embedding) (MiMo). ``False``: (embedding, hidden state).
    """

    speculators_model_type: str = "mtp"
    num_nextn_predict_layers: int = 1
    features_after_norm: bool = True
    feedback_after_norm: bool = True
    hidden_first: bool = False

    def describe(self) -> dict[str, str]:
        return super().describe() | {"flags": ", ".join(f"{name}={getattr(self, name)}" for name in MTP_FLAGS)}

    def check_target(self, target: PreTrainedConfig) -> None:
        super().check_target(target)
        self._check_width(target)

    def validate(self) -> None:
        super().validate()
        for name in MTP_FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is {value!r}; set True or False")
        counts = {
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "transformer_layer_config.num_hidden_layers": self.layers.num_hidden_layers,
        }
        for name, count in counts.items():
            if count != 1:
                raise ValueError(
                    f"{name} is {count!r}; an MTP draft has one layer, which is fed its own output: set 1"
                )

    def _check_layer_type(self) -> None:
        """Accept the decoder layers of any architecture."""
        given: Any = self.transformer_layer_config
        if not isinstance(given, dict | PreTrainedConfig | None):
            super()._check_layer_type()
