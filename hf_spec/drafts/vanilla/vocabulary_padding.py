"""Translation between vocabularies of a draft and a target that differ in their padding."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...scoring.plain import readable
from ..base import DraftContext


class VocabularyPadding:
    """A translation between the ``vocabulary`` of a request's target and the tokens that the draft ``model`` knows."""

    def __init__(self, model: PreTrainedModel, request: DraftContext) -> None:
        self._request = request
        self.vocabulary, self._known = request.vocabulary, vocabulary_of(model)

    def readable(self, tokens: Tensor, drafted: bool = False) -> Tensor:
        """Replace tokens that the draft does not know by token 0: it then drafts badly, but it can read them.

        ``drafted``: the tokens are the draft's own, and so known if it knows all tokens of the target.
        """
        return tokens if drafted and self._known >= self.vocabulary else readable(tokens, self._known)

    def log_probs(self, logits: Tensor, device: torch.device) -> Tensor:
        """Turn draft logits (..., vocabulary) into log-probabilities over the target's vocabulary."""
        if (missing := self.vocabulary - logits.shape[-1]) != 0:
            logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        # The processors keep tensors where the prompt is, which may be another device than the draft's.
        return self._request.log_probs(logits.to(self._request.input_ids.device)).to(device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of tokens that ``model`` knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
