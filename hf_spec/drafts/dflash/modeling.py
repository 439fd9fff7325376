"""DFlash drafts (arXiv 2602.06036): the plain block draft, whose slots do not depend on each other's draft tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..block_files import engines
from ..blocks import BlockDraftModel
from ..files import Checkpoint
from ..modeling import softcapped
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
        self._scales_of_target: dict[str, Any] = {}
        self.post_init()

    def bind(self, target: PreTrainedModel) -> None:
        super().bind(target)
        self.config.complete(target.config)
        self._scales_of_target = self.config.scales_of(target.config)

    def over_target(self, logits: Tensor) -> Tensor:
        """Spread logits (..., draft vocabulary) over the target's vocabulary, scaled if ``scored_as_target``."""
        return super().over_target(self._as_the_target(logits))

    def trained_logits(self, states: Tensor) -> Tensor:
        return self._as_the_target(super().trained_logits(states))

    def _as_the_target(self, logits: Tensor) -> Tensor:
        """Apply the target's multiplier and cap: the best token stays the best, and ``q`` is as flat as ``p``."""
        scales = self._scales_of_target
        scaled = logits * scales["output_multiplier"] if "output_multiplier" in scales else logits
        return softcapped(scaled, scales.get("final_logit_softcapping"))

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        anchored = ["takes the root's slot for one that predicts nothing"] * config.sample_from_anchor
        found = engines(config, checkpoint, anchored, "dflash")
        if layout == "muse":
            for engine in ("SGLang", "llama.cpp"):
                found[engine].append("is not known to read transformers' layout")
        return found
