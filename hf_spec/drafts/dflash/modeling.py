"""DFlash drafts (arXiv 2602.06036): the plain block draft, whose slots do not depend on each other's draft tokens."""

from __future__ import annotations

from typing import Any

from ..block_files import engines
from ..blocks import BlockDraftModel
from ..files import Checkpoint
from .configuration import DFlashSpeculatorConfig
from .formats import FORMATS, write_dflash


class DFlashDraftModel(BlockDraftModel):
    """A DFlash draft with any flags (see ``BlockSpeculatorConfig``)."""

    config_class = DFlashSpeculatorConfig
    formats = FORMATS
    layouts = {"dflash": write_dflash}  # noqa: RUF012
    vllm_method = "dflash"

    def __init__(self, config: DFlashSpeculatorConfig) -> None:
        super().__init__(config)
        self.post_init()

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        anchored = ["takes the root's slot for one that predicts nothing"] * config.sample_from_anchor
        return engines(config, checkpoint, anchored, "dflash")
