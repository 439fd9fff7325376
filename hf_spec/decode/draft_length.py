"""Which draft-length policy a call has, and why: what was asked for, the rule of acceptance, seeds, static caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.base import Speculator, network_of
from ..drafts.plain.speculator import PlainSpeculator
from ..invariance.mode import is_invariant
from ..packing.weight import PackedWeight
from ..parallel import ModelParallelGroup
from ..policy.acceptance import AcceptanceEstimator
from ..policy.adaptive import MIN_SPEEDUP, AdaptiveLength, Idle
from ..policy.base import MAX_LENGTH, DraftLengthPolicy, DraftPlan, DraftSource
from ..policy.cost import ShapeCost, StepCost, shape_of, size_class
from ..policy.fixed import FixedLength
from ..policy.store import Profile, profile_of, prompt_class
from ..proposal import tree_from_paths
from ..sampling import is_seeded
from ..scoring.graphs import is_compiled
from ..scoring.modules import modules_of, weights_in
from ..scoring.plain import scored_vocabulary
from ..scoring.widths import costs_of_widths
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from ..verify.rules import rule_for

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Situation:
    """What the policy of a call depends on besides its settings.

    ``is_static``: over a static cache. ``way`` names what else changes step times, such as continuous batching.
    ``ends_together``: all rows end at the same length, because no token ends a text. ``has_seed``: one will be set.
    """

    target: PreTrainedModel
    speculator: Speculator
    samples: bool
    batch_size: int
    prompt_length: int
    is_static: bool = False
    way: tuple[Hashable, ...] = ()
    ends_together: bool = False
    has_seed: bool = False

    @functools.cached_property
    def device(self) -> torch.device:
        """Return the device of the target."""
        return self.target.device

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """List the target's modules."""
        return modules_of(self.target)

    @functools.cached_property
    def is_packed(self) -> bool:
        """Tell whether the target has packed weights."""
        return PackedWeight in map(type, weights_in(self.modules))

    @functools.cached_property
    def is_in_blocks(self) -> bool:
        """Tell whether the target has packed weights, and none of them keeps torch's layout."""
        return self.is_packed and not any(
            isinstance(one, PackedWeight) and one._storage.kept_for for one in weights_in(self.modules)
        )


def draft_length_policy(
    config: SpeculationConfig, asked: SpeculationConfig | None, situation: Situation, ranks: ModelParallelGroup
) -> tuple[SpeculationConfig, DraftLengthPolicy]:
    """Return the settings and the policy of a call; ``config`` follows from what the user ``asked`` for.

    A number that neither the user nor the draft gave is no bound of what is chosen: it is taken out of the settings.
    """
    wants_auto = config.num_speculative_tokens == "auto"
    is_asked = asked is not None and asked.num_speculative_tokens is not None
    rule = rule_for(config)
    reason, is_lossy = "as asked for", rule.lossy is not None and (situation.samples or rule.when_greedy)
    if not is_asked and is_lossy:
        reason, is_asked = f'fixed, because acceptance="{config.acceptance}" is not lossless', True
    draws = situation.samples and config.verification != "exact"
    needs_seed = draws and (situation.has_seed or is_seeded(situation.device))
    is_asked, needs_seed = ranks.broadcast((is_asked, needs_seed))
    own = situation.speculator.defaults().num_speculative_tokens
    first = _first(config, own)
    profile = _profile(config, situation)
    if isinstance(situation.speculator, PlainSpeculator):
        return config, FixedLength(0, profile.acceptance, "because nothing is to be proposed")
    if is_asked and not wants_auto:
        # A hybrid chooses its source by acceptance. One input, or one seed, must give one text whatever came before.
        acceptance = AcceptanceEstimator() if needs_seed or is_lossy else profile.acceptance
        return config, FixedLength(first, acceptance, reason)
    if own is None and not wants_auto:
        config = config.merge(num_speculative_tokens=None)
    return config, _adaptive(config, situation, ranks, profile, first, needs_seed and not wants_auto)


def _adaptive(
    config: SpeculationConfig,
    situation: Situation,
    ranks: ModelParallelGroup,
    profile: Profile,
    first: int,
    by_shapes: bool,
) -> AdaptiveLength:
    agree: Callable[[DraftPlan], DraftPlan] = ranks.broadcast
    longest = min(MAX_LENGTH, _tree_depth(config) or MAX_LENGTH)
    first = min(first, longest)
    shapes: StepCost = _shape_cost(config, situation) if by_shapes else profile.cost
    acceptance = AcceptanceEstimator() if by_shapes else profile.acceptance
    if situation.is_static and config.tree is None:
        costs_of = _shares(shapes) if by_shapes else functools.partial(costs_of_widths, situation.target)
        known: dict[int, int] = {} if by_shapes else profile.static_lengths
        draft_token = functools.partial(_draft_token, config, situation, first)
        first = ranks.broadcast(static_length(known, acceptance, situation.batch_size, first, draft_token, costs_of))
    lengths: Sequence[int] = (0, first) if situation.is_static else range(longest + 1)
    acceptance.begin_call(situation.batch_size)
    lag = acceptance.lag_of_call(situation.batch_size) if situation.ends_together else None
    if by_shapes:
        basis = "by acceptance and shapes, because a seed was set"
        return AdaptiveLength(shapes, acceptance, Idle(), first, lengths, basis=basis, agree=agree, lag=lag)
    stops_early = (
        ranks.is_alone
        and situation.target.dtype in HALF  # float32 steps do not get dearer evenly: 1.86 instead of 2.05 times plain
        and situation.speculator.supports_early_stop
        and (config.tree, config.confidence_threshold, situation.is_static, situation.way) == (None, 0, False, ())
    )
    return AdaptiveLength(shapes, acceptance, profile.idle, first, lengths, stops_early, agree=agree, lag=lag)


def _first(config: SpeculationConfig, own: int | Literal["auto"] | None) -> int:
    """Return the length that was asked for, else the draft's ``own``."""
    asked = config.num_speculative_tokens
    usual = _tree_depth(config) or (own if isinstance(own, int) else DEFAULT_NUM_SPECULATIVE_TOKENS)
    return asked if isinstance(asked, int) else usual


def _tree_depth(config: SpeculationConfig) -> int:
    """Return the depth of a static tree, 0 for other shapes."""
    return 0 if isinstance(config.tree, str | None) else max(len(path) for path in config.tree)


def _profile(config: SpeculationConfig, situation: Situation) -> Profile:
    shape = str(config.tree), config.tree_topk, config.num_tree_tokens, config.confidence_threshold
    rule = config.acceptance, config.accept_k, config.accept_tolerance, situation.samples
    target, device = situation.target, situation.device
    compiled = is_compiled(target, situation.modules)
    forward = situation.is_packed, compiled, is_invariant(target), situation.is_static, *situation.way
    machine = str(device), target.dtype, torch.get_num_threads(), prompt_class(situation.prompt_length)
    key = *situation.speculator.profile_key, *shape, *rule, *machine, *forward
    return profile_of(target, network_of(situation.speculator), *key)


def static_length(
    known: dict[int, int],
    acceptance: AcceptanceEstimator,
    batch_size: int,
    first: int,
    draft_token: Callable[[], float],
    costs_of: Callable[[Sequence[int]], list[float] | None],
) -> int:
    """Return the length of compiled steps: chosen once for batches of a size, before there are graphs.

    ``draft_token`` says what the draft takes for a token, in plain steps.
    ``costs_of`` says what forwards of so many tokens take, as multiples of the first one. Of lengths that promise
    nearly as much the shortest is taken: it loses least where acceptance drops.
    """
    size = size_class(batch_size)
    if size not in known:
        costs = costs_of([batch_size * (1 + length) for length in range(1 + first)]) if batch_size > 1 else None
        expected = accumulate(acceptance.survival(DraftSource.MODEL, first), initial=1.0)
        drafted = 0.0 if costs is None else draft_token()
        speeds = [
            tokens / (cost + drafted * length)
            for length, (tokens, cost) in enumerate(zip(expected, costs or (), strict=False))
        ]
        enough = max(speeds[1:], default=0.0) / MIN_SPEEDUP
        known[size] = next((length for length, speed in enumerate(speeds) if length and speed >= enough), first)
    return min(first, known[size])


def most_nodes(policy: DraftLengthPolicy, config: SpeculationConfig, is_static: bool) -> int | None:
    """Count the nodes of a whole proposal, the root included; ``None`` where its size changes."""
    if isinstance(policy, AdaptiveLength) and not is_static:
        return None
    return 1 + _nodes(config, policy.longest)


def _nodes(config: SpeculationConfig, length: int) -> int:
    """Count the draft tokens of a proposal of this length."""
    if config.tree is None:
        return length
    if not isinstance(config.tree, str):
        return len(tree_from_paths([path[:length] for path in config.tree])[0]) - 1 if length else 0
    whole: int = sum(config.tree_topk**depth for depth in range(1, 1 + length))
    return min(config.num_tree_tokens, whole)


def _shape_cost(config: SpeculationConfig, situation: Situation) -> ShapeCost:
    return ShapeCost(
        shape_of(situation.target),
        situation.speculator.draft_work(situation.target),
        functools.partial(_nodes, config),
        situation.device.type != "cpu",
        situation.target.dtype in HALF,
        situation.is_in_blocks,
        scored_vocabulary(situation.target) if situation.samples and situation.device.type == "cpu" else 0,
    )


def _draft_token(config: SpeculationConfig, situation: Situation, length: int) -> float:
    """Return what a draft token takes by shapes, in plain steps: compiled drafts are not measured."""
    return _shape_cost(config, situation).draft_token(situation.batch_size, length)


def _shares(cost: StepCost) -> Callable[[Sequence[int]], list[float] | None]:
    """Return what forwards take by their shapes, as multiples of the first one."""
    return lambda widths: [cost.plain(width) / cost.plain(widths[0]) for width in widths]
