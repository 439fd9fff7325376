"""Checks before a draft is trained, and before it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration import hub_name, max_positions, sizes_of
from ..drafts.modeling import DraftModel
from ..scoring.adapters import base_model, why_in_generate
from ..versions import CHECKPOINTING_ARGUMENT
from .arguments import DraftTrainingArguments

logger = logging.get_logger(__name__)

# Arguments of Trainer that DraftTrainer would never call.
IDLE = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


def check_call(target: Any, args: Any, given: Mapping[str, Any]) -> None:
    """Raise an error for a ``target``, ``args`` or other arguments ``given`` that ``DraftTrainer`` cannot use."""
    if target is None:
        raise TypeError("DraftTrainer needs the target: DraftTrainer(draft, target, args, ...)")
    if not isinstance(args, DraftTrainingArguments):
        raise TypeError(f"args are {type(args).__name__}: pass DraftTrainingArguments, which extend them")
    if idle := [name for name in IDLE if given.get(name) is not None]:
        raise ValueError(
            f"{idle[0]} would not be called, because logits are not kept: choose a loss by objective=, and "
            "override evaluate() for more metrics"
        )
    check_devices(args)
    if not isinstance(base_model(target), PreTrainedModel) or isinstance(base_model(target), DraftModel):
        raise TypeError(
            f"the target is a {type(target).__name__}: pass a loaded language model as the second argument"
        )
    if (adapter := why_in_generate(target)) is not None:
        raise ValueError(
            f"the target's adapter ({adapter}) works through PEFT's generate alone, so that training would read the "
            "target without it: merge it, or take an adapter of weights, such as LoRA"
        )
    if base_model(target).config.is_encoder_decoder:
        raise ValueError(
            f"{type(base_model(target)).__name__} is an encoder-decoder model: the drafts that are trained here read "
            "the hidden states of decoder-only targets, and their layers cannot attend to a source. Draft for it by a "
            "smaller encoder-decoder model, which transformers' Seq2SeqTrainer trains, by a decoder that shares its "
            "encoder, or by 'ngram'"
        )


def check_devices(args: DraftTrainingArguments) -> None:
    """Raise a ValueError if this process sees several devices, which ``Trainer`` would run by ``DataParallel``."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} devices but one process: start one process per device with `accelerate launch` or "
            "`torchrun`, or choose one device with CUDA_VISIBLE_DEVICES"
        )


def check_arguments(draft: Any, target: PreTrainedModel, args: DraftTrainingArguments) -> None:
    """Raise a ValueError for arguments that do not apply to this ``draft``, or a draft of another vocabulary.

    Warn of engines that could not serve the trained draft now, before any time is spent on training.
    """
    _warn(draft, target)
    if args.neftune_noise_alpha is not None and draft.get_input_embeddings() is None:
        raise ValueError(
            "neftune_noise_alpha adds noise to a draft's own embeddings, and this one borrows the target's: leave it "
            "out"
        )
    if getattr(args, CHECKPOINTING_ARGUMENT) and any(one._compiled_call_impl is not None for one in draft.modules()):
        raise ValueError(
            f"{CHECKPOINTING_ARGUMENT} runs a step again, by another graph of a compiled layer than the one that kept "
            "its tensors, and torch refuses that: leave it out, or compile no layer"
        )
    if isinstance(draft, DraftModel):
        if dropped := getattr(draft.layer_config, "attention_dropout", 0.0):
            raise ValueError(
                f"attention_dropout is {dropped:g}, and unrolled steps attend without dropout: set it to 0 in the "
                "draft's layers"
            )
        return
    if args.freeze_lm_head:
        raise ValueError("freeze_lm_head is for drafts that read the target's states: leave it out, or freeze weights")
    own, size = (one.config.get_text_config().vocab_size for one in (draft, target))
    if own != size:
        raise ValueError(
            f"the draft has another vocabulary than the target, {own} tokens and not {size}, and distributions of one "
            "are compared with those of the other: take a draft with the target's tokenizer. If they have one, and "
            f"differ in padding only, call draft.resize_token_embeddings({size}) first; a recipe names what you save"
        )


def check_finite(features: Tensor | None, hidden: Tensor, loss: Tensor | None) -> None:
    """Raise a ValueError unless the target's states of a batch, and its ``loss`` if given, are finite.

    Positions that do not count are checked too: a gradient of zero times infinity is NaN.
    """
    given = {"features": features, "last hidden states": hidden, "loss": loss}
    found = {name: tensor.detach().isfinite().all() for name, tensor in given.items() if tensor is not None}
    flags = torch.stack([one.to(hidden.device) for one in found.values()]).tolist()  # in one transfer
    if not (broken := [name for name, good in zip(found, flags, strict=True) if not good]):
        return
    if broken[0] == "loss":
        raise ValueError(
            "the loss of a batch is not finite, so training cannot continue: go back to an earlier checkpoint, "
            "with a lower learning_rate or max_grad_norm"
        )
    raise ValueError(
        f"the target's {broken[0]} of a batch are not finite: load the target in bfloat16 or float32, mend its "
        "weights, or make the cached features again"
    )


def check_before_saving(draft: Any, target: PreTrainedModel, state_dict: dict[str, Tensor] | None = None) -> None:
    """Raise a ValueError if no engine could load the draft, and warn of each engine that could not serve it.

    ``state_dict`` is what will be saved, by default that of ``draft``.
    """
    broken = [
        name
        for name, tensor in (draft.state_dict() if state_dict is None else state_dict).items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if broken:
        raise ValueError(
            f"not saved, because weights are not finite: {broken[:4]}. Go back to an earlier checkpoint, with a lower "
            "learning_rate or in bf16 instead of fp16"
        )
    if isinstance(draft, DraftModel):
        draft.check_vocabulary()
    _warn(draft, target)


def _warn(draft: Any, target: PreTrainedModel) -> None:
    """Warn once of each engine that cannot serve this draft."""
    for warning in serving_warnings(draft, target):
        logger.warning_once(warning)


def name_target(draft: Any, target: Any, name: str | None) -> None:
    """Write the target's sizes and Hub id into the config of ``draft``, never a local directory.

    A target without an id may be another one than that of a draft that is trained further.
    """
    if not isinstance(draft, DraftModel):
        return
    verifier = draft.config.speculators_config["verifier"]
    verifier |= sizes_of(target.config)
    kept = None if base_model(target).config.name_or_path else hub_name(verifier.get("name_or_path"))
    verifier["name_or_path"] = name or kept
    if verifier["name_or_path"] is None:
        logger.warning_once("the target of this draft has no name: set target_name to its id on the Hub")


def serving_warnings(draft: Any, target: PreTrainedModel) -> list[str]:
    """Return a warning for each engine that cannot serve this draft, or serves it wrongly."""
    if not isinstance(draft, DraftModel):
        return []
    config = draft.config
    warnings = [f"{engine} {'; '.join(found)}" for engine, found in draft.engines(config).items() if found]
    if config.transformer_layer_config is not None:
        have, need = config.layers.max_position_embeddings, max_positions(target.config)
        if have < need:
            warnings.append(
                f"max_position_embeddings is {have}, the target's {need}: vLLM and SGLang fail on longer text"
            )
    ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or [0]
    if max(ids) == target.config.get_text_config().num_hidden_layers:
        warnings.append("SGLang does not capture the output of the last layer")
    if missing := " and ".join(config.shared_with_target or ()):
        warnings.append(f"no {missing} in the file: the engine must lend the target's")
    return warnings
