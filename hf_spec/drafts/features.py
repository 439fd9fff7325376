"""What configs of drafts share that read several hidden states of the target: EAGLE-3, DFlash and similar ones."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..configuration import SpeculatorConfig, another_target
from ..settings import is_int

# Names in configs for the number of parallel residual streams (hyper-connections, AltUp).
STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
# Layer ids for targets with so few layers that the default would repeat one; 0 is the input of the first layer.
SHALLOW = {1: [0, 1], 2: [0, 1, 2], 3: [1, 2, 3]}


class FeatureSpeculatorConfig(SpeculatorConfig):
    """The config of a draft that reads several hidden states of its target, and may have a reduced vocabulary.

    The field that ``layer_ids_field`` names lists them; ``None`` is the default ``[2, n // 2, n - 3]``. Id i is
    ``hidden_states[i]``, the residual stream after i layers; the number of layers means the last one *before* the
    final norm. The default needs 7 layers; for a target of fewer, ``for_target`` names others.

    Args:
        draft_vocab_size: tokens the draft can propose; ``None`` for the target's full vocabulary.
        target_hidden_size: width of the target's features; ``None`` if it is the draft's.
    """

    method: ClassVar[str] = ""  # the displayed name of the method
    layer_ids_field: ClassVar[str] = ""
    flags: ClassVar[tuple[str, ...]] = ()  # fields that are True or False

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None

    @classmethod
    def for_target(cls, target: PreTrainedConfig, layers: dict[str, Any] | None = None, **flags: Any) -> Any:
        count = target.get_text_config().num_hidden_layers
        if flags.get(cls.layer_ids_field) is None:  # saved, so that the default is not applied to another target
            flags[cls.layer_ids_field] = usual_layers(count)
        return super().for_target(target, layers, **flags)

    @property
    def layer_ids(self) -> list[int] | None:
        """Return the ids as the file lists them; ``None`` for the default."""
        ids: list[int] | None = getattr(self, self.layer_ids_field)
        return ids

    @property
    def num_features(self) -> int:
        """Count the hidden states of the target that the draft reads."""
        return 3 if self.layer_ids is None else len(self.layer_ids)

    @property
    def feature_size(self) -> int:
        """Return the width of one feature: the target's hidden size."""
        return int(self.target_hidden_size or self.layers.hidden_size)

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the ids that are read from a target with so many layers."""
        if self.layer_ids is None:
            return (2, num_target_layers // 2, num_target_layers - 3)
        return tuple(self.layer_ids)

    def describe(self) -> dict[str, str]:
        reads = f"hidden_states{self.layer_ids}" if self.layer_ids else "hidden_states[2, n // 2, n - 3] of n layers"
        return super().describe() | {
            "reads": f"{reads} of width {self.feature_size}",
            "proposes": f"{self.draft_vocab_size} of {self.layers.vocab_size} tokens",
            "flags": ", ".join(f"{name}={getattr(self, name)}" for name in self.flags),
        }

    def check_target(self, target: PreTrainedConfig) -> None:
        super().check_target(target)
        text = target.get_text_config()
        if streams := next((name for name in STREAMS if getattr(text, name, 1) > 1), None):
            raise ValueError(
                f"a {text.model_type} target has several residual streams ({streams}={getattr(text, streams)}), and "
                f"{self.method} reads one: use EAGLE-1, Medusa or MTP, which read what comes out of the final norm"
            )
        if self.feature_size != text.hidden_size:
            raise ValueError(
                f"target_hidden_size is {self.target_hidden_size} and the draft's hidden_size "
                f"{self.layers.hidden_size}, but the target's is {text.hidden_size}: the draft was made for another "
                f"target; use that one, or set target_hidden_size={text.hidden_size} and train"
            )
        ids, count = self.feature_layers(text.num_hidden_layers), text.num_hidden_layers
        if not all(0 <= i <= count for i in ids) or len(set(ids)) < len(ids):
            other = another_target(self.made_for, target)
            raise ValueError(
                f"{self.layer_ids_field} {list(ids)} do not fit a target of {count} layers: "
                + (f"{other}; use that one" if other else f"name distinct ones of 0..{count}")
            )

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.layers.vocab_size

    def validate(self) -> None:
        super().validate()
        for name in self.flags:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is {value!r}; set True or False")
        for name in ("draft_vocab_size", "target_hidden_size"):
            size: Any = getattr(self, name)
            if size is not None and not (is_int(size) and size >= 1):
                raise TypeError(f"{name} is {size!r}; set a whole number of at least 1 or None")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.layers.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, larger than the target's vocabulary of "
                f"{self.layers.vocab_size} (transformer_layer_config.vocab_size); set at most that"
            )
        ids = self.layer_ids
        if ids is not None and not (isinstance(ids, list) and ids and all(is_int(i) and i >= 0 for i in ids)):
            raise ValueError(f"{self.layer_ids_field} is {ids!r}; list whole numbers i >= 0, one per hidden_states[i]")


def usual_layers(count: int) -> list[int]:
    """Return the ids read by default from a target with ``count`` layers."""
    return [2, count // 2, count - 3] if count >= 7 else SHALLOW.get(count, [1, count // 2, count - 1])


def check_mask_token(mask: Any, vocabulary: int) -> None:
    """Raise a ValueError unless ``mask`` is one of the ``vocabulary`` tokens of the target."""
    if not (is_int(mask) and 0 <= mask < vocabulary):
        raise ValueError(
            f"mask_token_id is {mask!r}; name a token of the target, 0..{vocabulary - 1}, that never occurs in text, "
            "such as a reserved or a padding token (a published draft's config or card says which)"
        )
