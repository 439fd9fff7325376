"""The slots of one model's text and the open forest behind it: what a forward over new nodes is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .masks import Block, showing


class Slots:
    """Hold the slots of one model's text, the open forest behind it, and the masks over both.

    ``cache`` stands in for ``transformers_cache``. ``padding`` (batch, prompt) bool is False at left padding; ``None``
    where there is none. Where nodes are open already, they are a chain whose root is the last token of the prompt. No
    row gets more than ``most_new`` tokens behind the prompt.
    """

    def __init__(
        self, cache: Any, transformers_cache: Any, padding: Tensor | None, most_new: int | None = None
    ) -> None:
        self.cache = cache
        self._transformers_cache: Any = transformers_cache
        self._prompt: int = cache.rows.longest + min(cache.rows.open, 1)
        self._end = None if most_new is None else self._prompt + most_new
        if padding is not None:  # an adapter's virtual tokens or Git's images stand in front of what the mask knows
            before = max(0, self._prompt - padding.shape[1])
            padding = torch.nn.functional.pad(padding.to(self.device, torch.bool), (before, 0), value=True)
        self.padding = padding
        self._open_depth: Tensor | None = None  # (batch, open nodes)

    @property
    def device(self) -> torch.device:
        """Return where lengths, paths and ancestors are kept."""
        device: torch.device = self.cache.rows.lengths.device
        return device

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
        block = self._block(count, depth, ancestors)
        with showing(block, config._attn_implementation):
            yield block
        if not block.asked and self.cache.attends:
            raise ValueError(
                f"a model of type {config.model_type} builds its attention masks without transformers.masking_utils, "
                "so it cannot look at a tree or at rows of different lengths. Generate without `speculator`."
            )
        self._open_depth = depth
        rows.open += count

    def _block(self, count: int, depth: Tensor | None, ancestors: Tensor | None) -> Block:
        rows = self.cache.rows
        is_level = rows.shortest == rows.longest and self.padding is None
        return Block(
            rows.lengths,
            rows.open,
            count,
            rows.longest + rows.open + count,
            self.padding,
            depth,
            ancestors,
            self.cache.window,
            sees_all=ancestors is None and count == 1 and is_level,
            end=self._end,
        )

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

    def drop(self) -> None:
        """Forget the open forest, and clear what its forward has written."""
        self.cache.drop()
        self._open_depth = None

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; ``keep_finished`` saves the others for ``release``."""
        self.cache.keep_rows(rows.to(self.device), keep_finished)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.device))

    def join(self, other: Slots) -> int | None:
        """Take over the rows of ``other``, slots of the same model, behind one's own; open forests are dropped.

        Return how much further those rows' first position behind the prompt is to be counted from; ``None`` where rows
        cannot be joined: some are padded, or not all that is kept lies in slots.
        """
        if not self.cache.joins or any(
            one.padding is not None and not bool(one.padding.all()) for one in (self, other)
        ):
            return None
        self.cache.join(other.cache)
        self.padding = self._open_depth = None
        return self._prompt - other._prompt

    @property
    def committed(self) -> int | None:
        """Return how many tokens behind the prompt all rows have in their slots; ``None`` if no row is left."""
        rows = self.cache.rows
        return rows.shortest - self._prompt if rows.cpu_lengths else None

    @property
    def cache_is_the_users(self) -> bool:
        """Tell whether the user handed the cache in, and so expects the text in it."""
        return bool(getattr(self._transformers_cache, "_is_user_defined", False))

    def release(self, committed: int) -> Cache:
        """Give transformers' cache back with the prompt and at most ``committed`` tokens of every row."""
        self.cache.release(self._transformers_cache, self._prompt + committed)
        cache: Cache = self._transformers_cache
        return cache
