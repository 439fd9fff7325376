"""Unrolling of a draft of any kind, also a smaller language model, over the texts it is trained on."""

from __future__ import annotations

from typing import Any

from ..drafts.modeling import DraftModel
from ..unroll.feedback import Unrolled, UnrollInput
from .teacher import Reader


def unrolled(draft: Any, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
    """Unroll ``draft``, a ``DraftModel`` or a causal language model, for ``steps`` steps; see ``DraftModel.unroll``.

    A language model predicts the next token at every position, so one step is enough for it.
    """
    if isinstance(draft, DraftModel):
        return draft.unroll(given, steps, recompute)
    reader = Reader(draft)
    _, hidden = reader.read(given.input_ids, given.document_ids)
    head = type(draft).get_output_embeddings(draft)  # by the class: sharding overrides the instance's method
    return Unrolled([hidden[:, 1:]], lambda step, states: reader.logits(states), list(head.parameters()), [])


def count_steps(draft: Any, wanted: int) -> int:
    """Return how many steps of ``draft`` are trained if ``wanted`` are asked for."""
    return draft.unroll_steps(wanted) if isinstance(draft, DraftModel) else 1
