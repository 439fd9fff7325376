"""The config of a P-EAGLE draft."""

from __future__ import annotations

from typing import ClassVar

from ..features import check_mask_token
from ..fusing import FusingSpeculatorConfig


class PEagleSpeculatorConfig(FusingSpeculatorConfig):
    """The config of a P-EAGLE draft (arXiv 2602.01469): EAGLE-3's layers, which predict all depths at once.

    ``norm_output`` has no effect, because nothing is fed back.

    Args:
        mask_token_id: the token that later depths read instead of the draft token before them.
    """

    method: ClassVar[str] = "P-EAGLE"
    layer_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen3")
    speculators_model_type: str = "peagle"
    mask_token_id: int | None = None
    embed_requires_grad: bool = True

    def validate(self) -> None:
        super().validate()
        check_mask_token(self.mask_token_id, self.layers.vocab_size)
