"""The configs of a call (``speculation``) and of a draft on disk (``speculator``)."""

from .medusa import MedusaSpeculatorConfig
from .mtp import MTP_FLAGS, MTPSpeculatorConfig
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
    "MTP_FLAGS",
    "Eagle3SpeculatorConfig",
    "EagleSpeculatorConfig",
    "MTPSpeculatorConfig",
    "MedusaSpeculatorConfig",
    "SpeculationConfig",
    "SpeculatorConfig",
    "default_speculators_config",
    "layers_for_target",
    "max_positions",
]
