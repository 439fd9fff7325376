"""Vocabularies of a draft and a target that differ in their padding."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...scoring.plain import readable
from ..base import DraftContext


class Words:
    """Translate between the ``vocabulary`` of a request's target and what the draft ``model`` knows of it."""

    def __init__(self, model: PreTrainedModel, request: DraftContext) -> None:
        self._request = request
        self.vocabulary, self._known = request.vocabulary, vocabulary_of(model)

    def readable(self, tokens: Tensor, drafted: bool = False) -> Tensor:
        """Put token 0 for those that the draft does not know: it then guesses badly, but it can read.

        Of the target, or of a prompt; what the draft itself has ``drafted`` is known if the target's tokens are.
        """
        return tokens if drafted and self._known >= self.vocabulary else readable(tokens, self._known)

    def log_probs(self, logits: Tensor, device: torch.device) -> Tensor:
        """Turn draft logits (..., vocabulary) into the log-probabilities of guesses over the target's vocabulary."""
        if (missing := self.vocabulary - logits.shape[-1]) != 0:
            logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        # The processors keep tensors where the prompt is, which may be another device than the draft's.
        return self._request.log_probs(logits.to(self._request.input_ids.device)).to(device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many tokens ``model`` guesses among."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
