"""Masks and positions for a forward over new nodes, from the slots of a cache and the draft region after them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..device_tensors import cached_arange, to_device
from .attention import Span
from .buffers import COLUMNS_AHEAD
from .masks import TreeMask, depths_with, showing
from .row_spans import RowSpans


@dataclass(frozen=True)
class _CachedPositions:
    """Cached positions (..., batch, n) of columns after the committed ones, counted from ``origin``.

    Where rows are equally long they begin at column ``begin``, and hold for later lengths too (``version`` is
    ``None``). Otherwise they begin at each row's length, and hold for one ``version`` of the lengths.
    """

    origin: Tensor
    version: object
    begin: int
    positions: Tensor

    def holds(self, origin: Tensor, version: object, rows: int, begin: int, end: int) -> bool:
        """Tell whether the positions include the columns from ``begin`` to ``end`` of ``rows`` rows."""
        batch, count = self.positions.shape[-2:]
        is_same = self.origin is origin and self.version is version and batch == rows
        return is_same and self.begin <= begin and end <= self.begin + count


class KVView:
    """The committed slots of one model, the draft region after them, and the masks over both.

    ``cache`` replaces ``transformers_cache``. ``padding`` (batch, prompt) bool is False at left padding; ``None``
    without any. Nodes that are open already are a chain whose root is the last token of the prompt. No row gets more
    than ``most_new`` tokens after the prompt.
    """

    def __init__(
        self, cache: Any, transformers_cache: Any, padding: Tensor | None, most_new: int | None = None
    ) -> None:
        self.cache = cache
        self._transformers_cache: Any = transformers_cache
        self.prompt: int = cache.rows.longest + min(cache.rows.draft_nodes, 1)  # columns
        self._end = None if most_new is None else self.prompt + most_new
        if padding is not None:  # an adapter's virtual tokens or Git's images precede the columns of the mask
            before = max(0, self.prompt - padding.shape[1])
            padding = torch.nn.functional.pad(padding.to(self.device, torch.bool), (before, 0), value=True)
        self.padding = padding
        # For as many columns as there are so far, and some more: see ``mask_of`` and ``seen_by_one``.
        self._padding_mask: Tensor | None = None  # (batch, columns), 0 at padding
        self._seen: Tensor | None = None  # (batch, 1, 1, columns) bool, False at padding
        self._cached_positions: _CachedPositions | None = None  # see ``positions``
        self._depths: tuple[Tensor, ...] | None = None  # (batch, nodes) each, of the open nodes if they are a tree
        self._row_spans = RowSpans(cache, padding)
        self._shift: Tensor | None = None  # (batch, 1), how far ``align`` has shifted the rows to the right

    @property
    def device(self) -> torch.device:
        """Return the device of lengths, paths and ancestors."""
        device: torch.device = self.cache.rows.device
        return device

    @contextlib.contextmanager
    def scoring(
        self, count: int, ancestors: Tensor | None, config: PreTrainedConfig, depth: int | None = None
    ) -> Iterator[TreeMask]:
        """Add ``count`` new nodes per row to the draft region, in one forward of the model with ``config``.

        ``ancestors`` (batch, nodes, draft nodes) bool: which draft nodes, the new ones last, lie on the path to each
        new node, itself included. A node with no other ancestor follows the last committed token. ``depth`` is the
        number of other ancestors, if it is known and the same for all new nodes. Without ``ancestors`` the draft
        region is a chain, which the new nodes continue.

        Errors: a ValueError if the model never asked for a mask.
        """
        rows = self.cache.rows
        depths = None if ancestors is None else depths_with(self._depths, ancestors, depth, rows.draft_nodes)
        block = self._tree_mask(count, depths, ancestors, depth)
        rows.begin_forward(count)
        try:
            with showing(block, config._attn_implementation):
                yield block
        finally:
            rows.end_forward()
        if not block.asked and self.cache.attends:
            raise ValueError(
                f"a model of type {config.model_type} builds its attention masks without transformers.masking_utils, "
                "so it cannot look at a tree or at rows of different lengths. Generate without `speculator`."
            )
        self._depths = depths
        rows.draft_nodes += count

    def _tree_mask(
        self, count: int, depths: tuple[Tensor, ...] | None, ancestors: Tensor | None, depth: int | None
    ) -> TreeMask:
        rows = self.cache.rows
        return TreeMask(
            rows.lengths,
            rows.draft_nodes,
            count,
            rows.longest + rows.draft_nodes + count,
            self.padding,
            depths,
            ancestors,
            self.cache.window,
            depth,
            equal_lengths=rows.equal_lengths,
            end=self._end if self._shift is None else None,
            crosses=self.cache.crosses,
            # One node of a tree may not see its open siblings, and a span has no mask for one node.
            spans=() if count == 1 and depths is not None else self.spans(count),
        )

    def spans(self, count: int) -> Sequence[Span]:
        """Return in which rows and columns ``count`` new nodes attend; none where all rows attend at once."""
        return self._row_spans.of(count)

    def positions(self, origin: Tensor, block: TreeMask) -> Tensor:
        """Return the positions of the new nodes, (..., batch, nodes).

        That of column 0 is ``origin`` (..., batch or 1, 1), negative where the row is padded. Those of chains, and of
        nodes of one known depth, are cached. The cache holds for many lengths where all rows are equally long, else
        for the present lengths.
        """
        rows = self.cache.rows
        by_node = block.depths is not None and block.depth is None
        if by_node or (self._end is not None and block.width > self._end):
            positions = origin + block.query
            if self._shift is None or self._end is None:
                return positions
            # Padding nodes beyond the maximum length share its last position, see `TreeMask.columns_of_nodes`.
            return torch.minimum(positions, origin + self._shift + (self._end - 1))
        first, count = (rows.draft_nodes, block.count) if block.depth is None else (block.depth, 1)
        positions = self.next_positions(origin, first, count)
        return positions.expand(*positions.shape[:-1], block.count)

    def next_positions(self, origin: Tensor, first: int, count: int) -> Tensor:
        """Return the cached positions of ``count`` columns, the ``first`` of them so far after the committed ones."""
        rows = self.cache.rows
        begin, version = (rows.longest, None) if rows.equal_lengths else (0, rows.version)
        cached, end = self._cached_positions, first + count
        if cached is None or not cached.holds(origin, version, len(rows.cpu_lengths), begin, begin + end):
            cached = self._cached_positions = _CachedPositions(origin, version, begin, origin + rows.columns(end))
        begin -= cached.begin
        return cached.positions[..., begin + first : begin + end]

    def mask(self, block: TreeMask) -> Tensor | None:
        """Return the 2D mask (batch, columns) for models that read it: 0 at left padding, ``None`` without any.

        A purely recurrent model has read the padding with the prompt, and takes no mask afterwards.
        """
        return self.mask_of(block.width)

    def mask_of(self, width: int) -> Tensor | None:
        """Return the same for the first ``width`` columns."""
        if self.padding is None or not self.cache.attends:
            return None
        if self._padding_mask is None or self._padding_mask.shape[1] < width:
            missing = width + COLUMNS_AHEAD - self.padding.shape[1]
            self._padding_mask = torch.nn.functional.pad(self.padding.long(), (0, missing), value=1)
            self._seen = self._padding_mask[:, None, None].bool()
        return self._padding_mask[:, :width]

    def seen_by_one(self, mask: Tensor | None) -> Tensor | None:
        """Return what ``mask``, as ``mask_of`` has just returned it, lets one node of each row see.

        It is (batch, 1, 1, columns) bool, ``None`` without padding.
        """
        return None if mask is None or self._seen is None else self._seen[..., : mask.shape[1]]

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit ``counts[b]`` nodes of ``path[b]`` (batch, m), and drop the rest of the draft region.

        ``in_place``: no node moves, as in a chain. ``on_device`` (batch,) are the same counts, if known there.
        """
        on_device = None if on_device is None else on_device.to(self.device)
        self.cache.commit(path.to(self.device), counts, in_place, on_device)
        self._depths = None

    def shorten(self, lengths: Sequence[int]) -> None:
        """Keep ``lengths[b]`` committed tokens of each row, padding included, and drop the draft region."""
        rows = self.cache.rows
        rows.draft_nodes = 0
        if list(lengths) != rows.cpu_lengths:
            rows.set(to_device(list(lengths), self.device), list(lengths))
        self._depths = None

    def rollback(self) -> None:
        """Drop the draft region, and zero what its forward has written."""
        self.cache.rollback()
        self._depths = None

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for ``release``."""
        self.cache.keep_rows(rows.to(self.device), keep_finished)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.device))
            self._padding_mask = None
        if self._shift is not None:
            self._shift = self._shift.index_select(0, rows.to(self.device))

    def join(self, other: KVView) -> bool:
        """Append the rows of ``other``, slots of the same model, and tell whether that was possible.

        It is not where rows are padded, or where something is kept outside slots. Draft regions are dropped.
        """
        if not self.cache.can_join or any(
            one.padding is not None and not bool(one.padding.all()) for one in (self, other)
        ):
            return False
        self.cache.join(other.cache)
        self.padding = self._depths = None
        self._row_spans = RowSpans(self.cache, None)
        return True

    def align(self) -> Tensor:
        """Shift all rows to the right until they end in the same column, and return the shifts (batch, 1).

        Then, as in plain ``generate``, a plain step needs no column or mask per row. The slots before a row become
        padding. ::

            p p p t t          - - p p p t t
            p p p t       →    - - - p p p t
            - p p t t t t      - p p t t t t
        """
        rows = self.cache.rows
        most = rows.longest - rows.shortest
        self._row_spans.align()
        shift: Tensor = self.cache.align()[:, None]
        before = rows.lengths.new_ones((len(shift), 0), dtype=torch.bool) if self.padding is None else self.padding
        source = cached_arange(before.shape[1] + most, self.device) - shift  # (batch, columns)
        before = torch.nn.functional.pad(before, (0, most), value=True).gather(1, source.clamp(min=0))
        self.padding, self._padding_mask = before & (source >= 0), None
        self._shift = shift if self._shift is None else self._shift + shift
        return shift

    @property
    def committed(self) -> int | None:
        """Return how many tokens after the prompt all rows have committed; ``None`` if no row is left."""
        rows = self.cache.rows
        return rows.shortest - self.prompt if rows.cpu_lengths else None

    @property
    def cache_is_the_users(self) -> bool:
        """Tell whether the user passed the cache in, and so expects it to be filled."""
        return bool(getattr(self._transformers_cache, "_is_user_defined", False))

    def release(self, committed: int) -> Cache:
        """Return transformers' cache with the prompt and at most ``committed`` tokens of every row."""
        self.cache.release(self._transformers_cache, self.prompt + committed)
        cache: Cache = self._transformers_cache
        return cache
