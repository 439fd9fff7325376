"""Subclasses of transformers' schedulers and inputs: draft tokens that do not fit, and plain steps in a row.

In a run of plain steps each batch is the last one, one token later. So transformers' two methods are cut short::

    schedule_batch         the same requests, if the cache has space for a token of each and nobody else could join
    prepare_batch_tensors  positions, indices and masks from those of the last batch, for all requests at once
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler, Scheduler
from transformers.utils import logging

from ..device_tensors import cached_arange
from ..scoring.plain import space_after
from ..versions import stream_context
from .sizes import longest_text

logger = logging.get_logger(__name__)


class SpeculativeScheduler(Scheduler):
    """A scheduler that drops draft tokens that do not fit: a batch must hold them and their request's last token.

    ``plain_batch``: the last batch, if the same requests take plain steps next.
    """

    plain_batch: Sequence[FutureRequestState] = ()

    def add_waiting_request(self, state: RequestState) -> None:
        """Add a request as transformers does, and end its text where the paged cache does.

        A request without space would end the engine, and all others with it. Errors: a ValueError, which fails the
        request alone, if there is no space for one new token.
        """
        more = "set num_blocks of a ContinuousBatchingConfig"
        room = longest_text(self.cache) + 1  # the last token of a text is not stored
        left = space_after(
            len(state.initial_tokens), room, "the paged cache, with one new token, has room", f", or {more}"
        )
        if left < state._new_tokens_limit:
            if state.max_new_tokens is not None and not state._true_initial_tokens:  # else it was said before
                logger.warning(
                    f"The paged cache has room for {left} of the {state.max_new_tokens} new tokens of request "
                    f"{state.request_id}, and its text ends there. For more room, {more}."
                )
            state._new_tokens_limit = left
        super().add_waiting_request(state)

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        batch, self.plain_batch = SameBatch(self.plain_batch), ()
        read = sum(future.state.position_offset for future in batch)
        if batch and read <= cache_budget and self._has_same(batch) and self._has_space(batch):
            self.starved_requests = []  # those of an earlier batch, which may be cancelled by now
            return batch, False, len(batch), read
        return super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]

    def _has_same(self, batch: Sequence[FutureRequestState]) -> bool:
        """Tell whether nobody has come or gone since ``batch``, or could come."""
        if self.waiting_requests and len(batch) < self.max_requests_per_batch:
            return False
        return are_same([future.state for future in batch], [*self.active_requests.values()])

    def _has_space(self, batch: SameBatch) -> bool:
        """Tell whether the cache holds one more token of each of ``batch``; allocate a block where one begins."""
        if [*self.cache.cache_allocators] != ["full_attention"]:
            return False
        size = self.cache.cache_allocators["full_attention"].tokens_per_page
        for place, future in enumerate(batch):
            filled = future.state.position_offset % size
            if filled == 0:
                if not self.cache.can_store_request_tokens(future.state, 1):
                    return False
                batch.in_new_blocks.append(place)
            if filled in (0, size - 1):
                future.complete_blocks = self.cache.count_new_complete_blocks(future.state, 1)
        return True

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        tokens: list[int] = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        decodes = state.status == RequestStatus.DECODING and len(tokens) > 1
        if decodes and not self.cache.can_store_request_tokens(state, len(tokens), dry_run=True):
            state.tokens_to_process = tokens = tokens[:1]  # the blocks serve other requests better
        return tokens

    def _schedule_request(
        self,
        state: RequestState,
        request_tokens: list[int],
        token_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> None:
        if state.status == RequestStatus.DECODING:
            state.tokens_to_process = request_tokens[:token_budget]
        else:
            super()._schedule_request(state, request_tokens, token_budget, request_ids_to_remove_from_waiting)


class _FIFOScheduler(SpeculativeScheduler, FIFOScheduler):
    pass


class _PrefillFirstScheduler(SpeculativeScheduler, PrefillFirstScheduler):
    pass


SCHEDULERS: dict[type[Scheduler], type[Scheduler]] = {
    FIFOScheduler: _FIFOScheduler,
    PrefillFirstScheduler: _PrefillFirstScheduler,
}


class SameBatch(list[FutureRequestState]):
    """The requests of the last batch, which took a plain step and take another one.

    The new tokens of those at ``in_new_blocks`` begin a block. Of the block before, which is full, there may be a copy
    that is read instead.
    """

    def __init__(self, requests: Sequence[FutureRequestState]) -> None:
        super().__init__(requests)
        self.in_new_blocks: list[int] = []


class SpeculativeIOs(ContinuousBatchingIOs):
    """The inputs of a forward, which follow from the last ones in a ``SameBatch``."""

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        if isinstance(requests_in_batch, SameBatch):
            self.requests_in_batch, self.max_kv_read = requests_in_batch, max_kv_read
            with stream_context(self.compute_stream):  # no copy from the host orders this before the forward
                self._count_on(requests_in_batch)
        else:
            given = logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
            super().prepare_batch_tensors(requests_in_batch, *given)

    def _count_on(self, batch: SameBatch) -> None:
        """Give each request its new token, and one key more: that of this token."""
        count, (kind,) = len(batch), self.cumulative_seqlens_k
        for future in batch:
            future.state.position_offset += 1
        self.input_ids[:count] = self.output_ids[0, :count]
        self.position_ids[:count] += 1
        numbers = cached_arange(count + 1, self.device)
        ends, write = self.cumulative_seqlens_k[kind][: count + 1], self.write_index_storage[0, :count]
        ends += numbers
        write += 1
        total = self.total_seqlen_k[kind] + count
        self.max_length_k[kind] += 1
        self.total_seqlen_k[kind], self.true_read_sizes = total, [total]
        owner = torch.repeat_interleave(numbers[:count], ends.diff(), output_size=total)  # the request of each key
        read = self.read_index_storage[0]
        read[:total] = read[cached_arange(total, self.device) - owner]
        read[ends[1:] - 1] = write
        for place in batch.in_new_blocks:
            request, allocator = batch[place].state, self.cache.cache_allocators[kind]
            places = allocator.get_read_indices(request.request_id, request.position_offset - 1, 1)
            read[ends[place] : ends[place + 1]] = torch.tensor(places, device=self.device)
            write[place] = places[-1]
        if self.attention_mask is not None:
            mask = self.attention_mask[kind][0, 0, :count, :total]
            mask.fill_(torch.finfo(mask.dtype).min).masked_fill_(owner == numbers[:count, None], 0)


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
