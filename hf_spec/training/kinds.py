"""How each kind of draft is unrolled over a text. A new kind registers one function here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafts.eagle.modeling import EagleDraftModel
from ..drafts.eagle3.modeling import Eagle3DraftModel
from ..drafts.medusa.modeling import MedusaDraftModel
from ..drafts.modeling import DraftModel
from ..drafts.mtp.modeling import MTPDraftModel
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
@unrolled.register(MTPDraftModel)
def _(draft: DraftModel, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    assert text.features is not None  # the trainer reads the layers that the draft names
    documents = None if text.document_ids is None else text.document_ids[:, :-1]
    features = text.features[:, :-1].to(draft.dtype)
    done = outputs(draft, text.input_ids[:, 1:], features, steps, documents, head=False, recompute=recompute)
    trained = [parameter for layer in draft.output_layers for parameter in layer.parameters()]
    # What stands in for the state before the target's last norm is no guess at the one after it.
    guessed = done if getattr(draft.config, "features_after_norm", True) else []
    guesses = [cast(Tensor, output.hidden_states) for output in guessed]
    return Unrolled(
        [cast(Tensor, output.logits) for output in done], lambda step, states: draft.logits(states), trained, guesses
    )


@unrolled.register(MedusaDraftModel)
def _(draft: Any, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    """Let every head read the same states: head k is step k, and nothing is fed back."""
    assert text.features is not None
    features = text.features[:, :-1].to(draft.dtype)
    if layers := draft.output_layers:
        states = [head[:-1](features) for head in draft.heads]
        trained = [parameter for layer in layers for parameter in layer.parameters()]
        return Unrolled(states, lambda step, states: layers[step](states), trained, [])
    return Unrolled([head(features) for head in draft.heads], lambda step, states: draft.logits(states), [], [])


@unrolled.register(PreTrainedModel)
def _(draft: Any, text: Text, steps: int, recompute: bool = False) -> Unrolled:
    """Let a language model of its own say at every position what comes next: it needs no later steps."""
    reader = Reader(draft)
    _, hidden = reader.read(text.input_ids, text.document_ids)
    trained = list(
        type(draft).get_output_embeddings(draft).parameters()
    )  # the draft's own may be hidden, see sharding
    return Unrolled([hidden[:, 1:]], lambda step, states: reader.logits(states), trained, [])


def count_steps(draft: Any, wanted: int) -> int:
    """Return how many steps of ``draft`` are taught if ``wanted`` are asked for."""
    if isinstance(draft, MedusaDraftModel):
        return len(draft.heads)
    return wanted if isinstance(draft, DraftModel) else 1
