"""How each kind of draft is unrolled over a text. A new kind registers one function here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafts.eagle import EagleDraftModel
from ..drafts.eagle3 import Eagle3DraftModel
from ..drafts.modeling import DraftModel
from .teacher import Reader
from .unrolling import outputs


@dataclass(frozen=True)
class Text:
    """Hold what a draft is taught on: tokens and documents (batch, length), features (batch, length, widths)."""

    input_ids: Tensor
    document_ids: Tensor | None
    features: Tensor | None


@dataclass(frozen=True)
class Unrolled:
    """Hold what a draft made of a text: row i of step k guesses token i+2+k.

    ``states`` (batch, length - 1, hidden) of each step are what ``head(step, states)`` turns into logits, ``trained``
    the head's parameters. ``guesses`` (batch, length - 1, target hidden) are the draft's guesses at the target's last
    hidden state, if it makes any.
    """

    states: list[Tensor]
    head: Callable[[int, Tensor], Tensor]
    trained: list[nn.Parameter]
    guesses: list[Tensor]


@singledispatch
def unrolled(draft: Any, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    """Unroll ``draft`` for ``steps`` steps; a TypeError for a kind that cannot be trained."""
    raise TypeError(f"{type(draft).__name__} is no draft that can be trained: pass a DraftModel or a causal LM")


@unrolled.register(Eagle3DraftModel)
@unrolled.register(EagleDraftModel)
def _(draft: DraftModel, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    assert text.features is not None  # the trainer reads the layers that the draft names
    documents = None if text.document_ids is None else text.document_ids[:, :-1]
    features = text.features[:, :-1].to(draft.dtype)
    done = outputs(draft, text.input_ids[:, 1:], features, steps, documents, head=False, recompute=recompute)
    trained = [] if draft.lm_head is None else list(draft.lm_head.parameters())
    guesses = [cast(Tensor, output.hidden_states) for output in done]
    return Unrolled(
        [cast(Tensor, output.logits) for output in done], lambda step, states: draft.logits(states), trained, guesses
    )


@unrolled.register(PreTrainedModel)
def _(draft: Any, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    """Let a language model of its own say at every position what comes next: it needs no later steps."""
    reader = Reader(draft)
    _, hidden = reader.read(text.input_ids, text.document_ids)
    trained = list(draft.get_output_embeddings().parameters())
    return Unrolled([hidden[:, 1:]], lambda step, states: reader.logits(states), trained, [])


def count_steps(draft: Any, wanted: int) -> int:
    """Return how many steps of ``draft`` are taught if ``wanted`` are asked for."""
    return wanted if isinstance(draft, DraftModel) else 1
