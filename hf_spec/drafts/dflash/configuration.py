"""The config of a DFlash draft."""

from __future__ import annotations

from typing import ClassVar

from ..blocks import BlockSpeculatorConfig


class DFlashSpeculatorConfig(BlockSpeculatorConfig):
    """The config of a DFlash draft (arXiv 2602.06036): a block draft whose slots predict independently."""

    method: ClassVar[str] = "DFlash"
    layer_model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    speculators_model_type: str = "dflash"
