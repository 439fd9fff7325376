"""The config of a DSpark draft."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from ...settings import is_int
from ..blocks import BLOCK_FLAGS, BlockSpeculatorConfig

MarkovHeadType = Literal["vanilla", "gated", "rnn"]


class DSparkSpeculatorConfig(BlockSpeculatorConfig):
    """The config of a DSpark draft (arXiv 2607.05147): a block draft whose tokens depend on earlier ones.

    Args:
        markov_rank: width of the Markov head's embedding of the previous token; 0 for no such head.
        markov_head_type: how that token changes the logits. ``"vanilla"``: by a bias; ``"gated"``: by a bias that the
            slot's hidden state gates; ``"rnn"``: by a bias that depends on all draft tokens before.
        enable_confidence_head: a head predicts the probability that the next draft token will be accepted.
        confidence_head_with_markov: that head reads the previous token as well as the slot's hidden state.
    """

    method: ClassVar[str] = "DSpark"
    flags: ClassVar[tuple[str, ...]] = (*BLOCK_FLAGS, "enable_confidence_head", "confidence_head_with_markov")

    speculators_model_type: str = "dspark"
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def validate(self) -> None:
        super().validate()
        if not (is_int(self.markov_rank) and self.markov_rank >= 0):
            raise ValueError(f"markov_rank is {self.markov_rank!r}; set a whole number, 0 for no Markov head")
        if self.markov_head_type not in get_args(MarkovHeadType):
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}; name one of {get_args(MarkovHeadType)}")
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_head_with_markov is True, but markov_rank is 0, so that there is no Markov head to read: "
                "set confidence_head_with_markov=False, or a markov_rank of at least 1"
            )
