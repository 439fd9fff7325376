"""Speculative decoding for Hugging Face Transformers: ``model.generate(..., speculator=draft)``."""

from __future__ import annotations

from .checkpoints import AutoDraftModel
from .configuration import (
    Eagle3SpeculatorConfig,
    EagleSpeculatorConfig,
    MedusaSpeculatorConfig,
    MTPSpeculatorConfig,
    SpeculationConfig,
    SpeculatorConfig,
)
from .conversion import convert, inspect
from .drafts.base import Drafter, News, Request, Speculator
from .drafts.eagle import EagleDraftModel
from .drafts.eagle3 import Eagle3DraftModel
from .drafts.medusa import MedusaDraftModel
from .drafts.modeling import DraftModel, DraftOutput
from .drafts.mtp import MTPDraftModel, TargetMtp
from .drafts.ngram import NgramSpeculator
from .drafts.vanilla import VanillaSpeculator
from .generation import SpeculativeDecoding, SpeculativeOutput
from .integration import install, set_speculator, uninstall
from .logits import pure
from .metrics import SpeculationStats
from .proposal import Proposal
from .speculators import as_speculator

__version__ = "0.1.0"

__all__ = [
    "AutoDraftModel",
    "DraftModel",
    "DraftOutput",
    "Drafter",
    "Eagle3DraftModel",
    "Eagle3SpeculatorConfig",
    "EagleDraftModel",
    "EagleSpeculatorConfig",
    "MTPDraftModel",
    "MTPSpeculatorConfig",
    "MedusaDraftModel",
    "MedusaSpeculatorConfig",
    "News",
    "NgramSpeculator",
    "Proposal",
    "Request",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeDecoding",
    "SpeculativeOutput",
    "Speculator",
    "SpeculatorConfig",
    "TargetMtp",
    "VanillaSpeculator",
    "as_speculator",
    "convert",
    "inspect",
    "install",
    "pure",
    "set_speculator",
    "uninstall",
]

install()
