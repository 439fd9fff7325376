"""The settings of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeGuard, get_args

TreeKind = Literal["dynamic", "sampled"]
VerificationRule = Literal["auto", "token", "block", "exact"]
AcceptanceRule = Literal["lossless", "typical", "near_best"]

DEFAULT_NUM_SPECULATIVE_TOKENS = 5


@dataclass(frozen=True)
class SpeculationConfig:
    """How to draft and how to verify.

    What is left ``None`` comes from the draft, except for the draft length, which adapts.

    Args:
        num_speculative_tokens: length of a chain, depth of a tree. ``"auto"``: adaptive, chosen in each step by
            acceptance and measured step times; it may be 0. ``None``: adaptive, starting from the draft's own number.
            Two exceptions. When sampling after a seed was set (``torch.manual_seed``, ``set_seed``), step times are
            computed from the shapes of target and draft. So the seed gives the same text again, but with a history of
            earlier calls. It must be below 2**32: larger ones look like those that torch draws itself. With a lossy
            ``acceptance``, every step takes the draft's own number.
        tree: ``None``: a chain. ``"dynamic"``: the most probable tree (EAGLE-2, arXiv 2406.16858). When sampling, it
            is sampled without replacement, with most draft tokens where the draft's confidence is highest.
            ``"sampled"``: such a tree of fixed shape. A list of paths of ranks, ``[(0,), (1,), (0, 0)]``: a static
            tree (Medusa, arXiv 2401.10774), sampled when the target samples.
        tree_topk: children per node of a dynamic or sampled tree, and nodes expanded per level.
        num_tree_tokens: draft tokens in a dynamic or sampled tree.
        sample_draft: when the target samples, sample draft tokens from the draft's distribution, too. ``False``: take
            the draft's best tokens. Either way the output distribution is the target's.
        confidence_threshold: end a chain after the first draft token to which the draft gives a smaller probability. A
            draft with a confidence head (DSpark) ends it before the first token below the threshold.
        verification: all rules are lossless. ``"token"``: arXiv 2211.17192, without replacement for trees.
            ``"block"``: arXiv 2403.10444, and traversal, 2505.12398, for trees. ``"exact"``: sample from the target
            and compare, which gives the same tokens as plain ``generate`` from the same seed. ``"auto"``:
            ``"block"``.
        acceptance: ``"lossless"``: the text has the target's distribution. ``"typical"``: NOT lossless when sampling.
            Accept the longest path of tokens with p(token) > min(``posterior_threshold``, ``posterior_alpha`` *
            exp(-entropy of p)), then emit the target's best token (Medusa, arXiv 2401.10774). The text is more
            predictable than the target's samples, and always the same. ``"near_best"``: NOT lossless, greedy or
            sampling. Accept the longest path of tokens that are each among the target's ``accept_k`` best, or less
            probable than its best one by at most ``accept_tolerance``. Then emit the target's own next token. If
            ``None``, the two are ``verifier_accept_k`` and ``accept_tolerance`` of the draft's
            ``speculators_config``, else 1 and 0.0.
        row_seeds: with ``verification="exact"``, a seed for each row of the batch. Row i then has the text that plain
            ``generate`` writes for it alone after ``torch.manual_seed(row_seeds[i])``. By default all rows draw from
            torch's generator, so that a row's tokens depend on how many rows there are.
        self_check: compare one small ragged block with plain forwards the first time a target is used.
    """

    num_speculative_tokens: int | Literal["auto"] | None = None
    tree: TreeKind | Sequence[Sequence[int]] | None = None
    tree_topk: int = 10
    num_tree_tokens: int = 60
    sample_draft: bool = True
    confidence_threshold: float = 0.0
    verification: VerificationRule = "auto"
    acceptance: AcceptanceRule = "lossless"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    accept_k: int | None = None
    accept_tolerance: float | None = None
    self_check: bool = True
    row_seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count not in (None, "auto") and not (is_int(count) and count >= 1):
            raise ValueError(f"num_speculative_tokens must be a whole number of at least 1 or 'auto', got {count!r}")
        for name in ("tree_topk", "num_tree_tokens", "accept_k"):
            value = getattr(self, name)
            if not (is_int(value) and value >= 1) and not (value is None and name == "accept_k"):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("confidence_threshold", "posterior_threshold", "posterior_alpha", "accept_tolerance"):
            value = getattr(self, name)
            if not _is_share(value) and not (value is None and name == "accept_tolerance"):
                raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")
        if self.confidence_threshold == 1.0:
            raise ValueError("confidence_threshold is 1.0, which no draft token exceeds: it must be below 1")
        for name in ("sample_draft", "self_check"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.verification not in get_args(VerificationRule):
            raise ValueError(f"verification must be one of {get_args(VerificationRule)}, got {self.verification!r}")
        self._check_acceptance()
        self._check_seeds()
        self._check_tree()

    def _check_acceptance(self) -> None:
        if self.acceptance not in get_args(AcceptanceRule):
            raise ValueError(f"acceptance must be one of {get_args(AcceptanceRule)}, got {self.acceptance!r}")
        if self.acceptance != "lossless" and self.verification != "auto":
            raise ValueError(
                f"acceptance={self.acceptance!r} is a verification of its own: leave verification at 'auto', or use "
                "acceptance='lossless'"
            )

    def _check_seeds(self) -> None:
        if self.row_seeds is None:
            return
        if self.verification != "exact":
            raise ValueError(
                "row_seeds need verification='exact', by which the target draws each token; pass that, too"
            )
        if not all(is_int(seed) and 0 <= seed < 1 << 64 for seed in self.row_seeds):
            raise ValueError(f"row_seeds must be whole numbers of at most 64 bits, got {self.row_seeds!r}")

    def _check_tree(self) -> None:
        if self.tree is None or (isinstance(self.tree, str) and self.tree in get_args(TreeKind)):
            return
        if not _are_paths(self.tree):
            raise ValueError(
                f"tree must be None, one of {get_args(TreeKind)}, or a list of paths of ranks such as "
                f"[(0,), (1,), (0, 0)], got {self.tree!r}"
            )
        paths = {tuple(path) for path in self.tree}
        if lone := next((path for path in sorted(paths) if path[:-1] and path[:-1] not in paths), None):
            raise ValueError(
                f"the tree has the path {lone} without {lone[:-1]}, which leads to it: add {lone[:-1]}, for each "
                "draft token stands after another one or after the root"
            )

    def merge(self, **changes: Any) -> SpeculationConfig:
        """Return a copy with ``changes``; unknown names raise a TypeError that lists the known ones."""
        if not changes:
            return self
        known = {field.name for field in fields(self)}
        if unknown := set(changes) - known:
            raise TypeError(f"SpeculationConfig has no {sorted(unknown)}; it has {sorted(known)}")
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, ready for JSON; a ``GenerationConfig`` that holds them saves this."""
        return asdict(self)


def check_settings(config: object, name: str = "speculation_config") -> None:
    """Raise a TypeError if ``config``, passed as ``name``, is neither ``None`` nor a ``SpeculationConfig``."""
    if not isinstance(config, SpeculationConfig | None):
        raise TypeError(f"{name} must be a hf_spec.SpeculationConfig, got {config!r:.80}")


def is_temperature(value: float) -> bool:
    """Tell whether ``value`` is 0, or scores may be divided by it without an overflow in float32."""
    return value == 0 or 1e-30 <= value < float("inf")


def is_int(value: object) -> TypeGuard[int]:
    """Tell whether ``value`` is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return (is_int(value) or isinstance(value, float)) and 0.0 <= value <= 1.0


def _are_paths(tree: object) -> bool:
    paths = tree if isinstance(tree, list | tuple) else []
    ranks = [path for path in paths if isinstance(path, list | tuple) and path]
    return 0 < len(ranks) == len(paths) and all(is_int(rank) and rank >= 0 for path in ranks for rank in path)
