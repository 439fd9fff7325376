"""Tree attention masks, for any model that asks transformers for its masks.

transformers' mask functions are wrapped once. While draft nodes are scored, the wrapper asks the model's own mask
function about *logical* columns. That of a draft token is the sequence's length plus the token's depth. Then the
wrapper hides what a node must not see. Windows, chunks and patterns by layer come out right without knowing any model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
)

from ..device_tensors import cached_arange
from ..wrappers import mark_wrapper, wraps
from .attention import Span, folding, note_causal
from .hooks import NO_CONTEXT


@dataclass
class TreeMask:
    """The attention mask of the ``count`` new nodes of a forward.

    ``lengths`` (batch,) are the committed slots; ``width`` is the number of columns in use. Without ``ancestors``, the
    new nodes continue the ``draft_nodes`` nodes as one chain. Otherwise ``ancestors`` (batch, nodes, draft nodes) bool
    says which draft nodes each new one sees. ``depths``, a (batch, nodes) tensor for each forward, are the
    depths of the open nodes, the new ones last. All new nodes are ``depth`` deep where that is known.

    ``window`` is the number of columns that a query sees at most, if all layers agree. ``asked`` counts how often the
    model asked for a mask: one that never asks would ignore the tree silently. ``crosses``: some layers attend to the
    states of an encoder, by a mask of their own.
    """

    lengths: Tensor
    draft_nodes: int
    count: int
    width: int
    padding: Tensor | None
    depths: tuple[Tensor, ...] | None = None
    ancestors: Tensor | None = None
    window: int | None = None
    depth: int | None = None
    equal_lengths: bool = False  # the rows are equally long
    end: int | None = None  # no row may ever reach this column
    crosses: bool = False
    spans: Sequence[Span] = ()  # in which layers of full attention are computed
    asked: int = 0

    @property
    def hides_nothing(self) -> bool:
        """Tell whether no mask is needed: one new node per row, in rows of equal length without padding."""
        return self.equal_lengths and self.padding is None and self.ancestors is None and self.count == 1

    @cached_property
    def query(self) -> Tensor:
        """The logical column of each new node, (batch, nodes)."""
        return self.columns_of_nodes()

    @cached_property
    def column(self) -> Tensor:
        """The logical column of each slot, (batch, columns)."""
        return self.columns_of_slots()

    @cached_property
    def visible(self) -> Tensor:
        """The columns that each new node sees, (batch, nodes, columns) bool."""
        return self.seen_from(self.query)

    # The same without caching: no graph can hold the lock of a cached property.

    def columns_of_nodes(self) -> Tensor:
        """Return the logical column of each new node, (batch, nodes).

        Padding nodes of a row that is longer than others may lie beyond the maximum length. The model may have no
        position there, so they share the last column that a row may reach.
        """
        if self.equal_lengths and self.depth is not None:
            text = self.width - self.count - self.draft_nodes
            column = cached_arange(1, self.lengths.device, text + self.depth).expand(len(self.lengths), self.count)
        elif self.depths is not None:
            column = self.lengths[:, None] + self.depths[-1]
        elif self.equal_lengths:
            column = cached_arange(self.count, self.lengths.device, self.width - self.count).expand(
                len(self.lengths), -1
            )
        else:
            column = self.lengths[:, None] + cached_arange(self.count, self.lengths.device, self.draft_nodes)
        return column if self.end is None or self.width <= self.end else column.clamp(max=self.end - 1)

    def columns_of_slots(self) -> Tensor:
        """Return the logical column of each slot: its own in prompt and chain, length plus depth for tree nodes."""
        slot = cached_arange(self.width, self.lengths.device)[None]
        if self.depths is None:
            return slot.expand(len(self.lengths), -1)
        node = slot - self.lengths[:, None]  # negative in committed slots
        depth = torch.cat(self.depths, dim=1)  # (batch, draft nodes)
        depth = depth.gather(1, node.clamp(0, depth.shape[1] - 1))
        return torch.where(node < 0, node, depth) + self.lengths[:, None]

    def seen_from(self, query: Tensor) -> Tensor:
        """Return which columns each new node sees, (batch, nodes, columns) bool.

        It sees the committed ones, without left padding, and its ancestors. ``query`` (batch, nodes) are the logical
        columns of the new nodes.
        """
        slot = cached_arange(self.width, self.lengths.device)
        if self.ancestors is None and self.equal_lengths:
            seen = (slot <= query[:1, :, None]).expand(len(query), -1, -1)
        elif self.ancestors is None:
            seen = slot <= query[:, :, None]
        elif self.equal_lengths:  # draft nodes are the last columns; all committed ones before it are seen
            seen = torch.nn.functional.pad(self.ancestors, (self.width - self.ancestors.shape[2], 0), value=True)
        else:  # the draft region begins at each row's own length
            place = self.lengths[:, None] + cached_arange(self.ancestors.shape[2], slot.device)  # (batch, draft nodes)
            text = (slot < self.lengths[:, None])[:, None].expand(-1, self.count, -1)
            seen = text.scatter(2, place[:, None].expand(-1, self.count, -1), self.ancestors)
        if self.padding is not None:
            missing = self.width - self.padding.shape[1]
            seen = seen & torch.nn.functional.pad(self.padding, (0, missing), value=True)[:, None]
        if self.window is not None:  # older columns are kept for shorter rows, and not every model's mask hides them
            seen = seen & (query[:, :, None] - self.columns_of_slots()[:, None] < self.window)
        return seen

    def shown(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return what the nodes see of ``count`` slots from ``first`` on, (batch, nodes, count) bool.

        The second result are the logical columns of these slots, (batch, count).
        """
        return self.visible[:, :, first : first + count], self.column[:, first : first + count]

    def mask_function(self, inner: Callable[..., Tensor], first: int, count: int) -> Callable[..., Tensor]:
        """Apply the model's own ``inner(batch, head, query, key)`` to logical columns, then hide what is hidden."""
        visible, column = self.shown(first, count)

        def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if key.ndim == 0:  # transformers maps over single indices
                seen = visible[batch, query, key - first]
                return seen & inner(batch, head, self.query[batch, query], column[batch, key - first])
            # `visible` is causal already: committed columns and ancestors are never later. The ignored type is
            # transformers' own, which is for single indices.
            if inner is causal_mask_function:  # type: ignore[comparison-overlap]
                return visible[:, None]
            return visible[:, None] & inner(batch, head, self.query[:, None, :, None], column[:, None, None])

        return function


def depths_with(
    known: tuple[Tensor, ...] | None, ancestors: Tensor, depth: int | None, opened: int
) -> tuple[Tensor, ...]:
    """Append the depths of new nodes with these ``ancestors`` to those ``known`` of the ``opened`` nodes.

    Where none are known, the open nodes are a chain.
    """
    rows, count, device = len(ancestors), ancestors.shape[1], ancestors.device
    if known is None:
        known = (cached_arange(opened, device).expand(rows, -1),) if opened else ()
    if depth is None:
        return *known, ancestors.sum(-1) - 1
    return *known, cached_arange(1, device, depth).expand(rows, count)


def full_masks(count: int, implementation: str) -> list[Tensor | None] | None:
    """Return the masks of ``count`` layers of full attention, for the draft nodes that are being scored.

    They are what transformers would make, in a fifth of the time; ``None`` where it has to be asked.
    """
    block = open_block()
    if block is None or implementation != "sdpa":
        return None
    block.asked += 1
    return [None if block.hides_nothing else note_causal(block.shown(0, block.width)[0][:, None])] * count


def takes_no_mask(implementation: str | None) -> bool:
    """Tell whether ``implementation`` is one of flash attention, which attends to all earlier columns of a row.

    As transformers tells it, in fewer instructions: each call asks several times.
    """
    return implementation is not None and "flash" in implementation


def why_no_masks(implementation: str) -> str | None:
    """Say why attention by ``implementation`` cannot be given our masks, or return ``None`` if it can."""
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return (
        f"attends by {implementation!r}, which has no mask function: register one with transformers' "
        f"AttentionMaskInterface.register({implementation!r}, ...), or load it with attn_implementation='sdpa'"
    )


_block: ContextVar[TreeMask | None] = ContextVar("hf_spec_block", default=None)
_plain: ContextVar[Tensor | None] = ContextVar("hf_spec_plain", default=None)  # see ``PlainMasks``
_counting = threading.Lock()
_open = 0  # number of open blocks, in all threads
_any_open = False  # checked first: unlike a context variable, torch.compile can read it, so plain calls can be graphs


def open_block() -> TreeMask | None:
    """Return the block that this thread is scoring, or ``None`` if it scores none."""
    return _block.get() if _any_open else None


@contextlib.contextmanager
def showing(block: TreeMask, implementation: str) -> Iterator[None]:
    """Use the mask of ``block`` in the forwards of this context, for attention by ``implementation``."""
    _hook_masks(implementation)
    token = _block.set(block)
    _count(1)
    try:
        with NO_CONTEXT if block.hides_nothing else folding(block.spans):
            yield
    finally:
        _block.reset(token)
        _count(-1)


@contextlib.contextmanager
def attending_in(spans: Sequence[Span], implementation: str) -> Iterator[None]:
    """Let forwards of this context attend in ``spans`` of the rows, by transformers' own masks of a plain step."""
    _hook_masks(implementation)
    _count(1)
    try:
        with folding(spans):
            yield
    finally:
        _count(-1)


class PlainMasks(contextlib.AbstractContextManager["PlainMasks"]):
    """The masks of plain steps over padded rows: kept between steps instead of made anew by transformers.

    The context is open during steps one after the other, and ``show`` is called around each forward. Only a mask that
    would be equal to the kept one is replaced by it: sdpa's, of a layer that sees all columns, for one node.
    """

    def __init__(self, implementation: str) -> None:
        self._is_sdpa = implementation == "sdpa"
        if self._is_sdpa:
            _hook_masks(implementation)

    def __enter__(self) -> Self:
        _count(1)
        return self

    def __exit__(self, *_: object) -> None:
        _count(-1)

    def show(self, seen: Tensor | None) -> None:
        """Use ``seen`` (batch, 1, 1, columns) bool in the next forward; ``None`` after it."""
        if self._is_sdpa:
            _plain.set(seen)


def _kept(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the mask that was kept for a plain step, if transformers' own for these arguments would equal it."""
    seen, padding = _plain.get(), kwargs.get("attention_mask")
    if seen is None or padding is None or kwargs.get("mask_function") is not causal_mask_function:
        return None
    is_one = kwargs["q_length"] == 1 and kwargs["kv_offset"] == 0 and kwargs["kv_length"] == seen.shape[3]
    return seen if is_one and padding.shape == seen.shape[::3] else None


def _count(change: int) -> None:
    global _open, _any_open
    with _counting:
        _open += change
        _any_open = _open > 0


def _hook_masks(implementation: str) -> None:
    """Wrap transformers' mask function once; without an open block the wrapper passes every call through."""
    original = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    if wraps(original, __name__):
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        block = open_block()
        if block is None and _any_open and (kept := _kept(kwargs)) is not None:
            return note_causal(kept)
        if block is None:
            plain = original(*args, **kwargs)
            is_full = _any_open and isinstance(plain, Tensor) and kwargs.get("mask_function") is causal_mask_function
            return note_causal(plain) if is_full else plain
        if block.crosses and kwargs["mask_function"] is bidirectional_mask_function:
            return original(*args, **kwargs)  # all nodes see the same of an encoder's states
        block.asked += 1
        if takes_no_mask(implementation):
            is_padded = block.padding is not None and not bool(block.padding.all())
            if block.ancestors is not None or is_padded or not block.equal_lengths:
                raise ValueError(
                    f"{implementation} takes no custom mask, which trees, padding and rows of different lengths need; "
                    "load the model, or the draft, with attn_implementation='sdpa'"
                )
            return None
        may_skip = implementation == "sdpa" and kwargs.get("allow_is_causal_skip", True)
        if may_skip and block.hides_nothing and kwargs["mask_function"] is causal_mask_function:
            return None
        if implementation == "sdpa" and kwargs["mask_function"] is causal_mask_function:
            # What `original` would return.
            return note_causal(block.shown(kwargs["kv_offset"], kwargs["kv_length"])[0][:, None])
        function = block.mask_function(kwargs["mask_function"], kwargs["kv_offset"], kwargs["kv_length"])
        changed = {"mask_function": function, "attention_mask": None, "q_offset": 0, "allow_is_causal_skip": False}
        return original(*args, **{**kwargs, **changed})

    AttentionMaskInterface.register(implementation, mark_wrapper(mask, original, __name__))


def unhook_masks() -> None:
    """Restore transformers' own mask functions."""
    for name, function in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        if getattr(function, "_hf_spec", None) == __name__:
            AttentionMaskInterface.register(name, function._hf_spec_original)
