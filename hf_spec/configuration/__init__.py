"""The configs of a call (``speculation``) and of a draft on disk (``speculator``)."""

from .medusa import MedusaSpeculatorConfig
from .speculation import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .speculator import (
    EAGLE3_FLAGS,
    Eagle3SpeculatorConfig,
    EagleSpeculatorConfig,
    SpeculatorConfig,
    default_speculators_config,
    layers_for_target,
    max_positions,
)

__all__ = [
    "DEFAULT_NUM_SPECULATIVE_TOKENS",
    "EAGLE3_FLAGS",
    "Eagle3SpeculatorConfig",
    "EagleSpeculatorConfig",
    "MedusaSpeculatorConfig",
    "SpeculationConfig",
    "SpeculatorConfig",
    "default_speculators_config",
    "layers_for_target",
    "max_positions",
]
