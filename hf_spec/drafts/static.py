"""Compiled drafting: a complete proposal in one function of tensors of fixed shape, which is one graph.

A ``StaticDrafter`` keeps its state in buffers at fixed addresses. ``StaticKeys`` is the KV cache of a draft that
attends. It holds the text and after it the expanded nodes of a proposal, as ``TreeKVCache`` does. But its buffers are
longer than both, and the length of the text is a tensor, so a graph contains no number that changes. There is one
graph for each size of the padded batch (1, 2, 4, ...) and number of slots (powers of two). The depth is always the
same.

``CompiledDrafter`` wraps it. It pads the batch, and accepted tokens to the longest path. It draws the random numbers
that the graph needs, and calls the compiled function.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from ..device_tensors import to_device, to_list
from ..policy.fixed import UNBOUNDED
from ..proposal import Proposal, once
from ..scoring.graphs import Compiler, lasting
from ..scoring.masks import TreeMask, depths_with
from ..scoring.rings import fewest_slots, power_of_two
from .base import AcceptedTokens, DraftContext, Drafter
from .trees import PreparedDraft, max_expanded_nodes

MASKED_LAYER_TYPES = ("full_attention", "sliding_attention")  # layers for which masks can be built here
MASKED_ATTENTION = ("sdpa", "eager")  # attention implementations for which they can

PutBuffer = Callable[[Hashable, Tensor], Tensor]  # of the name of a buffer, and its contents, (batch, ...)

logger = logging.get_logger(__name__)


class StaticDrafter(Drafter):
    """A ``Drafter`` over growing slots or over fixed ones.

    Over fixed ones ``grow_proposal`` and ``read`` can be compiled: shapes do not change, no value is read from the
    device, and state is written in place.
    """

    _draft: Any  # has ``device`` and ``dtype``
    attends: ClassVar[bool] = True  # whether it has attention, and so needs masks
    deepest: int = UNBOUNDED  # its largest draft length

    @once
    def device(self) -> torch.device:
        """Return the device of the draft."""
        device: torch.device = self._draft.device
        return device

    @once
    def dtype(self) -> torch.dtype:
        """Return the dtype of the draft."""
        dtype: torch.dtype = self._draft.dtype
        return dtype

    @property
    def draft(self) -> Any:
        """Return the draft model."""
        return self._draft

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read accepted tokens on the draft's device, then grow a proposal."""
        on_draft = accepted.to(self.device, self.dtype)
        return self.grow_proposal(on_draft, min(limit, self.deepest)).to(accepted.tokens.device)

    @abstractmethod
    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        """Read accepted tokens and draft up to ``limit`` deep; ``prepared`` is what was prepared outside the graph."""

    @abstractmethod
    def read(self, accepted: AcceptedTokens) -> None:
        """Read accepted tokens; some rows may have none."""

    @abstractmethod
    def make_room(self, columns: int) -> bool:
        """Have at least ``columns`` fixed slots, for the text and all nodes after it; return whether they are new."""

    @abstractmethod
    def move(self, put: PutBuffer) -> None:
        """Move each buffer that is written in place to where ``put`` puts it."""


class StaticKeys:
    """The static KV cache of a draft: keys and values per layer, (batch, heads, slots, width) each.

    ``lengths`` (batch,) count the columns of text, left padding included. ``known`` (batch, slots) is False at left
    padding, and ``before`` (batch, 1) counts it.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], lengths: Tensor, known: Tensor, before: Tensor) -> None:
        self.layers, self.lengths, self.known, self.before = layers, lengths, known, before

    @classmethod
    def adopt(cls, cache: DynamicCache, mask: Tensor) -> StaticKeys:
        """Copy the keys and values of a prompt from ``cache``; ``mask`` (batch, prompt) is 0 at padding."""
        length = mask.shape[1]
        size = power_of_two(length + 1)
        layers: list[tuple[Tensor, Tensor]] = []
        for layer in cast(Any, cache.layers):
            both = []
            for states in (layer.keys, layer.values):  # sliding layers keep the last ones only
                buffer = states.new_zeros((*states.shape[:2], size, states.shape[3]))
                buffer[:, :, length - states.shape[2] : length] = states
                both.append(buffer)
            layers.append((both[0], both[1]))
        lengths = torch.full((len(mask),), length, device=mask.device)
        known = mask.new_ones((len(mask), size), dtype=torch.bool)
        known[:, :length] = mask.bool()
        return cls(layers, lengths, known, (mask == 0).sum(1, keepdim=True))

    def make_room(self, columns: int) -> bool:
        """Have at least so many slots; return whether the buffers are new."""
        size, here = power_of_two(columns), self.known.shape[1]
        if size <= here:
            return False
        more = size - here
        pad = torch.nn.functional.pad
        self.layers = [(pad(keys, (0, 0, 0, more)), pad(values, (0, 0, 0, more))) for keys, values in self.layers]
        self.known = pad(self.known, (0, more), value=True)
        return True

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only; a row may occur more than once."""

        def kept(buffer: Tensor) -> Tensor:
            return buffer.index_select(0, rows.to(buffer.device))

        self.layers = [(kept(keys), kept(values)) for keys, values in self.layers]
        self.lengths, self.known, self.before = map(kept, (self.lengths, self.known, self.before))

    def move(self, put: PutBuffer, number: int = 0) -> None:
        """Move the buffers, those of the cache ``number`` of a draft, to where ``put`` puts them."""
        self.layers = [
            (put((number, layer, "keys"), keys), put((number, layer, "values"), values))
            for layer, (keys, values) in enumerate(self.layers)
        ]
        self.lengths, self.known = put((number, "lengths"), self.lengths), put((number, "known"), self.known)
        self.before = put((number, "before"), self.before)

    def opened(self) -> OpenKeys:
        """Return the cache that layers are given during one proposal."""
        return OpenKeys(self)


class OpenKeys:
    """The view of ``StaticKeys`` during one proposal: it writes nodes after the text and builds their masks.

    It replaces a cache of transformers in the layers of a draft that is given positions and masks.
    """

    def __init__(self, keys: StaticKeys) -> None:
        self._keys = keys
        self.lengths = keys.lengths  # (batch,) columns of text
        self._open = 0  # nodes after the text
        self._depths: tuple[Tensor, ...] | None = None  # (batch, nodes) each, of nodes after the text, if a tree
        self._row: Tensor
        self._column: Tensor

    def begin(
        self,
        count: int,
        ancestors: Tensor | None,
        depth: int | None,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        kinds: dict[str, int | None] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Reserve columns for ``count`` new nodes; return their positions (batch, nodes) and masks by kind of layer.

        ``ancestors`` and ``depth`` are those of ``KVView.scoring``. ``kinds`` replaces the result of ``windows`` where
        ``config`` does not say it.
        """
        keys, lengths, slots = self._keys, self.lengths, self._keys.known.shape[1]
        depths = None if ancestors is None else depths_with(self._depths, ancestors, depth, self._open)
        masks, column = {}, torch.zeros(0)
        for kind, window in (kinds or windows(config)).items():
            block = TreeMask(lengths, self._open, count, slots, keys.known, depths, ancestors, window, depth)
            column = block.columns_of_nodes()
            masks[kind] = as_mask(block.seen_from(column), config, dtype)
        self.reserve(count)
        self._depths = depths
        return column - keys.before, masks

    def reserve(self, count: int) -> Tensor:
        """Reserve columns for ``count`` new nodes, and return them (batch, nodes)."""
        device = self.lengths.device
        self._row = torch.arange(len(self.lengths), device=device)[:, None]
        self._column = self.lengths[:, None] + (self._open + torch.arange(count, device=device))
        self._open += count
        return self._column

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the new nodes, and return all slots."""
        held = self._keys.layers[layer_idx]
        for buffer, states in zip(held, (keys, values), strict=True):
            buffer.transpose(1, 2).index_put_((self._row, self._column), states.transpose(1, 2).to(buffer.dtype))
        return held

    def commit(self, counts: Tensor) -> None:
        """Make the first ``counts`` (batch,) of the nodes text, and drop the others."""
        self.lengths = self._keys.lengths.add_(counts)
        self._open, self._depths = 0, None


def windows(config: Any) -> dict[str, int | None]:
    """Return by kind of layer how many columns a query sees at most, itself included; ``None`` means all."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def as_mask(seen: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """Turn ``seen`` (batch, nodes, slots) bool into the mask that attention takes, (batch, 1, nodes, slots)."""
    if config._attn_implementation == "sdpa":
        return seen[:, None]
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def why_not_static(config: Any) -> str | None:
    """Return why no masks can be built here for layers of ``config``, or ``None``."""
    unknown = [kind for kind in getattr(config, "layer_types", None) or () if kind not in MASKED_LAYER_TYPES]
    if config._attn_implementation not in MASKED_ATTENTION:
        return (
            f"its attention is {config._attn_implementation!r}; there are masks for {' and '.join(MASKED_ATTENTION)}"
        )
    return f"it has layers of kind {unknown[0]!r}" if unknown else None


class CompiledDrafter(Drafter):
    """A drafter that runs ``inner`` compiled, with padded inputs and with random numbers drawn outside the graph.

    The batch is padded to 1, 2, 4, ... rows by copies of row 0.
    """

    def __init__(self, inner: StaticDrafter, request: DraftContext, compiler: Compiler) -> None:
        self._inner, self._request, self._compiler = inner, request, compiler
        self._kept = compiler.buffers_of(inner.draft, inner.device)
        own = request.config.num_speculative_tokens  # of a hybrid's draft less than the history's
        most = own if isinstance(own, int) and isinstance(request.config.tree, str | None) else compiler.depth
        self._depth = min(compiler.depth, inner.deepest, most)
        self._open = max_expanded_nodes(request.config, self._depth)
        self._lengths = [request.input_ids.shape[1] + 1] * len(request.input_ids)
        self._row_of_padded: Tensor | None = None  # (batch,); None without padding
        end = request.input_ids.shape[1] + 1 + compiler.depth + 1 + self._open
        self._inner.make_room(fewest_slots(None if compiler.most_new is None else end + compiler.most_new))
        self._pad_batch(list(range(len(self._lengths))))
        self._inner.move(self._kept.put)

    def _pad_batch(self, rows: list[int]) -> None:
        size = power_of_two(len(rows))
        device = self._request.input_ids.device
        filled = rows + rows[:1] * (size - len(rows))
        if filled != list(range(len(filled))) or size != len(self._lengths):
            self._inner.keep_rows(to_device(filled, device))
        self._lengths = [self._lengths[row] for row in rows]
        self._row_of_padded = None
        if size > len(rows):
            self._row_of_padded = to_device([*range(len(rows))] + [0] * (size - len(rows)), device)

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read accepted tokens and draft at full depth, of which ``limit`` is kept."""
        width = self._compiler.depth + 1
        amounts = accepted.amounts
        self._lengths = [length + count for length, count in zip(self._lengths, amounts, strict=True)]
        if self._inner.make_room(max(self._lengths) + max(width, accepted.tokens.shape[1]) + self._open):
            self._inner.move(self._kept.put)
        if accepted.tokens.shape[1] > width:  # longer than a path, as after plain steps: read the rest first
            rest, accepted = _split(accepted, width)
            self._inner.read(self._padded(rest, rest.tokens.shape[1]))
        padded = self._padded(accepted, width)
        given = self._inner, padded, self._depth, self._prepare(limit)
        proposal = self._compiler(_grow_proposal, self._inner.draft, *given, keep=_lasting)
        proposal = proposal.map_tensors(lambda one: one[: len(amounts)])
        return proposal.truncate(limit).to(accepted.tokens.device)

    def _prepare(self, limit: int) -> PreparedDraft:
        request, inner, rows = self._request, self._inner, len(self._lengths)
        prepared = PreparedDraft.of(
            request.config, self._depth, limit, rows, request.vocabulary, request.sample, inner.device
        )
        return prepared if self._row_of_padded is None else prepared.for_rows(self._row_of_padded.to(inner.device))

    def _padded(self, accepted: AcceptedTokens, width: int) -> AcceptedTokens:
        missing = width - accepted.tokens.shape[1]
        tokens = torch.nn.functional.pad(accepted.tokens, (0, missing))
        features = (
            None if accepted.features is None else torch.nn.functional.pad(accepted.features, (0, 0, 0, missing))
        )
        tokens, counts, features = map(self._pad_rows, (tokens, accepted.counts, features))
        return AcceptedTokens(tokens, counts, features).to(self._inner.device, self._inner.dtype)

    def _pad_rows(self, rows: Any) -> Any:
        """Pad the batch of ``rows``, contiguous every time: each memory layout would need a graph of its own."""
        if rows is None:
            return None
        if self._row_of_padded is None:
            return rows.clone(memory_format=torch.contiguous_format)
        return rows.index_select(0, self._row_of_padded.to(rows.device))

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        self._pad_batch(to_list(rows))
        self._inner.move(self._kept.put)


def _grow_proposal(inner: StaticDrafter, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft) -> Proposal:
    return inner.grow_proposal(accepted, limit, prepared)


def _lasting(proposal: Proposal) -> Proposal:
    return proposal.map_tensors(lasting)


def _split(accepted: AcceptedTokens, width: int) -> tuple[AcceptedTokens, AcceptedTokens]:
    """Split off the tokens before the last ``width`` ones of each row."""
    first = [max(0, count - width) for count in accepted.amounts]
    start = (accepted.counts - width).clamp(min=0)
    column = start[:, None] + torch.arange(width, device=start.device)
    column = column.clamp(max=accepted.tokens.shape[1] - 1)  # (batch, width)
    features, last = accepted.features, None
    if features is not None:
        last = features.gather(1, column.to(features.device)[:, :, None].expand(-1, -1, features.shape[2]))
        features = features[:, : max(first)]
    rest = AcceptedTokens(accepted.tokens[:, : max(first)], start, features, first)
    amounts = [count - before for count, before in zip(accepted.amounts, first, strict=True)]
    return rest, AcceptedTokens(accepted.tokens.gather(1, column), accepted.counts - start, last, amounts)


def not_compiled(draft: Any, reason: str) -> None:
    """Warn once that a call is compiled but its ``draft`` is not."""
    logger.warning_once(f"{type(draft).__name__} is not compiled for drafting, but runs as it is: {reason}.")


def drafter_for(kind: Any, draft: Any, request: DraftContext) -> Drafter:
    """Start a drafter of class ``kind`` for one call, compiled if the call is and the draft can be."""
    reason = why_not_static(draft.layer_config) if kind.attends and request.compiler is not None else None
    if reason is not None:
        not_compiled(draft, reason)
    if request.compiler is None or reason is not None:
        plain: Drafter = kind(draft, request)
        return plain
    return CompiledDrafter(kind(draft, request, static=True), request.without_features, request.compiler)
