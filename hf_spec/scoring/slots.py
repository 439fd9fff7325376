"""Score a forest of tokens over slots: who sees whom, for any model that asks transformers for its masks.

transformers' mask functions are wrapped once. While a forest is scored, the wrapper asks the model's own mask function
about *logical* columns, where a guess stands as far behind the text as it is deep, and then hides what a node must not
see. Windows, chunks and patterns by layer come out right without knowing any model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function

from .cache import SlotCache


@dataclass
class Block:
    """Say who sees whom among the ``count`` new nodes of a forward.

    ``lengths`` (batch,) are the committed slots; ``width`` is the number of columns in use. The new nodes continue the
    forest as one chain, behind ``open`` nodes, where ``ancestors`` is ``None``. Otherwise ``ancestors`` (batch, nodes,
    forest) is the forest as they see it, and ``depth`` (batch, forest) the depth of every open node, the new ones
    last. ``window`` is what a query sees at most in every layer. ``asked`` counts how often the model asked for a
    mask: one that never asks would ignore the forest silently.
    """

    lengths: Tensor
    open: int
    count: int
    width: int
    padding: Tensor | None
    depth: Tensor | None = None
    ancestors: Tensor | None = None
    window: int | None = None
    sees_all: bool = False  # one new node in each of rows that are equally long: nothing to hide
    asked: int = 0

    @cached_property
    def query(self) -> Tensor:
        """The logical column of each new node, (batch, nodes)."""
        if self.depth is None:
            return self.lengths[:, None] + torch.arange(self.open, self.open + self.count, device=self.lengths.device)
        return self.lengths[:, None] + self.depth[:, -self.count :]

    @cached_property
    def column(self) -> Tensor:
        """The logical column of each slot: itself in the text and in a chain, the depth behind the text in a tree."""
        slot = torch.arange(self.width, device=self.lengths.device)[None]
        if self.depth is None:
            return slot.expand(len(self.lengths), -1)
        node = slot - self.lengths[:, None]  # negative in the text
        depth = self.depth.gather(1, node.clamp(0, self.depth.shape[1] - 1))
        return torch.where(node < 0, node, depth) + self.lengths[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """History, but for the left padding, and ancestors: (batch, nodes, columns) bool."""
        slot = torch.arange(self.width, device=self.lengths.device)
        if self.ancestors is None:
            seen = slot <= self.query[:, :, None]
        else:
            node = (slot - self.lengths[:, None])[:, None].expand(-1, self.count, -1)
            forest = self.ancestors.gather(2, node.clamp(0, self.ancestors.shape[2] - 1))
            seen = (node < 0) | (forest & (node < self.ancestors.shape[2]))
        if self.padding is not None:
            seen[:, :, : self.padding.shape[1]] &= self.padding[:, None, :]
        if self.window is not None:  # older columns are kept for other rows, and not every model's mask hides them
            seen &= self.query[:, :, None] - self.column[:, None] < self.window
        return seen

    def mask_function(self, inner: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
        """Let the model's own ``inner(batch, head, query, key)`` judge logical columns, then hide what is hidden."""

        def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if key.ndim == 0:  # transformers maps over single indices
                seen = self.visible[batch, query, key]
                return seen & inner(batch, head, self.query[batch, query], self.column[batch, key])
            visible = self.visible[:, None, :, first:]  # (batch, 1, nodes, columns)
            # What is causal is implied: history and ancestors are never later. Typed for single indices by
            # transformers.
            if inner is causal_mask_function:  # type: ignore[comparison-overlap]
                return visible
            return visible & inner(batch, head, self.query[:, None, :, None], self.column[:, None, None, first:])

        return function


_block: ContextVar[Block | None] = ContextVar("hf_spec_block", default=None)


def _hook_masks(implementation: str) -> None:
    """Wrap transformers' mask function once; without an open block the wrapper passes every call through."""
    original = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    if getattr(original, "_hf_spec", False):
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        block = _block.get()
        if block is None:
            return original(*args, **kwargs)
        block.asked += 1
        if implementation.startswith("flash"):  # takes no custom mask: only chains of one row come here
            return None
        may_skip = implementation == "sdpa" and kwargs.get("allow_is_causal_skip", True)
        if block.sees_all and may_skip and kwargs["mask_function"] is causal_mask_function:
            return None
        function = block.mask_function(kwargs["mask_function"], kwargs["kv_offset"])
        changed = {"mask_function": function, "attention_mask": None, "q_offset": 0, "allow_is_causal_skip": False}
        return original(*args, **{**kwargs, **changed})

    mask._hf_spec = True  # type: ignore[attr-defined]
    mask._hf_spec_original = original  # type: ignore[attr-defined]
    AttentionMaskInterface.register(implementation, mask)


def unhook_masks() -> None:
    """Give transformers back its own mask functions."""
    for name, function in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        if getattr(function, "_hf_spec", False):
            AttentionMaskInterface.register(name, function._hf_spec_original)


class Slots:
    """Hold the slots of one model's text, the open forest behind it, and the masks over both.

    ``padding`` (batch, prompt) bool is False at left padding; ``None`` where there is none. The last ``open`` columns
    of ``cache`` are a chain of open nodes, whose root is the last token of the prompt.
    """

    def __init__(
        self, cache: DynamicCache, batch: int, device: torch.device, padding: Tensor | None, open: int = 0
    ) -> None:
        self.cache = SlotCache.adopt(cache, batch, device, open)
        self._transformers_cache = cache
        self._prompt = self.cache.rows.longest + min(open, 1)
        if padding is not None:  # an adapter's virtual tokens or Git's images stand in front of what the mask knows
            before = max(0, self._prompt - padding.shape[1])
            padding = torch.nn.functional.pad(padding.to(device, torch.bool), (before, 0), value=True)
        self.padding = padding
        self._open_depth: Tensor | None = None  # (batch, open nodes)

    @property
    def device(self) -> torch.device:
        """Return where lengths, paths and ancestors are kept."""
        return self.cache.rows.lengths.device

    @contextlib.contextmanager
    def scoring(self, count: int, ancestors: Tensor | None, config: PreTrainedConfig) -> Iterator[Block]:
        """Open the forest for ``count`` new nodes per row during one forward of the model with ``config``.

        ``ancestors`` (batch, nodes, forest) bool tells which nodes of the forest, the new ones last, lie on the path
        to each new node, itself included; a node without ancestors but itself follows the committed text. ``None``:
        the new nodes continue the forest, a chain so far, one after the other.

        Errors: a ValueError if the model never asked for a mask.
        """
        rows = self.cache.rows
        depth = None if ancestors is None else self._with_depth_of(ancestors)
        is_level = rows.shortest == rows.longest and self.padding is None
        block = Block(
            rows.lengths,
            rows.open,
            count,
            rows.longest + rows.open + count,
            self.padding,
            depth,
            ancestors,
            self.cache.window,
            sees_all=ancestors is None and count == 1 and is_level,
        )
        _hook_masks(config._attn_implementation)
        token = _block.set(block)
        try:
            yield block
        finally:
            _block.reset(token)
        if not block.asked and self.cache.attends:
            raise ValueError(
                f"a model of type {config.model_type} builds its attention masks without transformers.masking_utils, "
                "so it cannot look at a tree or at rows of different lengths. Generate without `speculator`."
            )
        self._open_depth = depth
        rows.open += count

    def _with_depth_of(self, ancestors: Tensor) -> Tensor:
        """Return the depth of every open node, the new ones last: (batch, forest)."""
        known = self._open_depth
        if known is None:  # a chain, if anything
            chain = torch.arange(self.cache.rows.open, device=ancestors.device)
            known = chain.expand(len(ancestors), -1)
        return torch.cat([known, ancestors.sum(-1) - 1], dim=1)

    def advance(self, block: Block) -> Tensor:
        """Count how far each new node stands behind the first token after the prompt, (batch, nodes)."""
        return block.query - self._prompt

    def mask(self, block: Block) -> Tensor | None:
        """Return the plain mask (batch, columns) for models that look at it: 0 at left padding, ``None`` without any.

        A model of states alone has read the padding before the first block and takes no mask afterwards.
        """
        if self.padding is None or not self.cache.attends:
            return None
        return torch.nn.functional.pad(self.padding.long(), (0, block.width - self.padding.shape[1]), value=1)

    def commit(self, path: Tensor, counts: Sequence[int], in_place: bool = False) -> None:
        """Make ``counts[b]`` nodes of ``path[b]`` (batch, m) text, and forget the rest of the forest.

        ``in_place``: the forest is a chain, so that every path stands where it belongs.
        """
        self.cache.commit(path.to(self.device), counts, in_place)
        self._open_depth = None

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; ``keep_finished`` saves the others for ``release``."""
        self.cache.keep_rows(rows.to(self.device), keep_finished)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.device))

    @property
    def cache_is_the_users(self) -> bool:
        """Tell whether the user handed the cache in, and so expects the text in it."""
        return bool(getattr(self._transformers_cache, "_is_user_defined", False))

    def release(self, committed: int) -> DynamicCache:
        """Give transformers' cache back with the prompt and at most ``committed`` tokens of every row."""
        self.cache.release(self._transformers_cache, self._prompt + committed)
        return self._transformers_cache
