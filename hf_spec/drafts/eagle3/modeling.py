"""EAGLE-3 drafts (arXiv 2503.01840): autoregressive, each step is fed the output of the one before."""

from __future__ import annotations

from typing import Any

from ..files import Checkpoint
from ..fusing import FusingDraftModel
from ..fusing_files import sort_features
from .configuration import Eagle3SpeculatorConfig
from .engines import in_the_way, unserved
from .formats import FORMATS, write_eagle3, write_sglang


class Eagle3DraftModel(FusingDraftModel):
    """An EAGLE-3 draft with any flags (see ``Eagle3SpeculatorConfig``)."""

    config_class = Eagle3SpeculatorConfig
    ends_chains = True
    formats = FORMATS
    layouts = {"eagle3": write_eagle3, "sglang": write_sglang}  # noqa: RUF012
    vllm_method = "eagle3"

    def __init__(self, config: Eagle3SpeculatorConfig) -> None:
        super().__init__(config)
        self.post_init()

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return unserved(config) if checkpoint is None else in_the_way(config, checkpoint, layout)

    def sort_features(self) -> None:
        sort_features(self)
