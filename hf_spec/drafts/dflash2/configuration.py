"""The config of a DFlash2 draft."""

from __future__ import annotations

from typing import ClassVar

from ...settings import is_int
from ..blocks import BlockSpeculatorConfig

SHAPE = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2SpeculatorConfig(BlockSpeculatorConfig):
    """The config of a DFlash2 draft: a block draft with convolutions over its slots and a selector of pairs.

    Args:
        conv_kernel_size: taps of each convolution: slots that it reads, its own included.
        conv_group_size: channels that share a coefficient which depends on the slot; divides the hidden size.
        selector_rank: width of the embeddings by which the selector scores a pair of neighbouring tokens.
        selector_top_k: candidates per slot; the draft proposes no other token there.
    """

    method: ClassVar[str] = "DFlash2"
    layer_model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    speculators_model_type: str = "dflash2"
    sliding_window_non_causal: bool = True
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def validate(self) -> None:
        super().validate()
        for name in SHAPE:
            if not (is_int(value := getattr(self, name)) and value >= 1):
                raise ValueError(f"{name} is {value!r}; set a whole number of at least 1")
        size, whole = self.layers.hidden_size, self.layers.vocab_size
        if size % self.conv_group_size:
            raise ValueError(f"conv_group_size is {self.conv_group_size}; set a divisor of hidden_size, {size}")
        if self.selector_top_k > whole:
            raise ValueError(f"selector_top_k is {self.selector_top_k}; set at most {whole}, the whole vocabulary")
        if self.draft_vocab_size not in (None, whole):
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but DFlash2's selector scores all {whole} tokens of "
                "the target: set None"
            )
