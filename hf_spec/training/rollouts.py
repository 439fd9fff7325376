"""Speculation in rollouts of reinforcement learning, while the policy changes and its draft is trained on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..checkpoints.resolve import as_speculator
from ..decode.entry import is_synced
from ..defaults import set_speculator, stored_for
from ..drafts.base import DraftContext, Drafter, Speculator, network_of
from ..policy.base import DraftSource
from ..policy.cost import ModelShape
from ..settings import SpeculationConfig, is_int
from .trainer import DraftTrainer

logger = logging.get_logger(__name__)

Default = tuple[Speculator | None, SpeculationConfig | None]  # of a model


class RolloutCallback(TrainerCallback):
    """A callback by which a trainer that generates, such as TRL's ``GRPOTrainer``, speculates and trains the draft on.

    ``trainer.add_callback(RolloutCallback(speculator))`` is enough for a trainer that calls ``generate`` of the model
    that it trains. The texts keep the distribution of the policy, whatever its weights have become. Each call reads
    its prompts again, and the policy verifies every draft token. Only the acceptance depends on how well the draft
    knows the policy, so ``draft_trainer`` trains it on the latest texts.

    Args:
        speculator: as in ``generate``; by default the draft of ``draft_trainer``.
        config: how to draft and verify.
        draft_trainer: a ``DraftTrainer`` whose target is the policy. Its arguments say how long each training lasts,
            for example ``num_train_epochs=1`` and ``save_strategy="no"``. Its examples are whole texts, prompts and
            completions, from all processes.
        every: steps of the policy between two trainings of the draft.
        keep: how many of the latest texts of each process a training reads at most.

    Errors: a TypeError if there is neither a speculator nor a trainer of one. A ValueError for numbers that are not
    whole or below 1. A ValueError of the draft when training begins, if it cannot serve the policy.
    """

    def __init__(
        self,
        speculator: Any = None,
        config: SpeculationConfig | None = None,
        *,
        draft_trainer: DraftTrainer | None = None,
        every: int = 10,
        keep: int = 256,
    ) -> None:
        if speculator is None and draft_trainer is None:
            raise TypeError("RolloutCallback needs a draft: pass a speculator, a draft_trainer, or both")
        for name, number in (("every", every), ("keep", keep)):
            if not is_int(number) or number < 1:
                raise ValueError(f"{name} is {number!r}; set a whole number of at least 1")
        self.speculator, self.config = speculator, config
        self.draft_trainer, self.every = draft_trainer, every
        self.texts: deque[list[int]] = deque(maxlen=keep)
        self._before: Default = None, None
        self._is_set = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Give the policy its speculator, unless it is spread over processes, which must take the same forwards."""
        self._is_set = not is_synced(model)
        if not self._is_set:
            logger.warning("The policy is sharded (by FSDP or ZeRO-3), so it generates without a speculator.")
            return
        before = stored_for(model)
        # One that records is left by a training that ended with an error.
        self._before = before[0].before if isinstance(before[0], _Recording) else before
        found: Any = self.speculator
        if found is None and self.draft_trainer is not None:
            found = self.draft_trainer.draft
        if self.draft_trainer is not None:
            self.draft_trainer.draft.eval()  # as each training leaves it
        set_speculator(model, _Recording(as_speculator(found, model), self.texts, self._before), self.config)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh the draft after every ``every`` steps."""
        if self.draft_trainer is None or state.global_step % self.every:
            return
        if texts := _of_all_processes(list(self.texts), self.draft_trainer.accelerator.num_processes):
            train_on(self.draft_trainer, texts)
        self.texts.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Restore the policy's earlier speculator."""
        if self._is_set:
            set_speculator(model, *self._before)


def train_on(trainer: DraftTrainer, texts: Sequence[Sequence[int]]) -> None:
    """Continue the training of ``trainer``'s draft on ``texts`` (token ids), as long as its arguments say.

    All tokens count as the target's own. The optimizer keeps its state from call to call. The schedule of the learning
    rate starts again.
    """
    trainer.train_dataset = [
        {"input_ids": list(text), "loss_mask": [1] * len(text)} for text in texts if len(text) > 2
    ]
    trainer.lr_scheduler = None
    trainer.train()


def _of_all_processes(texts: list[list[int]], processes: int) -> list[list[int]]:
    if processes == 1:
        return texts
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    return list(gather_object(texts))


class _Recording(Speculator):
    """A speculator that drafts as ``inner`` does and records the texts of finished calls.

    ``before`` is the default of the model that it took the place of.
    """

    def __init__(self, inner: Speculator, texts: deque[list[int]], before: Default) -> None:
        self.inner, self._texts, self.before = inner, texts, before

    @property
    def model(self) -> Any:
        """Return the module of the draft, if it has weights."""
        return network_of(self.inner)

    def estimates_acceptance(self, batch_size: int) -> bool:
        return self.inner.estimates_acceptance(batch_size)

    @property
    def supports_early_stop(self) -> bool:
        return self.inner.supports_early_stop

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        return self.inner.profile_key

    def draft_work(self, target: Any) -> Callable[[int], Sequence[ModelShape]]:
        return self.inner.draft_work(target)

    @property
    def source(self) -> DraftSource:
        return self.inner.source

    @property
    def reads_target_keys(self) -> bool:
        return self.inner.reads_target_keys

    @property
    def shares_target_cache(self) -> bool:
        return self.inner.shares_target_cache

    def encodes(self, target: Any) -> bool:
        return self.inner.encodes(target)

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return self.inner.feature_layers(target)

    def check(self, target: Any, config: SpeculationConfig | None = None) -> None:
        self.inner.check(target, config)

    def defaults(self) -> SpeculationConfig:
        return self.inner.defaults()

    def more_nodes(self, length: int) -> int:
        return self.inner.more_nodes(length)

    def drafter(self, request: DraftContext) -> Drafter:
        return self.inner.drafter(request)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        self.inner.learn(texts)
        # No draft can be trained on placeholders (-1): it would need the image that they stand for.
        self._texts.extend(list(text) for text in texts if min(text, default=0) >= 0)
