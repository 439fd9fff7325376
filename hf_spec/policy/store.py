"""What earlier calls have found, kept for as long as target and draft live."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from .acceptance import AcceptanceEstimator
from .adaptive import Idle
from .cost import MeasuredCost

SHORT_PROMPT = 512  # tokens; a step after more of them, up to four times as many, takes longer (docs/performance.md)


class Profile:
    """Step times and acceptance of a target with one draft, one device, dtype, class of prompt length and settings.

    Packed weights, the exact mode and another number of threads have profiles of their own, too.

    ``static_lengths`` are the lengths, by class of batch size, for which there are graphs.
    """

    def __init__(self) -> None:
        self.cost, self.acceptance, self.idle = MeasuredCost(), AcceptanceEstimator(), Idle()
        self.static_lengths: dict[int, int] = {}


_OfTarget: TypeAlias = WeakKeyDictionary[nn.Module, dict[Hashable, Profile]]
# By target; by the weights of the draft, or the target where there are none; then by all else that changes what steps
# take or what is accepted.
_profiles: WeakKeyDictionary[nn.Module, _OfTarget] = WeakKeyDictionary()


def profile_of(target: nn.Module, draft: nn.Module | None, *key: Hashable) -> Profile:
    """Return what was found of ``target`` and the weights of ``draft`` in calls with the same ``key``."""
    of_target = _profiles.setdefault(target, WeakKeyDictionary())
    return of_target.setdefault(target if draft is None else draft, {}).setdefault(key, Profile())


def prompt_class(length: int) -> int:
    """Number the prompt lengths that share a profile: up to 512 tokens, up to 2,048, up to 8,192, ..."""
    return ((max(1, length) - 1) // SHORT_PROMPT).bit_length() + 1 >> 1
