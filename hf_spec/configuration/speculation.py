"""Every knob of a speculative ``generate`` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeGuard, get_args

TreeKind = Literal["dynamic", "sampled"]
VerificationRule = Literal["auto", "token", "block", "exact"]
AcceptanceRule = Literal["lossless", "typical"]

DEFAULT_NUM_SPECULATIVE_TOKENS = 5


@dataclass(frozen=True)
class SpeculationConfig:
    """Choose how to guess and how to verify; everything left ``None`` is decided by the draft.

    Args:
        num_speculative_tokens: length of a chain, depth of a tree; ``"auto"`` adapts it to the acceptance seen so far.
        tree: ``None`` for a chain; ``"dynamic"`` for the most probable tree (EAGLE-2, arXiv 2406.16858); ``"sampled"``
            for children drawn without replacement, which accepts more at temperature > 0; or a static tree as a list
            of paths of ranks, ``[(0,), (1,), (0, 0)]`` (Medusa, arXiv 2401.10774).
        tree_top_k: children per node of a dynamic or sampled tree, and nodes expanded per level.
        tree_nodes: guesses in a dynamic or sampled tree.
        draft_sampling: draw the guesses from the draft's law instead of taking its best. ``None``: as the target does.
            Either way the output law is the target's.
        min_confidence: end a chain after the first guess that the draft gives a smaller probability.
        verification: ``"token"`` (arXiv 2211.17192; without replacement for trees), ``"block"`` (arXiv 2403.10444;
            traversal, 2505.12398, for trees), ``"exact"`` (draw from the target and see whether it was guessed:
            the same tokens as plain ``generate`` from the same seed), ``"auto"`` = ``"block"``. All are lossless.
        acceptance: ``"lossless"``: the text has the target's law. ``"typical"``: NOT lossless when sampling. The
            longest path whose guesses the target finds typical, p(guess) > min(``typical_threshold``,
            ``typical_alpha`` * exp(-entropy of p)), is followed by the target's best token (Medusa, arXiv 2401.10774):
            longer paths, and a text that is more predictable than the target's samples and always the same.
        self_check: compare one small ragged block with plain forwards the first time a target is used.
    """

    num_speculative_tokens: int | Literal["auto"] | None = None
    tree: TreeKind | Sequence[Sequence[int]] | None = None
    tree_top_k: int = 10
    tree_nodes: int = 60
    draft_sampling: bool | None = None
    min_confidence: float = 0.0
    verification: VerificationRule = "auto"
    acceptance: AcceptanceRule = "lossless"
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    self_check: bool = True

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count not in (None, "auto") and not (is_int(count) and count >= 1):
            raise ValueError(f"num_speculative_tokens must be a whole number of at least 1 or 'auto', got {count!r}")
        for name in ("tree_top_k", "tree_nodes"):
            if not (is_int(value := getattr(self, name)) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0.0 <= self.min_confidence < 1.0:
            raise ValueError(f"min_confidence is a probability, 0 <= x < 1, got {self.min_confidence!r}")
        if self.verification not in get_args(VerificationRule):
            raise ValueError(f"verification must be one of {get_args(VerificationRule)}, got {self.verification!r}")
        self._check_acceptance()
        self._check_tree()

    def _check_acceptance(self) -> None:
        if self.acceptance not in get_args(AcceptanceRule):
            raise ValueError(f"acceptance must be one of {get_args(AcceptanceRule)}, got {self.acceptance!r}")
        if self.acceptance == "typical" and (self.verification != "auto" or self.draft_sampling):
            raise ValueError(
                "acceptance='typical' is a verification of its own, for guesses that were chosen: leave verification "
                "at 'auto' and draft_sampling at None, or use acceptance='lossless'"
            )
        for name in ("typical_threshold", "typical_alpha"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")

    def _check_tree(self) -> None:
        if self.tree is None or (isinstance(self.tree, str) and self.tree in get_args(TreeKind)):
            return
        paths = [] if isinstance(self.tree, str) else list(self.tree)
        if not paths or not all(len(path) and all(is_int(rank) and rank >= 0 for rank in path) for path in paths):
            raise ValueError(
                f"tree must be None, one of {get_args(TreeKind)}, or a list of paths of ranks such as "
                f"[(0,), (1,), (0, 0)], got {self.tree!r}"
            )

    def merge(self, **changes: Any) -> SpeculationConfig:
        """Return a copy with ``changes``; unknown names raise a TypeError that lists the known ones."""
        known = {field.name for field in fields(self)}
        if unknown := set(changes) - known:
            raise TypeError(f"SpeculationConfig has no {sorted(unknown)}; it has {sorted(known)}")
        return replace(self, **changes)


def is_int(value: object) -> TypeGuard[int]:
    """Tell whether ``value`` is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
