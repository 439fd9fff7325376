"""Positions in models whose forward is given none: they would count them, for all rows, from the cache's length."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .architectures import arguments_of
from .features import decoder_of
from .hooks import NO_CONTEXT, hooked
from .masks import TreeMask
from .names import CACHE


class OwnPositions:
    """The positions of each row's nodes, given by hooks to the modules of a model that read positions.

    These modules would count columns from the cache's length, which differs between rows. A wrapper may give its
    decoder other positions (GLM-Image, which generates an image row by row). These are kept by column: a forward over
    the columns after the longest row yields all that any row will need.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._readers = _readers(model)
        self._known: Tensor | None = None  # (..., rows or 1, columns), from column ``_first`` on
        self._first = 0

    def reading(self, block: TreeMask, rows: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Give the model the positions of ``block`` in a forward; ``rows`` are their indices in the batch."""
        if not self._readers:
            return NO_CONTEXT
        columns = block.query  # (batch, nodes)

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = columns
            if _counts_columns(module):
                return _all_columns(module, args, kwargs, block)
            if isinstance(module, nn.Embedding):  # takes one row of positions for the whole batch
                given = columns.flatten()
            elif _counts_from_padding(module):
                given = columns + 1 + int(cast(Any, module).padding_idx)
            elif (own := kwargs.get("position_ids")) is not None:
                given = self._looked_up(own, block, rows)
            return args, {**kwargs, "position_ids": given}

        def after(module: nn.Module, args: Any, embedded: Any) -> Any:
            if _counts_columns(module):
                return embedded.reshape(-1, embedded.shape[-1])[columns.to(embedded.device)]
            return embedded.reshape(*columns.shape, -1) if isinstance(module, nn.Embedding) else embedded

        return hooked(self._readers, before, after)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        if self._known is not None and self._known.shape[-2] > 1:
            self._known = self._known.index_select(-2, rows.to(self._known.device))

    def _looked_up(self, own: Tensor, block: TreeMask, rows: Sequence[int]) -> Tensor:
        """Store the model's ``own`` positions of the next columns, and return those of the nodes, (..., batch, nodes).

        The model may have fewer than needed, since draft tokens may go beyond the maximum length.
        """
        count, batch = block.count, len(block.query)
        if own.shape[-2] not in (1, batch):
            own = own.index_select(-2, torch.tensor(rows, device=own.device))
        begin = block.width - count  # `own` replaces what is stored from this column on
        known = own
        if self._known is not None:
            before = self._known[..., : begin - self._first]
            shape = (*own.shape[:-2], max(own.shape[-2], before.shape[-2]))
            known = torch.cat([before.expand(*shape, -1), own.expand(*shape, -1)], dim=-1)
        else:
            self._first = begin
        missing = block.width - self._first - known.shape[-1]  # filled with the last known position
        self._known = torch.cat([known, known[..., -1:].expand(*known.shape[:-1], missing)], dim=-1)
        place = (block.query - self._first).to(own.device)
        wide = self._known.expand(*self._known.shape[:-2], batch, -1)
        found = wide.gather(-1, place.clamp(min=0).expand(*wide.shape[:-1], -1))
        return found + place.clamp(max=0)  # columns before the first: the model counts them one by one


def _readers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the modules that read positions: an embedding in old decoders, the decoder in some new wrappers."""
    wanted, decoder = {f"{CACHE}_length", "position_ids"}, decoder_of(model)
    of_text = decoder if model.config.is_encoder_decoder else model
    modules = [
        module for module in of_text.modules() if isinstance(module, nn.Embedding) or _counts_from_padding(module)
    ]
    found: list[nn.Module] = [module for module in modules if wanted.issubset(arguments_of(module))]
    found = found or [module for module in of_text.modules() if _counts_columns(module)]
    return found or [decoder] * ("position_ids" in arguments_of(decoder))


def _counts_from_padding(module: nn.Module) -> bool:
    """Tell whether ``module`` is a sinusoidal table in which the first position is ``padding_idx`` + 1."""
    has_table = hasattr(module, "make_weights") and hasattr(module, "padding_idx")
    return has_table and hasattr(module, "create_position_ids_from_input_ids")


def _counts_columns(module: nn.Module) -> bool:
    """Tell whether ``module`` is a table that counts positions from the cache's length, and can be given none."""
    if not (hasattr(module, "make_weights") or isinstance(module, nn.Embedding)):
        return False
    known = arguments_of(module)
    return f"{CACHE}_length" in known and "position_ids" not in known


def _all_columns(
    module: nn.Module, args: Any, kwargs: dict[str, Any], block: TreeMask
) -> tuple[tuple[Any], dict[str, Any]]:
    """Make ``module`` embed the positions of all columns that ``block`` may use, as of one text without padding.

    Its first argument are the tokens, or only their shape. Whether they are padding is all that matters to it.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != f"{CACHE}_length"}
    shape = torch.Size((1, block.width if block.end is None else min(block.width, block.end)))
    if not isinstance(args[0], Tensor):
        return (shape,), kwargs
    return (args[0].new_full(shape, 1 + int(getattr(module, "padding_idx", None) or 0)),), kwargs
