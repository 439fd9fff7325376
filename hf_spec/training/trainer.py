"""A ``transformers.Trainer`` for drafts: the frozen target provides hidden states and distributions."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..checkpoints.fingerprint import has_body
from ..configuration import hub_name
from ..drafts.modeling import DraftModel
from ..drafts.mtp.target import TargetMtp
from ..processes import Processes
from ..scoring.adapters import base_model, is_in_generate
from ..scoring.trials import in_evaluation
from ..unroll.feedback import UnrollInput
from ..versions import CHECKPOINTING_ARGUMENT
from ..whole_files import write_files
from . import muon, sharding
from .arguments import DraftTrainingArguments
from .card import check_card_options, is_chat, model_card
from .checks import check_arguments, check_before_saving, check_call, check_finite, name_target
from .data import DraftCollator, check_columns, check_examples
from .evaluation import acceptance, measure, prompts_of, sums_of, token_ids
from .features import LAST, FeatureCache
from .held_out import Filled, Unsharded, source_of, without_repeats
from .losses import (
    ChunkedLoss,
    StepMetrics,
    counted_positions,
    feature_loss,
    of_chains,
    position_weights,
    sample_anchors,
)
from .origin import check_tokenizer
from .resuming import (
    asks_to_resume,
    check_draft,
    check_output_dir,
    check_same_everywhere,
    checked_optimizer,
    checkpoint_to_resume,
    explain_full_disk,
    place_in_stream,
)
from .running_sums import RunningSums
from .teacher import Reader
from .unrolling import count_steps, unrolled
from .wrapping import as_loaded, as_trained, let_forward_compute_a_loss, weights_put_back

logger = logging.get_logger(__name__)


class DraftTrainer(Trainer):
    """A trainer of ``model``, a draft of any kind, on the distributions of ``target``.

    Datasets have the columns ``input_ids``, ``loss_mask`` (1 where a token is the target's own answer) and, if packed,
    ``document_ids``: see ``prepare_dataset``. The target is set to evaluation mode, and read in it also if somebody
    trains it meanwhile. It is not changed otherwise. It runs in this process, except on a ``FeatureCache``; if all
    datasets are caches, ``cache.load_target()`` is enough. ``evaluate()`` also generates speculatively and adds
    ``eval_acceptance_length`` and ``eval_acceptance_k``, how often the first k draft tokens are accepted.
    ``metric_for_best_model`` may name one to select checkpoints by.

    Args:
        model: a ``DraftModel``, or a smaller causal language model to distil; or use ``model_init``.
        target: the language model it drafts for; may have an adapter of PEFT.
        eval_prompts: held-out prompts as token ids; taken from ``eval_dataset`` by default.
        peft_config: train an adapter of PEFT on the draft instead of the draft.
        **kwargs: all that ``Trainer`` takes.

    Errors: a ValueError if the draft was made for another target, or if cached features are not those that it needs
    from this one. Also if examples were prepared with another tokenizer than ``processing_class``, or if the target's
    states or a loss are not finite. Also if one process sees several devices: start one process per device instead.
    """

    loss_is_scaled_for_ga = True  # divided over all batches of a step already, see _get_num_items_in_batch

    def __init__(
        self,
        model: Any = None,
        target: Any = None,
        args: DraftTrainingArguments | None = None,
        *,
        eval_prompts: Sequence[Sequence[int]] | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else DraftTrainingArguments(output_dir="draft")
        check_call(target, args, kwargs)
        self.target: PreTrainedModel = base_model(target).eval()
        self._vocabulary = len(cast(Any, self.target).get_input_embeddings().weight)
        self.eval_prompts = None if eval_prompts is None else token_ids(eval_prompts, self._vocabulary)
        self._peft_config = peft_config
        self._tokenizer = kwargs.get("processing_class")
        self._sums = {True: RunningSums(), False: RunningSums()}  # is training? -> its metrics
        self._order = torch.Generator()  # random order of examples that are grouped by length
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = DraftCollator()
        if args.muon_learning_rate is not None:
            kwargs["optimizer_cls_and_kwargs"] = muon.factory(args)
        held_out = kwargs.get("eval_dataset")
        self._data = [kwargs.get("train_dataset"), *(held_out.values() if isinstance(held_out, dict) else [held_out])]
        if not has_body(self.target):
            args.check_without_target()
        super().__init__(None if model is None else self._prepare_draft(model, args), args, **kwargs)
        self._forget_use_cache()
        if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
            sharding.set_up(plugin)
        if has_body(self.target):
            self._reader.check()

    # -- the draft ----------------------------------------------------------------------------------------------------

    def call_model_init(self, trial: Any = None) -> Any:
        return self._prepare_draft(super().call_model_init(trial), self.settings)

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        if self.settings.freeze_lm_head != self._is_head_frozen:  # Trainer makes the draft before it sets arguments
            raise ValueError("freeze_lm_head cannot be searched over: make one search with it, and one without")
        if self.settings.muon_learning_rate is not None:  # which the search may have begun without
            sharding.check_complete_matrices(self.settings)
            self.optimizer_cls_and_kwargs = cast(Any, muon.factory(self.settings))

    def _prepare_draft(self, model: Any, args: DraftTrainingArguments) -> Any:
        draft = base_model(model)
        if not isinstance(draft, PreTrainedModel) or draft is self.target:
            raise TypeError(
                f"the draft is {'the target' if draft is self.target else f'a {type(draft).__name__}'}: pass a "
                "DraftModel or a smaller causal language model, loaded"
            )
        if isinstance(draft, TargetMtp):
            raise ValueError(
                f"the MTP layers of {type(self.target).__name__} can be read, but not written back: train a "
                "separate draft instead, made from an MTPSpeculatorConfig"
            )
        adapter = None if self._peft_config is None else _for_draft(self._peft_config, draft)
        check_arguments(draft, self.target, args)
        if getattr(self.target, "hf_device_map", None) is None and self.target.device != args.device:
            cast(Any, self.target).to(args.device)
        if isinstance(draft, DraftModel):
            if adapter is None and draft is model:
                draft.sort_features()  # as it will be saved; an adapter belongs to the draft as its files have it
            draft.bind(self.target)  # once the target is where it stays: bind may copy rows of its output layer
            for layer in draft.output_layers if args.freeze_lm_head else ():
                layer.requires_grad_(False)
            if draft.unroll_steps(args.unroll_steps) == 1:  # what only later steps read gets no gradient
                args.ddp_find_unused_parameters = True
        self._is_head_frozen = args.freeze_lm_head
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, adapter)
        self._reader = Reader(self.target, draft.feature_layers(self.target) if isinstance(draft, DraftModel) else ())
        for data in self._data:
            self._admit(data)
        self._let_train(model)
        if sharding.is_asked_for(args):
            sharding.hide_embeddings_and_head(model)
        return model

    def _let_train(self, model: Any) -> None:
        """Let accelerate wrap ``model``, which an earlier training or an evaluation may have marked as wrapped."""
        draft = base_model(model)
        for one in (model, draft):
            for name in ("_is_accelerate_prepared", "_original_forward", "forward"):
                vars(one).pop(name, None)
        let_forward_compute_a_loss(draft)
        self._around: dict[str, Any] = {}  # the draft's wrapped forward, see ``as_trained``

    def _admit(self, data: Any) -> None:
        """Raise a ValueError if the target or the draft cannot read ``data``."""
        if isinstance(data, FeatureCache):
            data.check(self.target, self._reader.feature_layers)
        elif data is not None and not isinstance(data, str):
            check_examples(data, self._vocabulary)
            check_tokenizer(data, self._tokenizer, self._vocabulary)
            if not has_body(self.target):
                raise ValueError("without its layers the target cannot read text: cache the features of every dataset")

    def _forget_use_cache(self) -> None:
        """Remove ``use_cache``, which Trainer writes into any model's config: a draft has no such option."""
        if isinstance(draft := self.draft, DraftModel):
            draft.config.__dict__.pop("use_cache", None)

    @property
    def draft(self) -> Any:
        """Return the draft without the wrappers of training and PEFT."""
        return base_model(self.accelerator.unwrap_model(self.model))

    @property
    def _steps(self) -> int:
        """Return how many steps the draft is unrolled for; a search may change it between two trials."""
        return count_steps(self.draft, self.settings.unroll_steps)

    @property
    def settings(self) -> DraftTrainingArguments:
        """Return ``args`` with its type."""
        return cast(DraftTrainingArguments, self.args)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._choose_anchors(inputs, 0 if model.training else None)
        divisor = self._divisor(inputs) if num_items_in_batch is None else num_items_in_batch
        scale = 1.0
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            scale = float(self.accelerator.num_processes)  # gradients are averaged over processes
        layers, hidden = self._states(inputs)
        features = torch.cat([layer.to(hidden.device) for layer in layers], dim=-1) if layers else None
        text = UnrollInput(inputs["input_ids"], inputs.get("document_ids"), features, inputs.get("anchors"))
        batch_loss = functools.partial(self._batch_loss, text, self._counted(inputs), hidden, divisor)
        with as_trained(self.draft, self._around):  # DDP and FSDP need all of it inside one forward of the wrapper
            loss, metrics, counted = model(batch_loss=batch_loss)
        may_overflow = self.args.fp16 or (self.args.fp16_full_eval and not model.training)
        check_finite(features, hidden, None if may_overflow else loss)
        if not isinstance(self.draft, DraftModel):  # a language model: its one step gives the metrics of all chains
            steps = self.settings.unroll_steps
            counted = counted_positions(inputs["loss_mask"], steps, inputs.get("document_ids"))
            metrics = of_chains(metrics, counted)
        self._sums[model.training].add(metrics, self._divisor(inputs), counted)
        return (loss * scale, {}) if return_outputs else loss * scale

    def _batch_loss(
        self, text: UnrollInput, counted: Tensor, hidden: Tensor, divisor: Tensor, draft: Any
    ) -> tuple[Tensor, StepMetrics, Tensor]:
        """Return a batch's loss, metrics (losses not weighted by step), and ``counted``.

        ``counted`` (steps, batch, length - 1) are the positions that count. ``hidden`` (batch, length, target hidden)
        are the target's last hidden states. ``divisor`` (steps,) divides the positions' weights.
        """
        args = self.settings
        made = unrolled(draft, text, self._steps, bool(getattr(args, CHECKPOINTING_ARGUMENT)))
        weights, _ = position_weights(counted, args.normalizer, text.document_ids)  # type: ignore[arg-type]
        factor = self._step_weights(weights.device)  # (steps,)
        factor = factor / ((factor * divisor).sum() if args.normalizer == "draft_token" else divisor).clamp(min=1)
        weights = weights * factor[:, None, None]
        chunked_loss = ChunkedLoss(
            made.head,
            self._target_logits,
            draft.target_ids if isinstance(draft, DraftModel) else None,
            args.objective,
            args.outside_vocabulary,  # type: ignore[arg-type]
            args.logit_rows,
            made.confidence,
            args.confidence_weight,
            args.chain_smoothing,
            made.selector,
            args.selector_weight,
            args.kl_temperature,
        )
        loss, metrics = chunked_loss.compute(made.states, hidden, weights, made.trained, text.input_ids)
        if args.feature_loss_weight:
            distances = args.feature_loss_weight * feature_loss(made.predicted_states, hidden, weights)
            loss, metrics = loss + distances.sum(), metrics.plus(distances.detach())
        metrics = dataclasses.replace(metrics, losses=metrics.losses / factor)
        return loss, metrics, counted

    def _states(self, inputs: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
        """Return the target's states for a batch: each feature layer of the draft, and the last hidden states."""
        if (cached := inputs.get("states")) is not None:
            layers = [cached[layer] for layer in self._reader.feature_layers]
            return layers, cached[LAST].to(self.target.dtype)
        with torch.no_grad(), self._own_precision():
            return self._reader.read(inputs["input_ids"], inputs.get("document_ids"))

    def _own_precision(self) -> torch.autocast:
        """Switch autocast off: the target computes as in generation, whatever precision the draft is trained in."""
        return torch.autocast(self.args.device.type, enabled=False)

    def _target_logits(self, hidden: Tensor) -> Tensor:
        with self._own_precision():
            return self._reader.logits(hidden)

    def _step_weights(self, device: torch.device) -> Tensor:
        return self.settings.step_decay ** torch.arange(self._steps, device=device, dtype=torch.float32)

    def _divisor(self, inputs: dict[str, Any]) -> Tensor:
        normalizer: Any = self.settings.normalizer
        return position_weights(self._counted(inputs), normalizer, inputs.get("document_ids"))[1]

    def _counted(self, inputs: dict[str, Any]) -> Tensor:
        """Mark the positions that count, (steps, batch, length - 1); for a block draft only those of its anchors."""
        counted = counted_positions(inputs["loss_mask"], self._steps, inputs.get("document_ids"))
        return counted & inputs["anchors"][:, 1:] if "anchors" in inputs else counted

    def _choose_anchors(self, inputs: dict[str, Any], number: int | None) -> None:
        """Sample a block draft's anchors once per batch, seeded by step and batch ``number`` for resumed runs.

        Without a ``number``, in evaluation, they are always the same. Errors: a ValueError for a batch without the
        columns of a dataset.
        """
        check_columns(inputs, "a batch", "leave out data_collator, or let it keep what prepare_dataset has made")
        if "anchors" in inputs or not getattr(self.draft, "needs_anchors", False):
            return
        place = () if number is None else (self.state.global_step, self.args.process_index, number)
        generator = torch.Generator().manual_seed(hash((self.args.seed, *place)))
        given = (inputs["loss_mask"], inputs.get("document_ids"), self.settings.num_anchors)
        inputs["anchors"] = sample_anchors(*given, generator)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Return the divisor of each step's weights, (steps,), summed over accumulated batches and processes."""
        if not batch_samples:
            return None
        for number, batch in enumerate(batch_samples):
            self._choose_anchors(batch, number)
        counts = torch.stack([self._divisor(batch) for batch in batch_samples]).sum(0).to(device)
        return self._over_processes(counts) if self.args.average_tokens_across_devices else counts

    def _over_processes(self, sums: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return cast(Tensor, self.accelerator.reduce(sums.to(self.args.device), reduction="sum"))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self._admit(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        self._admit(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        if isinstance(dataset, IterableDataset) and (processes := self.accelerator.num_processes) > 1:
            if not is_training:
                dataset = Filled(dataset, self.args.eval_batch_size * processes)
            elif hasattr(dataset, "shard"):  # of the datasets library, which accelerate divides by files
                dataset = Unsharded(dataset)
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)  # type: ignore[misc]

    # -- logs and evaluation ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self._sums[True].averages()
            self._sums[True] = RunningSums()
        super().log(logs, start_time)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        inputs = without_repeats(self._prepare_inputs(inputs), self.accelerator, self.args.eval_batch_size)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self._sums[False] = RunningSums()
        with weights_put_back(self.draft), in_evaluation(self.target):  # it may be a policy in training
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if output.metrics is None:
            return output
        sums = self._sums[False]
        metrics = sums.averages(self._over_processes)
        if sums.sums is not None:  # an average over all positions; transformers averages over batches
            together = self.settings.normalizer == "draft_token"
            metrics["loss"] = sums.loss(self._step_weights(torch.device("cpu")), together, self._over_processes)
        with in_evaluation(self.target):
            metrics |= self._measured(dataloader.dataset)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _measured(self, dataset: Any) -> dict[str, float]:
        """Generate from held-out prompts, split over processes, and return the acceptance metrics."""
        args, prompts = self.settings, self.eval_prompts
        if prompts is None:
            prompts = prompts_of(source_of(dataset), args.eval_prompts, args.eval_prompt_length)
        if not args.eval_prompts or not prompts:
            return {}
        if not has_body(self.target):
            logger.warning_once("nothing is measured by generation, for which the target would need its layers")
            return {}
        mine = prompts[self.args.process_index :: self.args.world_size]
        options = (args.eval_max_new_tokens, args.eval_speculative_tokens)
        metrics: dict[str, float] = {}
        for name, temperature in (("", None), ("sampled_", args.eval_temperature)):
            if name and temperature is None:
                continue
            draft = self.draft
            with sharding.gathered(cast(nn.Module, self.model)), as_loaded(draft):
                counts = measure(draft, self.target, mine, *options, temperature, args.eval_batch_size, args.seed)
            sums = self._over_processes(sums_of(counts, len(mine)))
            metrics |= {f"{name}{key}": value for key, value in acceptance(sums).items()}
        return metrics

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does; ``True`` resumes from the last complete checkpoint, if there is one.

        Errors: a ValueError if ``output_dir`` has the checkpoints of another run that is not resumed.
        """
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, cast(str, self.args.output_dir))
        if asks_to_resume(resume_from_checkpoint):
            check_same_everywhere(checkpoint, Processes(self.accelerator))
        elif not self.state.global_step:
            check_output_dir(cast(str, self.args.output_dir))
        if self.model is not None:
            adapter = getattr(self.accelerator.unwrap_model(self.model), "active_peft_config", None)
            check_draft(checkpoint, self.draft, adapter)
            vars(self.draft).update(self._around)  # training wraps the draft again, and must wrap this forward
            is_sharded = sharding.splits_matrices(self.args)  # whose wrapper takes the model's place
            if self.accelerator.num_processes > 1 and self.model_wrapped is self.model and not is_sharded:
                self._let_train(self.model)  # an evaluation has marked it, without DDP
        self._sums[True] = RunningSums()  # without steps after the last log of an earlier training
        try:
            with in_evaluation(self.target):  # it may be a policy in training
                return super().train(checkpoint, *args, **kwargs)
        finally:
            if self.model is not None:
                self.draft.eval()  # a language model would draft with its dropout

    def _init_training_state(self, max_steps: int, steps: int, epochs: int, checkpoint: Any, *args: Any) -> Any:
        place = super()._init_training_state(max_steps, steps, epochs, checkpoint, *args)
        if checkpoint is None or self.args.ignore_data_skip or hasattr(self.train_dataset, "__len__"):
            return place
        return place_in_stream(checkpoint, self.args.gradient_accumulation_steps)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and isinstance(draft := self.draft, DraftModel):
            draft.bind(self.target)  # its weights are loaded by now, and maybe a draft vocabulary of other tokens
        with checked_optimizer(self.optimizer, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _get_train_sampler(self, *args: Any) -> Any:
        """Group by length with a generator of our own, so that a resumed run repeats the order."""
        sampler = super()._get_train_sampler(*args)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = self._order
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Stop if all of ``max_steps`` are done: Trainer would take one more step before it checks."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self._order.manual_seed(hash((seed, kwargs["epoch"])))
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    # -- files --------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        check_before_saving(self.draft, self.target, state_dict)
        name_target(self.draft, self.target, self._target_name)
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self._write_card(output_dir or cast(str, self.args.output_dir))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with explain_full_disk(f"the checkpoint of step {self.state.global_step}"):
            super()._save_checkpoint(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a directory that ``from_pretrained`` loads, with a model card."""
        if _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        with explain_full_disk(f"the draft in {output_dir or self.args.output_dir}"):
            super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload as ``Trainer`` does; other options are those of ``create_model_card``."""
        check_card_options(kwargs.keys() - inspect.signature(super().push_to_hub).parameters.keys())
        return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, **options: Any) -> None:  # type: ignore[override]
        """Write the model card of hf_spec; transformers' own card does not name the target.

        ``license``, ``tags`` and ``dataset`` are written into it, the last two as a name or a list of names.
        ``model_name`` changes nothing. Errors: a TypeError for other options.
        """
        check_card_options(options.keys())
        if self.is_world_process_zero():
            self._write_card(cast(str, self.args.output_dir), **options)

    @property
    def _target_name(self) -> str | None:
        return self.settings.target_name or hub_name(self.target.config.name_or_path)

    def _write_card(self, directory: str, **options: Any) -> None:
        model: Any = self.accelerator.unwrap_model(self.model)
        data: Any = self.train_dataset
        card = model_card(
            self.draft,
            self.target,
            self.settings,
            self._steps,
            self.state.log_history,
            base=None if model is self.draft else model.active_peft_config.base_model_name_or_path or "",
            examples=len(data) if hasattr(data, "__len__") else None,
            target_name=self._target_name,
            best_step=self.state.best_global_step if self.args.load_best_model_at_end else None,
            chat=is_chat(self.processing_class, data),
            draft_name=getattr(self, "hub_model_id", None),  # with the owner, once there is a repository
            **options,
        )
        write_files({"README.md": card}, directory)


def _for_draft(config: Any, draft: Any) -> Any:
    """Return PEFT's ``config`` as it adapts a draft. Errors: a ValueError if drafting would pass the adapter by."""
    if is_in_generate(config):
        raise ValueError(
            "peft_config is of virtual tokens or activated LoRA, which work through PEFT's generate alone, so that "
            "drafting would pass them by: take an adapter of weights, such as LoRA without alora_invocation_tokens"
        )
    if isinstance(draft, DraftModel):
        config = copy.copy(config)
        config.task_type = None  # PEFT's wrappers for a task use methods of language models
    return config
