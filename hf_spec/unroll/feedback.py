"""The training-time test of EAGLE-3 (arXiv 2503.01840): draft from every position of a text at once.

Every position of a text drafts ``steps`` times. It always reads the text's own tokens, from the second step on
together with its own hidden states. It attends to all positions before it as they were at the first step, and to
itself at every step::

    step 0   x1|g0  x2|g1  x3|g2  x4|g3        each attends to all positions to its left, and to itself
    step 1   x2|h0  x3|h1  x4|h2    ·          the same keys as at step 0, and its own of step 1
    step 2   x3|h0' x4|h1'   ·      ·          ... and its own of step 2   (g: features, h: the draft's output)

So a query has causal scores against the keys of the first step, and one score per later step. One softmax merges both,
and no mask of (positions x steps * positions) is ever built. The draft's ``forward`` is the same as in drafting. Only
the attention function that it gets from transformers is replaced meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from ..drafts.base import DraftOutput
from .key_ranges import KeyRange, attend

UNROLL_ATTENTION = "hf_spec_unroll"


@dataclass(frozen=True)
class UnrollInput:
    """The input of training: tokens and document ids (batch, length), features (batch, length, widths).

    ``anchors`` (batch, length) bool mark the roots after which a block draft is to draft a block.
    """

    input_ids: Tensor
    document_ids: Tensor | None
    features: Tensor | None
    anchors: Tensor | None = None


@dataclass(frozen=True)
class Unrolled:
    """The output of a draft in training: position i of step k predicts token i+2+k.

    ``head(step, states)`` turns the ``states`` (batch, length - 1, hidden) of a step into logits; ``trained`` are the
    head's parameters. ``predicted_states`` (batch, length - 1, target hidden) of each step are predictions of the
    target's last hidden state, if the draft makes any. ``confidence(states)`` (...) is the logit of the predicted
    acceptance probability, if the draft has such a head. ``selector(states, logits, labels)`` gives the scores (n,
    candidates) of a draft that chooses among its best tokens, and the place (n,) of the ``labels`` among them.
    """

    states: list[Tensor]
    head: Callable[[int, Tensor], Tensor]
    trained: list[nn.Parameter]
    predicted_states: list[Tensor]
    confidence: Callable[[Tensor], Tensor] | None = None
    selector: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


def unroll_with_feedback(draft: Any, given: UnrollInput, steps: int, recompute: bool) -> Unrolled:
    """Unroll a draft that is fed its own output; ``recompute`` as in ``outputs``."""
    assert given.features is not None  # the trainer reads the layers that the draft names
    documents = None if given.document_ids is None else given.document_ids[:, :-1]
    features = given.features[:, :-1].to(draft.dtype)
    done = outputs(draft, given.input_ids[:, 1:], features, steps, documents, head=False, recompute=recompute)
    return Unrolled(
        [cast(Tensor, output.logits) for output in done],
        lambda step, states: draft.logits(states),
        draft.trained_parameters,
        [cast(Tensor, output.hidden_states) for output in done],
    )


def unroll(
    draft: Any, input_ids: Tensor, features: Tensor, steps: int, document_ids: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the logits (batch, length, draft vocabulary) of each of ``steps`` steps.

    ``input_ids`` (batch, length) and ``features`` (batch, length, widths) are paired as in ``draft.forward``, which is
    one step: ``features[:, i]`` are of the position before ``input_ids[:, i]``. Position i of step k has read
    ``input_ids[:, : i + 1]`` with features, and the next k tokens with its own output. ``document_ids`` (batch,
    length) are equal within a packed document. A position attends to its own document only; its logits at step k mean
    nothing if its next k tokens are of another one. Gradients flow through all steps.

    Errors: a ValueError for shapes that do not fit.
    """
    return tuple(cast(Tensor, output.logits) for output in outputs(draft, input_ids, features, steps, document_ids))


def outputs(
    draft: Any,
    input_ids: Tensor,
    features: Tensor,
    steps: int,
    document_ids: Tensor | None = None,
    head: bool = True,
    recompute: bool = False,
) -> list[DraftOutput]:
    """Unroll as ``unroll`` does, but return everything.

    Without ``head``, the logits are the head's input, (batch, length, hidden). ``recompute`` keeps only the inputs and
    outputs of a step, and runs it again for the gradient.
    """
    _check(input_ids, features, steps, document_ids)
    position_ids = positions(input_ids, document_ids)
    stack = _Stack(position_ids, wants_flex(draft, input_ids))
    done: list[DraftOutput] = []

    def step(count: int, features: Tensor | None, hidden_states: Tensor | None) -> DraftOutput:
        tokens = input_ids.roll(-count, dims=1)
        return _step(draft, stack, count, head, tokens, features=features, hidden_states=hidden_states)

    for count in range(steps):
        states = (None, done[-1].hidden_states) if done else (features, None)
        done.append(checkpoint(step, count, *states, use_reentrant=False) if recompute else step(count, *states))
    return done


def _step(draft: Any, stack: _Stack, count: int, head: bool, tokens: Tensor, **states: Tensor | None) -> DraftOutput:
    """Run step ``count`` over all positions at once."""
    forward = type(draft).forward  # taken from the class: the instance's may be wrapped by whoever trains it
    with replaced_attention(draft, head):
        output = forward(
            draft,
            tokens,
            position_ids=stack.position_ids + count,
            attention_mask=stack.sights(draft.config.layers, count),
            **states,
        )
    return cast(DraftOutput, output)


def unroll_in_parallel(draft: Any, given: UnrollInput, steps: int, recompute: bool) -> Unrolled:
    """Unroll a draft whose later steps read mask tokens and ``mask_hidden``, and nothing of its own output."""
    assert given.features is not None  # the trainer reads the layers that the draft names
    documents = None if given.document_ids is None else given.document_ids[:, :-1]
    tokens, features = given.input_ids[:, 1:], given.features[:, :-1].to(draft.dtype)
    stack, states = _Stack(positions(tokens, documents), wants_flex(draft, tokens)), []
    masks = torch.full_like(tokens, draft.config.mask_token_id)

    def step(count: int, features: Tensor) -> Tensor:
        output = _step(draft, stack, count, False, masks if count else tokens, features=features)
        return cast(Tensor, output.logits)

    for count in range(steps):
        given_features = draft.mask_hidden.to(features).expand_as(features) if count else features
        args = count, given_features
        states.append(checkpoint(step, *args, use_reentrant=False) if recompute else step(*args))
    return Unrolled(states, lambda step, states: draft.logits(states), draft.trained_parameters, [])


def positions(input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Count from 0 in every document, (batch, length) -> (batch, length)."""
    here = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if document_ids is None:
        return here
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return here - torch.where(first, here, 0).cummax(dim=1).values


def _check(input_ids: Tensor, features: Tensor, steps: int, document_ids: Tensor | None) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}; unroll at least one")
    if features.shape[:-1] != input_ids.shape:
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)} but features {tuple(features.shape)}: give one feature per "
            "token, that of the position before it (input_ids[:, 1:] with features[:, :-1])"
        )
    if document_ids is not None and document_ids.shape != input_ids.shape:
        raise ValueError(f"document_ids are {tuple(document_ids.shape)}, input_ids {tuple(input_ids.shape)}")


def wants_flex(draft: Any, input_ids: Tensor) -> bool:
    """Tell whether to attend by FlexAttention: on accelerators, unless the draft is told to be eager."""
    wanted = draft.config.layers._attn_implementation
    if input_ids.is_cuda:
        return bool(wanted != "eager")
    return bool(wanted == "flex_attention") and not torch.is_grad_enabled()  # it has gradients on accelerators only


@contextlib.contextmanager
def replaced_attention(draft: Any, head: bool, attention: str = UNROLL_ATTENTION) -> Iterator[None]:
    """Replace the draft's attention function meanwhile, and without ``head`` skip its head."""
    layers, before = draft.config.layers, draft.config.layers._attn_implementation
    layers._attn_implementation = attention
    if not head:
        draft.logits = lambda hidden: hidden
    try:
        yield
    finally:
        layers._attn_implementation = before
        if not head:
            del draft.logits


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass
class _Sight:
    """A stand-in for the attention mask of one step and kind of layer.

    ``key_range`` are the keys of the first step; ``None`` once a sliding window has moved past them. ``own_steps`` are
    the later steps at which a position attends to itself.
    """

    stack: _Stack
    step: int
    key_range: KeyRange | None
    own_steps: range


@dataclass
class _Stack:
    """The keys and values (batch, key heads, positions, head size) of every layer and step."""

    position_ids: Tensor
    flex: bool
    entries: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> KeyRange:
        here = torch.arange(self.position_ids.shape[1], device=self.position_ids.device)
        return KeyRange(here - self.position_ids, (here + 1).expand_as(self.position_ids))

    def sights(self, layers: Any, step: int) -> dict[str, _Sight]:
        """Return the stand-ins for attention masks at ``step``, by kind of layer."""
        sights = {"full_attention": _Sight(self, step, self.whole, range(1, step + 1))}
        if "sliding_attention" in (getattr(layers, "layer_types", None) or ()):
            # At step k a position is k tokens further on, and its window has moved with it.
            moved = step - layers.sliding_window + 1
            here = torch.arange(self.position_ids.shape[1], device=self.position_ids.device)
            key_range = KeyRange(self.whole.first.maximum(here + moved), self.whole.end) if moved <= 0 else None
            sights["sliding_attention"] = _Sight(self, step, key_range, range(max(1, moved), step + 1))
        return sights


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Sight, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``_Sight`` says; query (batch, heads, positions, size) -> (batch, positions, heads, size)."""
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
        raise ValueError("layers that cap their scores or have attention sinks cannot be unrolled; take llama layers")
    sight, layer = attention_mask, cast(int, module.layer_idx)
    sight.stack.entries[layer, sight.step] = key, value
    grouped = query.unflatten(1, (key.shape[1], -1)) * scaling  # (batch, key heads, group, positions, size)
    scores, values = [], []  # one entry for all keys of the first step, then one per later step
    if sight.key_range is not None:
        attended, logsumexp = attend(grouped, *sight.stack.entries[layer, 0], sight.key_range, sight.stack.flex)
        scores, values = [logsumexp], [attended.float()]
    for step in sight.own_steps:
        own_key, own_value = sight.stack.entries[layer, step]
        scores.append((grouped * own_key[:, :, None]).sum(-1, dtype=torch.float32))
        values.append(own_value[:, :, None].float())
    shares = torch.stack(scores).softmax(0)[..., None]  # (1 + own steps, batch, key heads, group, positions, 1)
    merged = sum(share * state for share, state in zip(shares, values, strict=True))
    return cast(Tensor, merged).to(query.dtype).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(UNROLL_ATTENTION, _attend)
