"""Make a manager of continuous batching that guesses, or use one again that a model keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..decode.refusals import Refusal, refusing
from ..drafts.base import Speculator
from ..settings import SpeculationConfig
from .engine import SpeculativeManager
from .refusals import refuse_batch, switch_off
from .sizes import has_room, sized
from .speculation import Speculation

_engines: WeakKeyDictionary[PreTrainedModel, WeakSet[ContinuousBatchingManager]] = WeakKeyDictionary()


def make_manager(
    plain: Callable[..., ContinuousBatchingManager],
    model: Any,
    speculator: Speculator,
    config: SpeculationConfig | None,
    generation_config: GenerationConfig | None,
    batching_config: ContinuousBatchingConfig | None,
    workload_hints: WorkloadHints | None,
) -> ContinuousBatchingManager:
    """Make a manager that guesses with ``speculator``, or return the one that the model keeps if it does so.

    ``plain`` is transformers' own ``init_continuous_batching``. Errors: a Refusal where they do not go together; a
    ValueError from the draft.
    """
    settings = generation_config or model.generation_config
    if batching_config is None:  # transformers looks there, too
        batching_config = getattr(settings, "continuous_batching_config", None)
    found = speculator.settings(config)
    own_wish = config is None and found.tree is not None
    if own_wish:  # which a chain serves, too
        found = speculator.settings(found, tree=None)
    with refusing():
        refuse_batch(model, settings, found)
        speculator.check(model, found)
    given = sized(model, batching_config, workload_hints)
    if found.tree is not None:  # flash attention, which transformers would switch to, takes no mask
        given.auto_switch_to_flash = False
    is_chosen = batching_config is None or batching_config.num_blocks is None
    kept = kept_manager(model)
    if kept is not None and not (
        _does_so(kept, speculator, config, settings) and _holds(kept, given, is_chosen, workload_hints)
    ):
        forget_manager(model)
        kept = None
    manager = plain(model, generation_config, given, workload_hints)
    if kept is not None:
        return manager
    speculation = Speculation(model, speculator, found, config, bool(settings.do_sample))
    switch_off(manager.continuous_batching_config, batching_config, reads_features=bool(speculation.features.layers))
    return SpeculativeManager.take_over(manager, speculation, settings, is_chosen)


def kept_manager(model: Any) -> ContinuousBatchingManager | None:
    """Return the manager that transformers keeps on ``model`` for the next call, if there is one."""
    kept: ContinuousBatchingManager | None = getattr(model, "_cached_continuous_batching_manager", None)
    return kept


def _does_so(
    manager: ContinuousBatchingManager,
    speculator: Speculator,
    config: SpeculationConfig | None,
    settings: GenerationConfig,
) -> bool:
    """Tell whether ``manager`` decodes by these ``settings``, which it keeps whatever a call says, and guesses with
    the same weights and memory; what holds them is made anew by each call."""
    if not isinstance(manager, SpeculativeManager) or manager.made_for != settings.to_dict():
        return False
    own, asked = manager.speculation.speculator, manager.speculation.asked
    one, other = (
        (type(guesser), getattr(guesser, "model", None), getattr(guesser, "memory", None))
        for guesser in (own, speculator)
    )
    return asked == config and (own is speculator or (one == other and one[1] is not None))


def _holds(manager: Any, wanted: ContinuousBatchingConfig, is_chosen: bool, hints: WorkloadHints | None) -> bool:
    """Tell whether the cache of ``manager`` is large enough; one that a user asked for is, unless a call asks again.

    ``is_chosen``: nobody asked for the size that is ``wanted``.
    """
    if manager.is_running() or (is_chosen and not manager.is_chosen):
        return True
    return has_room(manager.continuous_batching_config, wanted, hints)


def forget_manager(model: Any) -> None:
    """Drop the manager that transformers keeps on ``model``, for it guesses otherwise than the next call wants.

    Errors: a ValueError if it is running.
    """
    kept = kept_manager(model)
    if kept is not None and kept.is_running():
        raise ValueError(
            "the model keeps a manager of continuous batching that runs and guesses otherwise; stop it first: "
            "model.destroy_cached_continuous_batching_manager()"
        )
    model.destroy_cached_continuous_batching_manager()


def note_engine(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    """Remember that ``manager`` decodes with ``model``."""
    _engines.setdefault(model, WeakSet()).add(manager)


def refuse_beside_engine(model: PreTrainedModel) -> None:
    """Raise a Refusal while an engine decodes with ``model`` in a thread of its own.

    Its forwards switch the config of the model to attention that is not causal, and other threads' masks follow.
    """
    for manager in list(_engines.get(model, ())):
        thread, processor = manager._generation_thread, manager.batch_processor
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            continue
        if manager.input_queue.qsize() or (processor is not None and processor.has_pending_requests()):
            raise Refusal(
                f"Cannot decode speculatively: an engine of continuous batching is decoding with this "
                f"{type(model).__name__} in another thread, which spoils other forwards meanwhile, plain ones too; "
                "give it these prompts, or wait for its end."
            )
