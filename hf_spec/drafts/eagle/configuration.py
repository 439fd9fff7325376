"""The config of an EAGLE-1 or EAGLE-2 draft."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ...configuration import SpeculatorConfig


class EagleSpeculatorConfig(SpeculatorConfig):
    """The config of an EAGLE-1 or EAGLE-2 draft (arXiv 2401.15077, 2406.16858); both have the same weights.

    It reads the target's last hidden state after the final norm and predicts with the target's own head. Only hf_spec
    reads its files; those of speculators 0.1 and 0.2 have the same ``speculators_model_type`` and other tensors.

    Args:
        fc_bias: the layer that fuses embedding and feature has a bias.
    """

    speculators_model_type: str = "eagle"
    fc_bias: bool = True

    def check_target(self, target: PreTrainedConfig) -> None:
        super().check_target(target)
        self._check_width(target)

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.fc_bias, bool):
            raise TypeError(f"fc_bias is {self.fc_bias!r}; set True or False")
