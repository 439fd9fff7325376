"""The config of an EAGLE-3 draft."""

from __future__ import annotations

from typing import ClassVar

from ..fusing import EAGLE3_FLAGS, FusingSpeculatorConfig

__all__ = ["EAGLE3_FLAGS", "Eagle3SpeculatorConfig"]


class Eagle3SpeculatorConfig(FusingSpeculatorConfig):
    """The config of an EAGLE-3 draft (arXiv 2503.01840), which is fed its own output.

    For its fields see ``FusingSpeculatorConfig``.
    """

    method: ClassVar[str] = "EAGLE-3"
    speculators_model_type: str = "eagle3"
