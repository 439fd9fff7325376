"""Make a manager of continuous batching that decodes speculatively, or reuse the one that a model keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..decode.refusals import Refusal, refusing
from ..drafts.base import Speculator
from ..invariance.mode import invariance_of, renew_invariance, with_other_attention
from ..sampling import is_seeded
from ..scoring.adapters import active_adapters
from ..settings import SpeculationConfig
from ..versions import CONTINUOUS_BATCHING, older_than
from .engine import SpeculativeManager
from .refusals import refuse_batch, switch_off
from .sizes import AT_ONCE, holds_half, holds_longest, sized
from .speculation import Speculation

# Fields of a ContinuousBatchingConfig that say how large an engine is.
SIZES = ("page_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch", "block_size")
FEWEST = 64  # requests that an engine decodes at once, if there is memory: each takes a row of logits in float32

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
    """Make a manager that drafts with ``speculator``, or return the one that the model keeps if it does so.

    ``plain`` is transformers' own ``init_continuous_batching``. Errors: a Refusal for a model or options that
    continuous batching does not support; a ValueError from the draft.
    """
    settings = generation_config or model.generation_config
    if batching_config is None:  # transformers then takes it from the generation config
        batching_config = getattr(settings, "continuous_batching_config", None)
    found = speculator.settings(config)
    if config is None and found.tree is not None:  # the draft's own default, which a chain can replace
        found = speculator.settings(found, tree=None)
    with refusing():
        refuse_batch(model, settings, found, speculator, workload_hints)
        speculator.check(model, found)
    given = sized(model, batching_config, workload_hints)
    if workload_hints is not None and workload_hints.num_requests > 0 and given.max_requests_per_batch is None:
        # transformers would take the number of this call's requests, and a later call of a kept engine may have more.
        given.max_requests_per_batch = min(AT_ONCE, max(FEWEST, workload_hints.num_requests))
    if found.tree is not None:  # transformers would switch to flash attention, which takes no tree mask
        given.auto_switch_to_flash = False
    is_default_size = batching_config is None or batching_config.num_blocks is None
    seeded = bool(settings.do_sample) and (given.seed is not None or is_seeded(model.device))
    kept = kept_manager(model)
    if kept is not None and not (
        not seeded  # then the text follows from the seed alone, and from nothing that an engine has learnt
        and _decodes_alike(kept, speculator, config, _made_for(model, settings, batching_config))
        and _has_nothing_left(kept)
        and _is_large_enough(kept, given, is_default_size, workload_hints)
    ):
        forget_manager(model)
        kept = None
    renew_invariance(model)
    invariance = invariance_of(model)
    if invariance is not None:
        given.auto_switch_to_flash = False
    # transformers knows two kinds of attention for its engine, and ours is neither.
    with contextlib.nullcontext() if invariance is None else with_other_attention(model, "sdpa"):
        manager = plain(model, generation_config, given, workload_hints)
    if kept is not None:
        return manager
    speculation = Speculation(model, speculator, found, config, bool(settings.do_sample), seeded)
    switch_off(manager.continuous_batching_config, batching_config, reads_features=bool(speculation.features.layers))
    # Only now: transformers may have written an end token into the settings.
    made_for = _made_for(model, settings, batching_config)
    return SpeculativeManager.take_over(manager, speculation, made_for, is_default_size)


def kept_manager(model: Any) -> ContinuousBatchingManager | None:
    """Return the manager that transformers keeps on ``model`` for the next call, if there is one."""
    kept: ContinuousBatchingManager | None = getattr(model, "_cached_continuous_batching_manager", None)
    return kept


def _made_for(model: Any, settings: GenerationConfig, batching_config: ContinuousBatchingConfig | None) -> Any:
    """Return what a manager is made for: both configs, without sizes, and the adapters of the model."""
    engine = vars(batching_config or ContinuousBatchingConfig())
    asked = {name: value for name, value in engine.items() if name not in SIZES}
    return settings.to_dict(), asked, active_adapters(model)


def _decodes_alike(
    manager: ContinuousBatchingManager,
    speculator: Speculator,
    config: SpeculationConfig | None,
    made_for: Any,
) -> bool:
    """Tell whether ``manager`` was made for the same and drafts with the same weights, history and options.

    Each call makes a new speculator, so those of two calls are compared by what they hold.
    """
    if not isinstance(manager, SpeculativeManager) or manager.made_for != made_for:
        return False
    if manager.invariance is not invariance_of(manager.model) or manager.speculation.is_seeded:
        return False
    own, asked = manager.speculation.speculator, manager.speculation.asked
    has_weights = getattr(own, "model", None) is not None
    return asked == config and (own is speculator or (has_weights and _held(own) == _held(speculator)))


def _held(speculator: Speculator) -> tuple[Any, ...]:
    """Return what a speculator drafts from; itself if that may be more than is known."""
    history = getattr(speculator, "history", None)
    is_own = type(speculator).__module__.partition(".")[0] == __name__.partition(".")[0]
    if not is_own or (speculator.learns and history is None):
        return (speculator,)
    draft = getattr(speculator, "draft", None)  # beside a history
    inside = _held(draft) if isinstance(draft, Speculator) else (draft,)
    return type(speculator), getattr(speculator, "model", None), history, speculator.profile_key, inside


def _has_nothing_left(manager: ContinuousBatchingManager) -> bool:
    """Tell whether no call has left requests or results in ``manager``, and whether it takes new requests."""
    queues = (manager.input_queue, manager.cancel_queue, manager.output_router.output_queue)
    return all(one.empty() for one in queues) and not _is_stopping(manager)


def _is_stopping(manager: ContinuousBatchingManager) -> bool:
    """Tell whether ``manager`` still writes texts, of a call that did not wait for them."""
    return bool(manager.is_running() and manager.background_thread_status.can_accept_new_requests() is not None)


def _is_large_enough(
    manager: Any, wanted: ContinuousBatchingConfig, is_default_size: bool, hints: WorkloadHints | None
) -> bool:
    """Tell whether the cache of ``manager`` is large enough. A size that a user set is kept until a call sets one.

    ``is_default_size``: this call did not set the ``wanted`` size.
    """
    kept = manager.continuous_batching_config
    if not holds_longest(kept, hints):  # a request without space would end the engine, and all others with it
        return False
    return manager.is_running() or (is_default_size and not manager.is_default_size) or holds_half(kept, wanted)


def forget_manager(model: Any) -> None:
    """Remove the manager that transformers keeps on ``model``: it drafts in another way than the next call wants.

    Errors: a ValueError if it is running and takes requests.
    """
    kept = kept_manager(model)
    if kept is not None and _is_stopping(kept):
        kept.stop(hard_stop=True)  # else its end would wait for texts that nobody reads
    if kept is not None and kept.is_running():
        raise ValueError(
            "the model keeps a running manager of continuous batching with another speculator, other settings, too "
            "little space or results that nobody has read; stop it first: "
            "model.destroy_cached_continuous_batching_manager()"
        )
    model.destroy_cached_continuous_batching_manager()


def note_engine(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    """Record that ``manager`` decodes with ``model``."""
    _engines.setdefault(model, WeakSet()).add(manager)


def refuse_while_engine_decodes(model: PreTrainedModel) -> None:
    """Raise a Refusal while an engine decodes with ``model`` in a thread of its own.

    Its forwards switch the config of the model to attention that is not causal, and other threads' masks follow.
    """
    for manager in list(_engines.get(model, ())):
        thread, processor = manager._generation_thread, manager.batch_processor
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            continue
        if older_than(CONTINUOUS_BATCHING) is None and manager.background_thread_status.is_pause_requested(local=True):
            continue  # this thread has paused it, to use the model
        if manager.input_queue.qsize() or (processor is not None and processor.has_pending_requests()):
            raise Refusal(
                f"Cannot decode speculatively: an engine of continuous batching is decoding with this "
                f"{type(model).__name__} in another thread, and while it does, other forwards are wrong, plain ones "
                "too; give the engine these prompts, wait until it has finished, or call inside manager.pause()."
            )
