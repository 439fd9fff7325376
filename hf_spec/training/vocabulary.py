"""Draft vocabularies, which are subsets of the target's, and new drafts that start from the target's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from ..configuration import SpeculatorConfig
from ..drafts.modeling import DraftModel
from .data import check_ids


def count_tokens(dataset: Iterable[dict[str, Any]], vocab_size: int) -> Tensor:
    """Count how often each token is an answer in a prepared ``dataset``, (vocab_size,).

    Errors: a ValueError for tokens that are not in the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in dataset:
        ids, answers = (torch.as_tensor(example[name], dtype=torch.long) for name in ("input_ids", "loss_mask"))
        ids = ids[answers.bool()]
        if len(ids):
            check_ids(int(ids.min()), int(ids.max()), vocab_size)
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the ``size`` most frequent tokens of ``counts`` (vocabulary,), in ascending order; ties take lower ids.

    Errors: a ValueError if the vocabulary is smaller than ``size``.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} tokens cannot be chosen from {len(counts)}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def new_draft(config: SpeculatorConfig, target: PreTrainedModel, token_counts: Tensor | None = None) -> Any:
    """Make an untrained draft of ``target`` with the target's embeddings and output layer as initial weights.

    If the config makes the draft vocabulary smaller than the target's, it gets the most frequent tokens of
    ``token_counts`` (vocabulary,), see ``count_tokens``.

    Errors: a ValueError if counts are missing, or if a draft of another width would keep random embeddings.
    """
    draft: DraftModel = AutoModel.from_config(config, dtype=torch.float32)
    draft.check(target)
    if draft.d2t is not None:
        if token_counts is None:
            raise ValueError(
                f"the draft vocabulary has {len(draft.d2t)} of {config.layers.vocab_size} tokens: pass token_counts, "
                "from count_tokens(dataset, vocab_size), to choose them"
            )
        draft.set_vocabulary(most_frequent(token_counts, len(draft.d2t)))
    embeddings: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    ids = draft.target_ids
    same_width = config.layers.hidden_size == target.config.get_text_config().hidden_size
    with torch.no_grad():
        if draft.embed_tokens is not None and same_width:
            draft.embed_tokens.weight.copy_(embeddings.weight[: config.layers.vocab_size])  # Mllama has more: images
        elif draft.embed_tokens is not None and not any(p.requires_grad for p in draft.embed_tokens.parameters()):
            raise ValueError(
                "a draft of another width than the target must learn its embeddings: embed_requires_grad=True"
            )
        outputs: list[Any] = draft.output_layers if same_width and head is not None else []
        for layer in outputs:
            layer.weight.copy_(head.weight if ids is None else head.weight[ids.to(head.weight.device)])
    return draft
