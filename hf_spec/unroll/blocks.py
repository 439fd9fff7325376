"""Training forward of block drafts: blocks after many roots of a text at once.

The slots of a block see the text before their root, and each other, as in drafting. Blocks do not see each other. Each
slot attends to a range of the text's keys, and to its own block by a small matrix. One softmax merges both, so no mask
of slots x text is ever built::

    text     g0  g1  g2  g3  g4  g5         block of root 2: sees g0 g1 and its own slots
    blocks           2·········             block of root 4: sees g0 g1 g2 g3 and its own slots
                             4·········
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from ..drafts.base import DraftOutput
from .feedback import UnrollInput, positions, replaced_attention, wants_flex
from .key_ranges import KeyRange, attend

BLOCK_ATTENTION = "hf_spec_unroll_blocks"


class _Context:
    """A stand-in for a cache that keeps the text's keys and values, which come first, and drops those of blocks."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the first keys and values (batch, key heads, length, size) of a layer; return all as they are."""
        self.entries.setdefault(layer, (keys, values))
        return keys, values


@dataclass
class _Sight:
    """A stand-in for the attention mask of one kind of layer: keys of the text per slot, and a mask within a block."""

    context: _Context
    key_range: KeyRange  # over (batch, blocks x slots) queries
    own: Tensor  # (slots, slots) bool
    flex: bool


def unroll_blocks(draft: Any, given: UnrollInput, recompute: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block after each anchor: roots (batch, blocks), states (batch, blocks, slots, hidden), and which count.

    The roots are indices into the text. Rows with fewer anchors are padded with blocks that do not count, (batch,
    blocks) bool. The states are what the draft's heads read. ``recompute`` computes them again for the gradient.
    """
    assert given.features is not None  # the trainer reads the layers that the draft names
    roots, counted = _roots(given)
    place = positions(given.input_ids, given.document_ids)
    start = (torch.arange(place.shape[1], device=place.device) - place).gather(1, roots)  # of the root's document
    fused, context = draft.fuse(given.features.to(draft.dtype)), _Context()
    draft.write_context(fused, draft.rotary_emb(fused, place), context)
    sights = _sights(draft, context, roots, start, wants_flex(draft, given.input_ids))
    forward = type(draft).forward  # taken from the class: the instance's may be wrapped by whoever trains it

    def draft_blocks() -> Tensor:
        with replaced_attention(draft, False, BLOCK_ATTENTION):
            output: DraftOutput = forward(
                draft,
                given.input_ids.gather(1, roots),
                position_ids=place.gather(1, roots),
                attention_mask=sights,
                past_key_values=cast(Any, context),
            )
        return cast(Tensor, output.hidden_states)

    hidden: Tensor = checkpoint(draft_blocks, use_reentrant=False) if recompute else draft_blocks()
    return roots, hidden.unflatten(1, (roots.shape[1], -1)), counted


def _roots(given: UnrollInput) -> tuple[Tensor, Tensor]:
    """List the anchors of each row in order, and which of them are no padding: (batch, blocks) both."""
    batch, length = given.input_ids.shape
    here = torch.arange(length, device=given.input_ids.device).expand(batch, -1)
    if given.anchors is None:
        return here[:, 1:-1], torch.ones_like(here[:, 1:-1], dtype=torch.bool)
    most = max(1, int(given.anchors.sum(1).max()))
    listed = torch.where(given.anchors, here, length).sort(dim=1).values[:, :most]
    return torch.where(listed < length, listed, 1), listed < length  # padding: any valid root will do


def _sights(draft: Any, context: _Context, roots: Tensor, start: Tensor, flex: bool) -> dict[str, _Sight]:
    """Return the stand-ins for attention masks, by kind of layer."""
    config, slots = draft.config, draft.config.block_size
    end = roots.repeat_interleave(slots, dim=1)  # (batch, blocks x slots)
    first = start.repeat_interleave(slots, dim=1)
    sights: dict[str, _Sight] = {}
    for kind in dict.fromkeys(config.layer_kinds):
        # Take the mask of one block after ``window`` keys: no slot sees further back, so it holds for every block.
        window: int = getattr(config.layers, "sliding_window", None) or 0
        alone = torch.full((1,), window, device=roots.device)
        seen = draft.seen(alone, slots, torch.arange(window + slots, device=roots.device), kind)[0]
        key_range = KeyRange(first, end)
        if kind == "sliding_attention" and window:
            back = seen[:, :window].sum(1).repeat(roots.shape[1])  # how far back each slot sees
            key_range = KeyRange(first.maximum(end - back), end)
        sights[kind] = _Sight(context, key_range, seen[:, window:], flex)
    return sights


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Sight, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``_Sight`` says; query (batch, heads, all slots, size) -> (batch, all slots, heads, size)."""
    sight, slots = attention_mask, len(attention_mask.own)
    grouped = query.unflatten(1, (key.shape[1], -1)) * scaling  # (batch, key heads, group, blocks x slots, size)
    text = sight.context.entries[cast(int, module.layer_idx)]
    attended, logsumexp = attend(grouped, *text, sight.key_range, sight.flex)
    by_block = grouped.unflatten(3, (-1, slots))  # (batch, key heads, group, blocks, slots, size)
    own_key, own_value = (one.unflatten(2, (-1, slots))[:, :, None] for one in (key, value))
    scores = (by_block @ own_key.mT).float().masked_fill(~sight.own, -torch.inf)  # (..., slots, slots)
    # One softmax over the text, which its log-sum-exp stands for, and the slots of the own block.
    shares = torch.cat([logsumexp.unflatten(3, (-1, slots))[..., None], scores], dim=-1).softmax(-1)
    merged = shares[..., :1] * attended.unflatten(3, (-1, slots)) + shares[..., 1:] @ own_value.float()
    return merged.to(query.dtype).flatten(3, 4).flatten(1, 2).transpose(1, 2), None


def by_position(states: Tensor, roots: Tensor, counted: Tensor, length: int) -> list[Tensor]:
    """Lay ``states`` (batch, blocks, draft tokens, width) out by position, (batch, length - 1, width) per depth.

    The position of a block is the one before its root. Positions without a block are zero.
    """
    row = torch.arange(len(roots), device=roots.device)[:, None]
    place = torch.where(counted, roots - 1, length - 1)  # padding goes to the last column, which is cut off
    laid = [states.new_zeros(len(roots), length, states.shape[-1]) for _ in range(states.shape[2])]
    return [empty.index_put((row, place), one)[:, :-1] for empty, one in zip(laid, states.unbind(2), strict=True)]


AttentionInterface.register(BLOCK_ATTENTION, _attend)
