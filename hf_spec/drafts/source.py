"""The source that an encoder-decoder target reads: what a draft for it may read, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..scoring.architectures import arguments_of
from ..scoring.names import CACHES, OF_ENCODER_DECODER, map_tensors
from ..scoring.plain import input_device, scored_vocabulary
from ..scoring.trials import in_short
from .encoders import shares_encoder

NOT_A_TOKEN = -100  # transformers puts it where the user passes an encoder's states instead of its inputs


@dataclass(frozen=True)
class Source:
    """What one call of an encoder-decoder target reads besides its text.

    ``inputs`` (batch, ...) are what the user passed: token ids, embeddings, sound or images. ``None``: only the
    encoder's states were passed. ``kwargs`` are the other arguments of the call, such as ``attention_mask`` (batch,
    source), and ``encoder_outputs``, which the target's encoder returned.
    """

    inputs: Tensor | None
    kwargs: dict[str, Any]

    @classmethod
    def of_call(cls, inputs: Tensor | None, model_kwargs: dict[str, Any], batch: int) -> Source:
        """Take over what ``generate`` passes to its decoding method; ``inputs`` have one row per returned sequence."""
        if inputs is not None:
            inputs = inputs.repeat_interleave(batch // len(inputs), dim=0)
            if not inputs.is_floating_point() and bool((inputs == NOT_A_TOKEN).all()):
                inputs = None
        left_out = (*CACHES, *OF_ENCODER_DECODER)
        return cls(inputs, {name: value for name, value in model_kwargs.items() if name not in left_out})

    def tokens(self, target: Any) -> list[list[int]] | None:
        """Return the source of each row as numbers, without padding.

        ``None`` if they are not token ids, or if the encoder of ``target`` has other tokens than its text.
        """
        ids, mask = self.inputs, self.kwargs.get("attention_mask")
        if ids is None or ids.ndim != 2 or ids.is_floating_point() or not _has_one_vocabulary(target):
            return None
        seen = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask.to(ids)
        return [[*compress(row, shown)] for row, shown in torch.stack([ids, seen], dim=1).tolist()]

    def why_not_encoded(self, draft: Any = None) -> str | None:
        """Say why the encoder of a ``draft`` cannot read the source; return ``None`` if nothing is known of that."""
        if self.inputs is None:
            return "only the states of the target's encoder were passed; pass its inputs"
        if self.kwargs.get("inputs_embeds") is not None:
            return "the source are embeddings of the target; pass token ids"
        bins, given = getattr(getattr(draft, "config", None), "num_mel_bins", None), self.inputs
        if bins is not None and given.ndim == 3 and given.shape[1] != bins:
            return f"it reads {bins} bins of sound, not {given.shape[1]}; use a draft of the target's generation"
        return None

    def states_for(self, model: Any, target: Any) -> dict[str, Any]:
        """Return the arguments by which the prefill of a draft ``model`` is given the states of an encoder.

        They are those of the encoder of ``target`` if the draft has the same encoder, or none. Errors: a ValueError
        if the draft's own encoder cannot read the source.
        """
        states = {"encoder_outputs": map_tensors(self.kwargs["encoder_outputs"], _moving_to(model))}
        if not model.config.is_encoder_decoder:  # its other arguments are the text's
            return states
        return self._arguments_of(model) | states if shares_encoder(model, target) else self._encoded_by(model)

    def _arguments_of(self, model: Any) -> dict[str, Any]:
        """Return the arguments of the call that the forward of ``model`` takes, but for the encoder's states."""
        known = arguments_of(model)
        given = {name: value for name, value in self.kwargs.items() if name != "encoder_outputs" and name in known}
        return {name: map_tensors(value, _moving_to(model)) for name, value in given.items()}

    @torch.no_grad()
    def _encoded_by(self, model: Any) -> dict[str, Any]:
        """Encode the source by the encoder of ``model``."""
        given = self._arguments_of(model)
        try:
            inputs = map_tensors(self.inputs, _moving_to(model))
            inputs, name, given = model._prepare_model_inputs(inputs, None, given)
            found = model._maybe_prepare_encoder_kwargs_for_generation(inputs, given, name, GenerationConfig())
        except Exception as error:  # of other features, say: more bins of sound than it knows
            raise ValueError(
                f"the draft {type(model).__name__} cannot read the source of this call ({in_short(error)}); use a "
                "draft whose inputs are prepared as the target's are, or 'ngram'."
            ) from error
        return dict(found)


def _has_one_vocabulary(target: Any) -> bool:
    """Tell whether encoder and decoder have the same tokens, as far as sizes and the config say."""
    try:
        table = target.get_encoder().get_input_embeddings()
    except (AttributeError, NotImplementedError):  # an encoder of sound or images
        return False
    shares = getattr(target.config, "share_encoder_decoder_embeddings", True)  # Marian
    return bool(shares) and getattr(table, "num_embeddings", None) == scored_vocabulary(target)


def _moving_to(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the function that moves a tensor to the device of ``model``, and states to its dtype."""
    device, dtype = input_device(model), model.dtype
    return lambda value: value.to(device, dtype if value.is_floating_point() else value.dtype)
