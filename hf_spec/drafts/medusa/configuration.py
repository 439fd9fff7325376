"""The config of Medusa heads."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ...configuration import (
    MOST_LAYERS,
    MOST_WIDE,
    SpeculatorConfig,
    cut_draft_vocabulary,
    default_speculators_config,
)
from ...settings import is_int
from ...versions import SubConfigSpec


class MedusaSpeculatorConfig(SpeculatorConfig):
    """The config of Medusa heads (arXiv 2401.10774). They have no decoder layers: ``layers`` is this config itself.

    They read the target's last hidden state after the final norm. vLLM no longer serves such heads; its own format is
    still read by ``AutoDraftModel``. Only hf_spec reads this ``speculators_model_type``.

    Args:
        num_heads: draft tokens per forward; head i predicts the token i + 2 positions after the one it reads.
        num_hidden_layers: residual blocks per head.
        hidden_size: width of the target's hidden states.
        vocab_size: tokens of the target; ``None`` if unknown, as in files whose heads end in the target's layer.
        draft_vocab_size: tokens the heads can propose; ``None`` for the full vocabulary.
        shared_with_target: ``["lm_head"]`` if every head ends in the target's output layer ("version 2"), ``[]`` if
            each ends in its own (the published heads).
    """

    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {}  # no decoder layers

    speculators_model_type: str = "medusa"
    num_heads: int = 5
    num_hidden_layers: int = 1
    hidden_size: int = 4096
    vocab_size: int | None = None
    draft_vocab_size: int | None = None

    @property
    def layers(self) -> PreTrainedConfig:
        return self

    @property
    def shape(self) -> str:
        return f"{self.num_heads} heads of {self.num_hidden_layers} residual block(s)"

    def describe(self) -> dict[str, str]:
        return {}

    @classmethod
    def for_target(cls, target: PreTrainedConfig, layers: dict[str, Any] | None = None, **flags: Any) -> Any:
        """Return the config of new heads for the target with config ``target``; the rest are fields of this config."""
        text = target.get_text_config()
        shape = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "shared_with_target": ["lm_head"]}
        cut_draft_vocabulary(flags, target)
        speculators_config = default_speculators_config(cls.speculators_model_type, target)
        config = cls(**{"speculators_config": speculators_config, **shape, **(layers or {}), **flags})
        config.check_target(target)
        return config

    def check_target(self, target: PreTrainedConfig) -> None:
        if self.vocab_size is not None:
            super().check_target(target)
        self._check_width(target)

    def validate(self) -> None:
        super().validate()
        for name in ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "draft_vocab_size"):
            value = getattr(self, name)
            unknown = value is None and name in ("vocab_size", "draft_vocab_size")
            most = MOST_LAYERS if name.startswith("num_") else MOST_WIDE
            if not unknown and not (is_int(value) and 1 <= value <= most):
                raise ValueError(f"{name} is {value!r}; set a whole number of 1 to {most:,}")
        if self.shared_with_target not in ([], ["lm_head"]):
            raise ValueError(
                f"shared_with_target is {self.shared_with_target!r}; heads read no tokens, so it is ['lm_head'] or []"
            )
        if self.vocab_size is None and not self.shared_with_target:
            raise ValueError("vocab_size is None; set the number of tokens of the target, which the heads predict")
        if self.draft_vocab_size is not None and self.draft_vocab_size > (self.vocab_size or 0):
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, larger than vocab_size {self.vocab_size}; set at most "
                "that, or None"
            )
