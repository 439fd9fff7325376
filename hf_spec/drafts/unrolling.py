"""The training-time test of EAGLE-3 (arXiv 2503.01840): draft from every position of a text at once.

Every position of a text drafts ``steps`` times. It reads the text's own tokens, but from the second step on beside its
own hidden states. It attends to all positions before it as they were at the first step, and to itself at every step::

    step 0   x1|g0  x2|g1  x3|g2  x4|g3        each attends to all positions to its left, and to itself
    step 1   x2|h0  x3|h1  x4|h2    ·          the same keys as at step 0, and its own of step 1
    step 2   x3|h0' x4|h1'   ·      ·          ... and its own of step 2   (g: features, h: the draft's output)

So a query has causal scores against the keys of the first step, and one score per later step. One softmax merges both,
and no mask of (positions x steps * positions) is ever built. The draft's ``forward`` is the one that drafts; only the
attention function that it asks transformers for is replaced meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .modeling import DraftModel, DraftOutput

ATTENTION = "hf_spec_unroll"
BLOCK = 128  # positions whose scores are held at once where there is no FlexAttention


@dataclass(frozen=True)
class UnrollInput:
    """Hold what a draft is trained on: tokens and documents (batch, length), features (batch, length, widths)."""

    input_ids: Tensor
    document_ids: Tensor | None
    features: Tensor | None


@dataclass(frozen=True)
class Unrolled:
    """Hold what a draft made of its input: position i of step k guesses token i+2+k.

    ``states`` (batch, length - 1, hidden) of each step are what ``head(step, states)`` turns into logits, ``trained``
    the head's parameters. ``guesses`` (batch, length - 1, target hidden) are the draft's guesses at the target's last
    hidden state, if it makes any.
    """

    states: list[Tensor]
    head: Callable[[int, Tensor], Tensor]
    trained: list[nn.Parameter]
    guesses: list[Tensor]


def unroll_with_feedback(draft: DraftModel, given: UnrollInput, steps: int, recompute: bool) -> Unrolled:
    """Unroll a draft that is fed its own output; ``recompute`` as in ``outputs``."""
    assert given.features is not None  # the trainer reads the layers that the draft names
    documents = None if given.document_ids is None else given.document_ids[:, :-1]
    features = given.features[:, :-1].to(draft.dtype)
    done = outputs(draft, given.input_ids[:, 1:], features, steps, documents, head=False, recompute=recompute)
    trained = [parameter for layer in draft.output_layers for parameter in layer.parameters()]
    return Unrolled(
        [cast(Tensor, output.logits) for output in done],
        lambda step, states: draft.logits(states),
        trained,
        [cast(Tensor, output.hidden_states) for output in done],
    )


def unroll(
    draft: DraftModel, input_ids: Tensor, features: Tensor, steps: int, document_ids: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the logits (batch, length, draft vocabulary) of each of ``steps`` steps.

    ``input_ids`` (batch, length) and ``features`` (batch, length, widths) stand side by side as in ``draft.forward``:
    ``features[:, i]`` of the position before ``input_ids[:, i]``, so that one step is that forward. Position i of
    step k has read ``input_ids[:, : i + 1]`` beside features and the next k tokens beside its own output. With packed
    documents (``document_ids``, (batch, length), equal where they belong together), a position attends to its own
    document only, and its logits at step k mean nothing if its next k tokens are of another one. Gradients flow
    through all steps.

    Errors: a ValueError for shapes that do not fit.
    """
    return tuple(cast(Tensor, output.logits) for output in outputs(draft, input_ids, features, steps, document_ids))


def outputs(
    draft: DraftModel,
    input_ids: Tensor,
    features: Tensor,
    steps: int,
    document_ids: Tensor | None = None,
    head: bool = True,
    recompute: bool = False,
) -> list[DraftOutput]:
    """Unroll as ``unroll`` does, but return everything.

    Without ``head`` the logits are what the head would read, (batch, length, hidden). ``recompute`` keeps of a step
    only what it is given and what it gives, and runs it again for the gradient.
    """
    _check(input_ids, features, steps, document_ids)
    position_ids = positions(input_ids, document_ids)
    stack = _Stack(position_ids, _wants_flex(draft, input_ids))
    done: list[DraftOutput] = []
    # Taken from the class: the instance's may be wrapped by whoever trains it.
    forward = type(draft).forward

    def step(count: int, features: Tensor | None, hidden_states: Tensor | None) -> DraftOutput:
        with _unrolling(draft, head):
            output = forward(
                draft,
                input_ids.roll(-count, dims=1),
                features=features,
                hidden_states=hidden_states,
                position_ids=position_ids + count,
                attention_mask=stack.sights(draft.config.layers, count),
            )
        return cast("DraftOutput", output)

    for count in range(steps):
        beside = (None, done[-1].hidden_states) if done else (features, None)
        done.append(checkpoint(step, count, *beside, use_reentrant=False) if recompute else step(count, *beside))
    return done


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
            "token, that of the position before it (input_ids[:, 1:] beside features[:, :-1])"
        )
    if document_ids is not None and document_ids.shape != input_ids.shape:
        raise ValueError(f"document_ids are {tuple(document_ids.shape)}, input_ids {tuple(input_ids.shape)}")


def _wants_flex(draft: DraftModel, input_ids: Tensor) -> bool:
    wanted = draft.config.layers._attn_implementation
    if input_ids.is_cuda:
        return bool(wanted != "eager")
    return bool(wanted == "flex_attention") and not torch.is_grad_enabled()  # no gradients but on accelerators


@contextlib.contextmanager
def _unrolling(draft: DraftModel, head: bool) -> Iterator[None]:
    """Let the draft attend by ``_attend``, and do without its head if need be."""
    layers, before = draft.config.layers, draft.config.layers._attn_implementation
    layers._attn_implementation = ATTENTION
    if not head:
        draft.logits = lambda hidden: hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        layers._attn_implementation = before
        if not head:
            del draft.logits


# -- attention --------------------------------------------------------------------------------------------------------


class _Reach:
    """Say what each position attends to at the first step: all from ``first`` (batch, positions) up to itself."""

    def __init__(self, first: Tensor) -> None:
        self.first = first

    @cached_property
    def blocks(self) -> list[tuple[slice, slice]]:
        """Return blocks of queries, and the keys of the first step to which any query of a block attends."""
        blocks, end = [], 0
        for first in self.first.split(BLOCK, dim=1):
            start, end = end, end + first.shape[1]
            blocks.append((slice(start, end), slice(max(0, int(first.min())), end)))
        return blocks

    @cached_property
    def mask(self) -> BlockMask:
        """Return the same for FlexAttention."""
        first, (batch, length), device = self.first, self.first.shape, self.first.device

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= first[row, query])

        return create_block_mask(seen, batch, None, length, length, device=device, _compile=first.is_cuda)


@dataclass
class _Sight:
    """Stand for the attention mask of one step and kind of layer.

    ``reach`` is ``None`` once a sliding window has left the first step behind; ``own_steps`` are the later steps at
    which a position attends to itself.
    """

    stack: _Stack
    step: int
    reach: _Reach | None
    own_steps: range


@dataclass
class _Stack:
    """Keep the keys and values (batch, key heads, positions, head size) of every layer and step."""

    position_ids: Tensor
    flex: bool
    entries: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> _Reach:
        return _Reach(torch.arange(self.position_ids.shape[1], device=self.position_ids.device) - self.position_ids)

    def sights(self, layers: Any, step: int) -> dict[str, _Sight]:
        """Return what stands for an attention mask at ``step``, by kind of layer."""
        sights = {"full_attention": _Sight(self, step, self.whole, range(1, step + 1))}
        if "sliding_attention" in (getattr(layers, "layer_types", None) or ()):
            # At step k a position stands k tokens further on, and its window has moved with it.
            behind = step - layers.sliding_window + 1
            here = torch.arange(self.position_ids.shape[1], device=self.position_ids.device)
            reach = _Reach(self.whole.first.maximum(here + behind)) if behind <= 0 else None
            sights["sliding_attention"] = _Sight(self, step, reach, range(max(1, behind), step + 1))
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
    scores, values = [], []
    if sight.reach is not None:
        over_first_step = _flex if sight.stack.flex else cast(Any, _ByBlocks.apply)
        attended, logsumexp = over_first_step(grouped, *sight.stack.entries[layer, 0], sight.reach)
        scores, values = [logsumexp], [attended.float()]
    for step in sight.own_steps:
        own_key, own_value = sight.stack.entries[layer, step]
        scores.append((grouped * own_key[:, :, None]).sum(-1, dtype=torch.float32))
        values.append(own_value[:, :, None].float())
    shares = torch.stack(scores).softmax(0)[..., None]  # (1 + own steps, batch, key heads, group, positions, 1)
    merged = sum(share * state for share, state in zip(shares, values, strict=True))
    return cast(Tensor, merged).to(query.dtype).flatten(1, 2).transpose(1, 2), None


class _ByBlocks(torch.autograd.Function):
    """Attend to the first step, a block of queries at a time; the gradient works scores out again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: _Reach) -> tuple[Tensor, Tensor]:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])  # values may be narrower than keys
        logsumexp = torch.empty(query.shape[:-1], device=query.device)
        for block, seen in reach.blocks:
            scores = _scores(query[..., block, :], key[:, :, seen], reach.first[:, block] - seen.start)
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            mixed = weights.div_(total).flatten(2, 3).to(value.dtype) @ value[:, :, seen]
            attended[..., block, :] = mixed.view_as(attended[..., block, :])
            logsumexp[..., block] = (top + total.log())[..., 0]
        ctx.save_for_backward(query, key, value, attended, logsumexp)
        ctx.reach = reach
        return attended, logsumexp

    @staticmethod
    def backward(ctx: Any, of_attended: Tensor, of_logsumexp: Tensor) -> Any:
        """Return the gradients of query Q, key K and value V.

        With the weights P = exp(Q Kᵀ - LSE), the outputs O = P V and LSE, and their gradients dO and dLSE::

            dV = Pᵀ dO
            dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O) + dLSE)        S: the scores Q Kᵀ
            dQ = dS K,  dK = dSᵀ Q
        """
        query, key, value, attended, logsumexp = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        offset = of_logsumexp - (of_attended * attended).sum(-1, dtype=torch.float32)  # dLSE - rowsum(dO ∘ O)
        for block, seen in ctx.reach.blocks:
            asked = query[..., block, :]
            scores = _scores(asked, key[:, :, seen], ctx.reach.first[:, block] - seen.start)
            weights = scores.sub_(logsumexp[..., block, None]).exp_()  # P, (batch, key heads, group, block, seen)
            gradient = of_attended[..., block, :].flatten(2, 3).to(value.dtype)  # dO, (batch, key heads, -1, size)
            of_value[:, :, seen] += weights.flatten(2, 3).to(value.dtype).mT @ gradient
            of_weights = (gradient @ value[:, :, seen].mT).float().view_as(weights)  # dO Vᵀ
            of_scores = of_weights.add_(offset[..., block, None]).mul_(weights).flatten(2, 3).to(key.dtype)
            of_query[..., block, :] = (of_scores @ key[:, :, seen]).view_as(asked)
            of_key[:, :, seen] += of_scores.mT @ asked.flatten(2, 3).to(key.dtype)
        return of_query, of_key, of_value, None


def _scores(query: Tensor, key: Tensor, first: Tensor) -> Tensor:
    """Score queries, which are the last of the keys' positions, in float32.

    ``first`` (batch, queries) is the first key that each one attends to.
    """
    (group, queries), keys = query.shape[2:4], key.shape[2]
    scores: Tensor = (query.flatten(2, 3) @ key.mT).unflatten(2, (group, queries))  # (batch, heads, group, ·, keys)
    place = torch.arange(keys, device=key.device)
    hidden = (place > place[keys - queries :, None]) | (place < first[:, :, None])  # (batch, queries, keys)
    return scores.float().masked_fill_(hidden[:, None, None], -torch.inf)


def _flex(query: Tensor, key: Tensor, value: Tensor, reach: _Reach) -> tuple[Tensor, Tensor]:
    """Attend to the first step by FlexAttention, compiled where there is a kernel for it."""
    function = _compiled_flex() if query.is_cuda else flex_attention
    attended, aux = function(
        query.flatten(1, 2),
        key,
        value,
        block_mask=reach.mask,
        scale=1.0,
        enable_gqa=query.shape[2] > 1,
        return_aux=AuxRequest(lse=True),
    )
    shape = (key.shape[1], -1)
    return attended.unflatten(1, shape), aux.lse.unflatten(1, shape)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


AttentionInterface.register(ATTENTION, _attend)
