"""The public names of ``hf_spec``. Importing them adds the keyword ``speculator`` to ``generate``."""

from __future__ import annotations

from .batching.engine import RequestOutput
from .checkpoints.auto import AutoDraftModel
from .checkpoints.conversion import convert
from .checkpoints.inspection import inspect
from .checkpoints.known import KnownDraft, known_drafts
from .checkpoints.resolve import as_speculator
from .configuration import SpeculatorConfig
from .decode.outputs import SpeculativeEncoderDecoderOutput, SpeculativeOutput, last_speculation
from .defaults import get_speculator, set_speculator
from .drafts.base import AcceptedTokens, DraftContext, Drafter, DraftOutput, Speculator
from .drafts.dflash.configuration import DFlashSpeculatorConfig
from .drafts.dflash.modeling import DFlashDraftModel
from .drafts.dspark.configuration import DSparkSpeculatorConfig
from .drafts.dspark.modeling import DSparkDraftModel
from .drafts.eagle.configuration import EagleSpeculatorConfig
from .drafts.eagle.modeling import EagleDraftModel
from .drafts.eagle3.configuration import Eagle3SpeculatorConfig
from .drafts.eagle3.modeling import Eagle3DraftModel
from .drafts.early_exit.speculator import EarlyExitSpeculator
from .drafts.files import Format
from .drafts.medusa.configuration import MedusaSpeculatorConfig
from .drafts.medusa.modeling import MedusaDraftModel
from .drafts.modeling import DraftModel
from .drafts.mtp.configuration import MTPSpeculatorConfig
from .drafts.mtp.modeling import MTPDraftModel
from .drafts.mtp.target import TargetMtp
from .drafts.ngram.hybrid import HybridSpeculator
from .drafts.ngram.speculator import NgramSpeculator
from .drafts.peagle.configuration import PEagleSpeculatorConfig
from .drafts.peagle.modeling import PEagleDraftModel
from .drafts.plain.speculator import PlainSpeculator
from .drafts.translated.speculator import TranslatedSpeculator
from .drafts.vanilla.speculator import VanillaSpeculator
from .integration import SpeculativeDecoding, SpeculativeModel, install, uninstall
from .invariance.mode import Invariance, invariant
from .many.generate import generate_many
from .many.prompts import Completion
from .metrics import SpeculationStats
from .packing.packing import Packing, pack, packed, unpack
from .proposal import Proposal
from .settings import SpeculationConfig
from .verify.processors import pure

__all__ = [
    "AcceptedTokens",
    "AutoDraftModel",
    "Completion",
    "DFlashDraftModel",
    "DFlashSpeculatorConfig",
    "DSparkDraftModel",
    "DSparkSpeculatorConfig",
    "DraftContext",
    "DraftModel",
    "DraftOutput",
    "Drafter",
    "Eagle3DraftModel",
    "Eagle3SpeculatorConfig",
    "EagleDraftModel",
    "EagleSpeculatorConfig",
    "EarlyExitSpeculator",
    "Format",
    "HybridSpeculator",
    "Invariance",
    "KnownDraft",
    "MTPDraftModel",
    "MTPSpeculatorConfig",
    "MedusaDraftModel",
    "MedusaSpeculatorConfig",
    "NgramSpeculator",
    "PEagleDraftModel",
    "PEagleSpeculatorConfig",
    "Packing",
    "PlainSpeculator",
    "Proposal",
    "RequestOutput",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeDecoding",
    "SpeculativeEncoderDecoderOutput",
    "SpeculativeModel",
    "SpeculativeOutput",
    "Speculator",
    "SpeculatorConfig",
    "TargetMtp",
    "TranslatedSpeculator",
    "VanillaSpeculator",
    "as_speculator",
    "convert",
    "generate_many",
    "get_speculator",
    "inspect",
    "install",
    "invariant",
    "known_drafts",
    "last_speculation",
    "pack",
    "packed",
    "pure",
    "set_speculator",
    "uninstall",
    "unpack",
]

install()
