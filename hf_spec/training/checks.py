"""What is looked at before a draft is saved."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration import Eagle3SpeculatorConfig, MTPSpeculatorConfig
from ..drafts.modeling import DraftModel

logger = logging.get_logger(__name__)


def check_before_saving(draft: Any, target: PreTrainedModel) -> None:
    """Raise a ValueError for weights that no reader accepts, and warn of what some engine cannot serve."""
    broken = [
        name
        for name, tensor in draft.state_dict().items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if broken:
        raise ValueError(
            f"not saved, because weights are not finite: {broken[:4]}. Go back to an earlier checkpoint, with a lower "
            "learning_rate or in bf16 instead of fp16"
        )
    for warning in serving_warnings(draft, target):
        logger.warning_once(warning)


def serving_warnings(draft: Any, target: PreTrainedModel) -> list[str]:
    """Return what other engines do not serve, or serve wrongly, of this draft."""
    if not isinstance(draft, DraftModel):
        return []
    config = draft.config
    if isinstance(config, MTPSpeculatorConfig):
        return ["vLLM serves an MTP layer only within the target's checkpoint: write it there by hf_spec's convert"]
    if not isinstance(config, Eagle3SpeculatorConfig):
        return [f"only hf_spec serves drafts of type {config.speculators_model_type!r}: vLLM and SGLang do not"]
    warnings = []
    have, need = config.layers.max_position_embeddings, target.config.get_text_config().max_position_embeddings
    if have < need:
        warnings.append(f"max_position_embeddings is {have}, the target's {need}: vLLM and SGLang fail on longer text")
    if not config.norm_before_lm_head:
        warnings.append("norm_before_lm_head=False: only hf_spec serves this")
    if config.norm_before_residual:
        warnings.append("norm_before_residual=True: SGLang has no such option and would serve the draft wrongly")
    if config.layers.num_hidden_layers > 1:
        warnings.append("more than one layer: SGLang and vLLM read the later layers differently")
    if config.shared_with_target:
        warnings.append(f"no {' and '.join(config.shared_with_target)} in the file: the engine must lend the target's")
    return warnings
