"""The config of a DFlash draft."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..blocks import BLOCK_FLAGS, BlockSpeculatorConfig


class DFlashSpeculatorConfig(BlockSpeculatorConfig):
    """The config of a DFlash draft (arXiv 2602.06036): a block draft whose slots predict independently.

    Args:
        scored_as_target: the vocabulary, and the multiplier and cap of the draft's logits, are those of the target.
            ``bind`` looks them up (Muse Glimmer's assistant). Until then, ``vocab_size`` is the least that it can be.
    """

    method: ClassVar[str] = "DFlash"
    layer_model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    flags: ClassVar[tuple[str, ...]] = (*BLOCK_FLAGS, "scored_as_target")
    speculators_model_type: str = "dflash"
    scored_as_target: bool = False

    def describe(self) -> dict[str, str]:
        named = super().describe()
        if self.scored_as_target:
            named |= {
                "target": "not named",
                "proposes": "all tokens of the target, whose logits are scaled as its own",
            }
        return named

    def check_vocabulary(self, target: PreTrainedConfig) -> None:
        given = target.get_text_config().vocab_size
        if not self.scored_as_target:
            super().check_vocabulary(target)
        elif self.mask_token_id is not None and given <= self.mask_token_id:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, but the target has {given} tokens: the draft was made for "
                "another target; use that one or train a draft for this one"
            )

    def complete(self, target: PreTrainedConfig) -> None:
        """Take the vocabulary of a draft that is ``scored_as_target`` from its ``target``."""
        if self.scored_as_target:
            is_whole = self.draft_vocab_size in (None, self.layers.vocab_size)
            self.layers.vocab_size = target.get_text_config().vocab_size
            if is_whole:  # and not trimmed
                self.draft_vocab_size = self.layers.vocab_size

    def scales_of(self, target: PreTrainedConfig) -> dict[str, Any]:
        """Return the multiplier and the cap of the target's logits that apply to the draft's, by name."""
        text, names = target.get_text_config(), ("output_multiplier", "final_logit_softcapping")
        given = {name: getattr(text, name, None) for name in names} if self.scored_as_target else {}
        return {name: value for name, value in given.items() if value not in (None, 1.0)}
