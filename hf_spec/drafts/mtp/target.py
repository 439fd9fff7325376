"""Multi-token-prediction layers (arXiv 2404.19737, 2412.19437): a decoder layer over the target's state.

A layer reads a token together with the target's hidden state of the position before, both normed and projected. It
predicts the token after it with the target's head. It was trained for one token, or for as many as there are layers;
fed its own output it goes on from there::

    token ─ embed ─ norm ─┐
                          ├─ projection ─ decoder layer ─ norm ─ target's head
    state ───────── norm ─┘                             └──┴── fed back

``TargetMtp`` runs the layers that transformers loads for a target, ``MTPDraftModel`` one of any origin.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import MtpModel

from ...scoring.architectures import why_unsupported
from ...scoring.cache import has_states
from ...scoring.names import CACHE
from ...scoring.plain import input_device
from ...settings import SpeculationConfig
from ..autoregressive import AutoregressiveDrafter
from ..base import DraftContext, Drafter, DraftOutput, Speculator
from ..modeling import MASKS, next_positions, only_one
from ..static import not_compiled

# Families whose last layer feeds itself what it gives before its last norm (as vLLM 0.33 does); others, after it.
FED_BEFORE_NORM = ("glm4_moe",)

SCALES = ("weight_scale", "weight_scale_inv")  # of weights in eight or four bits

# The mask of the running forward, on its way past transformers to where masks are made; every thread has its own.
_padding: ContextVar[Tensor | None] = ContextVar("hf_spec_mtp_padding", default=None)


class TargetMtp(MtpModel, Speculator):
    """A draft of a target's own MTP layers, as transformers reads them from the target's checkpoint."""

    feeds_normed: bool

    def __init__(self, target: PreTrainedModel, num_mtp_layers: int) -> None:
        super().__init__(target, num_mtp_layers)
        self.feeds_normed = self.config.model_type not in FED_BEFORE_NORM
        for layer in cast(Any, self.layers):
            layer.use_post_norm = False  # applied below: what is fed back may need to pass it by

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetMtp:
        """Read the MTP layers of ``target`` from where it was loaded from; a ValueError says why it cannot."""
        config = target.config.get_text_config(decoder=True)
        if not getattr(config, "num_mtp_layers", None):
            raise ValueError(
                f"{type(target).__name__} has no multi-token-prediction layers (num_mtp_layers is not set in its "
                "config); use another speculator, for example 'ngram'"
            )
        try:
            cache = DynamicCache(config=config.get_mtp_config())
        except ValueError as error:
            raise ValueError(
                f"the config of {type(target).__name__} counts MTP layers but does not say what they are ({error}); "
                "complete its config.json, or use another speculator"
            ) from error
        if has_states(cache):
            raise ValueError(
                f"the MTP layers of {type(target).__name__} keep recurrent states, and draft tokens spoil them; use "
                "another speculator, for example 'ngram'"
            )
        if (reason := why_unsupported(target, cache)) is not None:
            raise ValueError(f"the MTP layers of {type(target).__name__} cannot be a draft: {reason}")
        device = next(target.get_decoder().layers[-1].parameters()).device
        if device.type == "meta":  # offloaded
            device = input_device(target)
        try:
            draft: Any = cls.from_pretrained(target, device_map={"": device})
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"the MTP layers of {type(target).__name__} are not in {target.name_or_path or 'any checkpoint'!r}, "
                f"which it was loaded from ({error}); use a checkpoint that has them, or another speculator"
            ) from error
        return cast(TargetMtp, draft.eval())

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Refuse what transformers would read without its scales: a hook of ``from_pretrained``."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if left := [key for key in loading_info.unexpected_keys if key.endswith(SCALES)]:
            raise ValueError(
                f"{min(left)} is part of MTP layers that are stored quantised, and transformers reads them without "
                "it; take a checkpoint that is not quantised, or another speculator, for example 'ngram'"
            )

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """Recognise MTP layers after any number of decoder layers: transformers knows those of published sizes."""
        config = main_model.config.get_text_config(decoder=True)
        first = config.num_hidden_layers
        patterns = list(getattr(main_model, "_keys_to_ignore_on_load_unexpected", None) or ())
        patterns = [pattern for pattern in patterns if not re.search(r"layers\\?\.\d", pattern)]
        numbers = "|".join(str(first + i) for i in range(config.num_mtp_layers))
        return re.compile("|".join([*(f"({pattern})" for pattern in patterns), rf"(\blayers\.({numbers})\.)"]))

    @property
    def layer_config(self) -> PreTrainedConfig:
        """Return the config that the layers, their masks and their cache are made from."""
        return self.config

    @property
    def num_modules(self) -> int:
        """Count the layers."""
        return len(self.layers)

    def forward(  # type: ignore[override]  # called as every draft is
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
        module: int = 0,
    ) -> DraftOutput:
        """Take one step of layer ``module``, as ``EagleDraftModel.forward``."""
        position_ids = next_positions(input_ids, past_key_values) if position_ids is None else position_ids
        state = only_one(features, hidden_states)
        token = _padding.set(attention_mask)
        try:
            hidden = self.forward_layer(module, state, position_ids, cast(Any, past_key_values), input_ids=input_ids)
        finally:
            _padding.reset(token)
        norm = cast(Any, self.layers[module]).post_norm
        normed = hidden if norm is None else norm(hidden)  # (batch, length, hidden)
        logits = self._project_to_logits(normed[:, -logits_to_keep:]).to(normed.device)  # a head may lie elsewhere
        # The next layer is fed the normed state in every family, as transformers does.
        feeds_normed = self.feeds_normed or module + 1 < self.num_modules
        return DraftOutput(logits, normed if feeds_normed else hidden, past_key_values)

    def create_masks_for_mtp_layer(
        self, layer_idx: int, inputs_embeds: Tensor, mtp_cache: Any, position_ids: Tensor
    ) -> dict[str, Any]:
        """Mask as transformers does, and the padding too, which it never has."""
        config = self.config.per_layer_config[layer_idx] if self.config.is_heterogeneous else self.config
        kinds = getattr(self.config, "layer_types", None)
        mask = MASKS[kinds[layer_idx] if kinds else "full_attention"](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=_padding.get(),
            position_ids=position_ids,
            layer_idx=layer_idx,
            **{CACHE: mtp_cache},
        )
        return {"attention_mask": mask}

    def over_target(self, logits: Tensor) -> Tensor:
        """Return ``logits``, which are over the target's vocabulary."""
        return logits

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        if target.get_input_embeddings() is not self.embed_tokens:
            raise ValueError("these MTP layers belong to another target; pass speculator='mtp'")

    def defaults(self) -> SpeculationConfig:
        """Return chains of two tokens more than there are layers."""
        return SpeculationConfig(num_speculative_tokens=2 + len(self.layers))

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether chains end where ``DraftContext.keep_drafting`` says so: on a CPU, where looking is free."""
        return self.device.type == "cpu"

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Read ``hidden_states[-1]``, the one after the final norm."""
        return (-1,)

    def drafter(self, request: DraftContext) -> Drafter:
        if request.compiler is not None:
            not_compiled(self, "transformers makes the masks of a target's own MTP layers inside their forward")
        return AutoregressiveDrafter(self, request)


# Names in checkpoints are translated by the name of the class.
register_checkpoint_conversion_mapping(
    TargetMtp.__name__, get_checkpoint_conversion_mapping(MtpModel.__name__), overwrite=True
)
