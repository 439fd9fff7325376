"""All arguments for training a draft: those of ``TrainingArguments``, some with other defaults, and a few more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from transformers import SchedulerType, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.integration_utils import get_available_reporting_integrations

from ..settings import is_temperature
from .losses import Normalizer, Outside, objective_terms
from .sharding import check_complete_matrices

# Arguments that must be numbers (NUMBERS) or integers (INTEGERS), and the bounds of their values.
NUMBERS = (
    *(
        "step_decay",
        "chain_smoothing",
        "feature_loss_weight",
        "confidence_weight",
        "selector_weight",
        "kl_temperature",
        "eval_temperature",
    ),
    "muon_learning_rate",
)
INTEGERS = (
    *("unroll_steps", "num_anchors", "logit_rows"),
    *("eval_prompts", "eval_prompt_length", "eval_max_new_tokens", "eval_speculative_tokens"),
)
LEAST = {
    **dict.fromkeys(("unroll_steps", "num_anchors", "logit_rows"), 1),
    **dict.fromkeys(("eval_prompt_length", "eval_max_new_tokens", "eval_speculative_tokens"), 1),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("eval_prompts", "confidence_weight", "selector_weight", "feature_loss_weight"), 0),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"), 0),
}
ABOVE_0 = ("step_decay", "kl_temperature", "muon_learning_rate", "eval_temperature")


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """The arguments of ``DraftTrainer``. Defaults are EAGLE-3's where it has any (arXiv 2503.01840).

    Args:
        unroll_steps: steps of the training-time test. Medusa has one per head instead, block drafts one per draft
            token of a block. Language models are trained on one step and measured on this many.
        step_decay: step k is weighted by ``step_decay ** k``.
        chain_smoothing: weight each draft token also by the expected length of the chains that reach it, according to
            the draft's own confidence (D-PACE). Each confidence is moved towards 1 by this share. The speculators
            library trains DFlash with 0.5 and ``step_decay=1.0``. ``None``: weight by ``step_decay`` alone, as a
            confidence head always is.
        objective: the loss. ``"kl"``: from the target's distribution. ``"reverse_kl"``. ``"ce"``: cross-entropy with
            its best token. ``"nll"``: with the text's own token. ``"tv"``: total variation, one minus the acceptance
            rate. ``"lk"``: from KL to total variation as acceptance grows. A sum, such as ``"0.1 ce + 0.9 tv"``.
        kl_temperature: divides both logits of ``"kl"``, which is then multiplied by its square (JetSpec).
        normalizer: per step, ``"token"`` weights all answer tokens equally, and ``"sequence"`` all documents.
            ``"draft_token"`` divides the losses of all steps by the sum of their weights (DFlash, DSpark).
        num_anchors: blocks drafted in each example (DFlash). They start after answer tokens that are sampled again
            each time.
        confidence_weight: weight of the cross-entropy that trains a draft's confidence head (DSpark).
        selector_weight: weight of the cross-entropy that trains a draft's selector of pairs (DFlash2).
        outside_vocabulary: what happens where the target's best token is not in the draft vocabulary. ``"drop"``
            removes the position from the loss and counts it as wrong. ``"keep"`` compares within the draft
            vocabulary, as the speculators library does.
        feature_loss_weight: weight of a smooth L1 loss between fed-back and true last hidden states
            (EAGLE-1: 1.0, together with ``"0.1 kl"``).
        muon_learning_rate: train the draft's inner matrices with Muon at this rate, such as 0.01. It needs fewer
            steps than AdamW. The rest is trained by AdamW at ``learning_rate``, without weight decay. Both follow
            one schedule. ``None``: use what ``optim`` names.
        freeze_lm_head: do not train the draft's own output layer, as the speculators library does.
        logit_rows: text positions whose logits are in memory at once. Fewer need less memory, more are faster.
        eval_prompts: number of held-out prompts that ``evaluate()`` generates from; 0 for none.
        eval_prompt_length: tokens of a prompt from plain text, which does not mark where an answer begins.
        eval_max_new_tokens: tokens generated from each prompt.
        eval_speculative_tokens: draft tokens per step; ``None``: the number in the draft's config.
        eval_temperature: temperature of a second, sampled measurement; ``None`` for the greedy one only.
        data_name: name of the data in the model card; for a dataset of the Hub its id.
        target_name: the target's id on the Hub, for the model card and the saved config. By default it is the name
            that the target was loaded by, unless that is a directory.
        license: licence of the draft, as the Hub spells it; its embeddings and output layer start from the target's.
    """

    unroll_steps: int = 7
    step_decay: float = 0.8
    chain_smoothing: float | None = None
    objective: str = "kl"
    kl_temperature: float = 1.0
    normalizer: str = "token"
    num_anchors: int = 512
    confidence_weight: float = 1.0
    selector_weight: float = 1.0
    outside_vocabulary: str = "drop"
    feature_loss_weight: float = 0.0
    muon_learning_rate: float | None = None
    freeze_lm_head: bool = False
    logit_rows: int = 256
    eval_prompts: int = 16
    eval_prompt_length: int = 32
    eval_max_new_tokens: int = 64
    eval_speculative_tokens: int | None = None
    eval_temperature: float | None = None
    data_name: str | None = None
    target_name: str | None = None
    license: str | None = None

    learning_rate: float = 1e-4
    adam_beta2: float = 0.95
    max_grad_norm: float = 0.5
    lr_scheduler_type: SchedulerType | str = "cosine"
    warmup_steps: float = 0.015
    remove_unused_columns: bool = False
    label_names: list[str] | None = field(default_factory=list)
    ddp_find_unused_parameters: bool | None = False  # each gets a gradient; see DraftTrainer for one step

    def __post_init__(self) -> None:
        objective_terms(self.objective)
        for name, choices in (("normalizer", Normalizer), ("outside_vocabulary", Outside)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {get_args(choices)}")
        self._check_numbers()
        if self.label_smoothing_factor:
            raise ValueError(
                "label_smoothing_factor has no effect here: the objective compares distributions; leave it 0"
            )
        if "acceptance" in (self.metric_for_best_model or "") and not self.eval_prompts:
            raise ValueError(
                f"{self.metric_for_best_model} is measured by generation: set eval_prompts to more than 0"
            )
        if "sampled" in (self.metric_for_best_model or "") and self.eval_temperature is None:
            raise ValueError(f"{self.metric_for_best_model} is measured by sampling: set eval_temperature")
        if self.muon_learning_rate is not None:
            check_complete_matrices(self)
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns would remove what the target reads; leave it False")
        if self.torch_compile:
            raise ValueError(
                "torch_compile would compile the target's part and the loss with the draft; leave it False, and let "
                "each layer of draft.layers (the heads of Medusa: draft.heads) be compiled by layer.compile()"
            )
        super().__post_init__()  # type: ignore[no-untyped-call]
        accelerator: Any = self.accelerator_config
        if accelerator.dispatch_batches is None:
            accelerator.dispatch_batches = False  # a stream's batches differ in width and cannot be dispatched
        there = get_available_reporting_integrations()
        if missing := [name for name in self.report_to or [] if name not in there]:
            raise ValueError(
                f"report_to names {missing[0]!r}, which is not installed: install it, or choose of {there or ['none']}"
            )
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "ZeRO-3 gathers the weights of a layer for that layer's own forward only, and training needs them "
                "longer: take ZeRO-1 or 2, or FSDP"
            )

    def _check_numbers(self) -> None:
        for name in (*INTEGERS, *NUMBERS):
            if (value := getattr(self, name)) is not None and type(value) not in (
                (int,) if name in INTEGERS else (int, float)
            ):
                raise TypeError(f"{name} is {value!r}; set {'an integer' if name in INTEGERS else 'a number'}")
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value) and (name, value) != ("max_grad_norm", math.inf):
                raise ValueError(f"{name} is {value!r}; set a number that is finite")
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} is {value!r}; set at least {least}")
        for name in ABOVE_0:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} is {value!r}; set more than 0")
        if self.num_train_epochs <= 0 and self.max_steps <= 0:
            raise ValueError(
                f"num_train_epochs is {self.num_train_epochs!r}, so that nothing would be trained: set more than 0, "
                "or max_steps"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value!r}; set at least 0 and less than 1")
        if self.chain_smoothing is not None and not 0 <= self.chain_smoothing <= 1:
            raise ValueError(f"chain_smoothing is {self.chain_smoothing!r}; set 0 to 1, or None")
        if self.eval_temperature is not None and not is_temperature(self.eval_temperature):
            raise ValueError(
                f"eval_temperature is {self.eval_temperature!r}, too small to divide by; set at least 1e-30"
            )

    def check_without_target(self) -> None:
        """Raise a ValueError if the arguments need more of the target than embeddings and output layer."""
        if "acceptance" in (self.metric_for_best_model or ""):
            raise ValueError(
                f"{self.metric_for_best_model} is measured by generation, for which the target needs its layers: pass "
                'the complete target, or set metric_for_best_model="eval_expected_length"'
            )
