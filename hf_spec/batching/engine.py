"""Subclasses of the parts of transformers' continuous batching: where draft tokens enter its engine and leave it.

transformers makes the parts of its engine itself and has no registry for them. So the class of each finished object is
replaced by a subclass that overrides a method or two. One step of the engine, and what is added to it::

    prepare_next_batch   scheduler: which requests, how many of their tokens        draft tokens without space are cut
    _generation_step     one forward over the packed tokens of all requests         scores and verifies draft tokens
    update_batch         tokens to requests, finished ones out, results delivered   emits accepted draft tokens first,
                                                                                    then drafts new ones

The next input of a request is its last token and the draft tokens after it. The paged cache then holds rejected ones,
too. They lie after the position (``position_offset``) at which the next tokens are written, so they are overwritten.

While the same requests take plain steps, a batch follows from the last one (``scheduling.py``). What is recorded of
the steps waits until such a run ends (``PlainRun``).
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)

from ..device_tensors import to_device
from ..drafts.ngram.beginnings import without_placeholders
from ..invariance.columns import Text, mask_of_packed
from ..invariance.mode import Invariance, invariance_of
from ..metrics import SpeculationStats
from ..parallel import ModelParallelGroup
from ..sampling import is_seeded
from ..versions import FullAttentionCacheAllocator, SlidingAttentionCacheAllocator, stream_context
from .drafting import RequestProposal, join_proposals
from .prompts import check_prompt
from .scheduling import SCHEDULERS, SpeculativeIOs, SpeculativeScheduler
from .speculation import Emitted, Scored, Speculation

T = TypeVar("T")


@dataclass
class RequestOutput(GenerationOutput):
    """The output of one request, and ``speculation``: its statistics."""

    speculation: SpeculationStats | None = None


class PlainManager(ContinuousBatchingManager):
    """transformers' manager of continuous batching, which leaves torch without a seed if the user has set none."""

    @classmethod
    def of(cls, manager: ContinuousBatchingManager) -> ContinuousBatchingManager:
        """Turn a manager that transformers made into one of these, unless it is one."""
        return _as_subclass(cls, manager) if type(manager) is ContinuousBatchingManager else manager

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        device, own_seed = self.model.device, self.continuous_batching_config.seed
        is_alone = ModelParallelGroup(cast(Any, self.model)).is_alone
        leave_unseeded = own_seed is None and is_alone and not is_seeded(device)
        made = super()._create_batch_processor()
        if leave_unseeded:  # transformers' engine has set a random seed, which a later call would take for the user's
            torch.seed()
        return made


class SpeculativeManager(PlainManager):
    """transformers' manager of continuous batching with speculative decoding, which ``speculation`` does.

    ``made_for`` tells what the call that made it asked for. ``is_default_size``: that call did not set the size of the
    cache. ``invariance`` is the mode of ``hf_spec.invariant`` that the model was in.
    """

    speculation: Speculation
    made_for: Any
    is_default_size: bool
    invariance: Invariance | None

    @classmethod
    def take_over(
        cls,
        manager: ContinuousBatchingManager,
        speculation: Speculation,
        made_for: Any,
        is_default_size: bool = False,
    ) -> SpeculativeManager:
        """Turn a manager that transformers made and did not start into a speculative one."""
        ours = _as_subclass(cls, manager)
        ours.speculation, ours.made_for, ours.is_default_size = speculation, made_for, is_default_size
        ours.invariance = invariance_of(manager.model)
        ours.output_router = _as_subclass(_Router, manager.output_router)
        ours.output_router.speculation = speculation
        return ours

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        made = super()._create_batch_processor()
        if isinstance(made, _Processor):
            made.cache.reset()  # the weights may have changed since, and the prefixes kept for sharing are theirs
        else:
            made = _as_subclass(_Processor, made)
            made.speculation, made.invariance = self.speculation, self.invariance
            made.scheduler = _as_subclass(SCHEDULERS[type(made.scheduler)], made.scheduler)
            made.inputs_and_outputs = _as_subclass(SpeculativeIOs, made.inputs_and_outputs)
            if (sliding := made.cache.cache_allocators.get("sliding_attention")) is not None:
                _Ring.take_over(cast(SlidingAttentionCacheAllocator, sliding), self.speculation.max_draft_tokens)
        self.speculation.keep({})
        return made

    def add_request(self, input_ids: Any, *args: Any, **kwargs: Any) -> str | None:
        """Add a request as transformers does, after a check of its prompt: a bad one would end all others' texts.

        Errors: those of ``check_prompt``.
        """
        prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
        check_prompt(self.model, prompt)
        return super().add_request(prompt, *args, **kwargs)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Keep the attention of ``hf_spec.invariant``; else do as transformers does."""
        if self.invariance is None:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop as transformers does, and release what unfinished requests have left in drafts and errors."""
        super().stop(*args, **kwargs)
        if self.is_running():  # the caller did not wait for the end
            return
        self.speculation.keep({})
        error: BaseException | None = self.background_thread_status.fatal_error
        while error is not None:  # the engine keeps the error, and its frames would keep the paged cache
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__


class _Router(OutputRouter):
    """Delivery of results together with their statistics."""

    speculation: Speculation

    def deliver(self, output: GenerationOutput) -> None:
        super().deliver(self._with_stats(output))

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        super().deliver_batch([self._with_stats(output) for output in outputs])

    def _with_stats(self, output: GenerationOutput) -> RequestOutput:
        stats = self.speculation.stats_of(output.request_id, output.is_finished())
        if output.status == RequestStatus.FINISHED and output.error is None:
            texts = without_placeholders([[*output.prompt_ids, *output.generated_tokens]], self.speculation.model)
            self.speculation.speculator.learn(texts)
        return RequestOutput(**vars(output), speculation=stats)


class _Ring(SlidingAttentionCacheAllocator):
    """A ring of more keys than a window has: rejected draft tokens then overwrite no key that is still needed.

    A key at position n lies in slot n modulo ``sliding_window``, which is the length of the ring here. ``window`` is
    the number of positions that a query sees, itself included.
    """

    window: int

    @classmethod
    def take_over(cls, allocator: SlidingAttentionCacheAllocator, spare: int) -> None:
        """Give the rings of an allocator that has no requests yet ``spare`` more slots."""
        ours = _as_subclass(cls, allocator)
        ours.window, ours.sliding_window = ours.sliding_window, ours.sliding_window + spare

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length + min(past_length, self.window - 1)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        seen = min(past_length, self.window - 1)
        old: list[int] = self._token_indices_to_physical_indices(request_id, past_length - seen, seen)
        return old + [self.sentinel_index] * query_length


class _Processor(ContinuousBatchProcessor):
    """A batch processor that verifies the draft tokens of all requests in a batch and drafts new ones."""

    speculation: Speculation
    invariance: Invariance | None  # the mode of the model when the processor was made
    _is_plain: bool  # the last step was one of a run of plain steps
    _scored: list[Scored]  # in the last other step
    _emitted: list[Emitted] | None  # None if a draft token has made scores NaN or infinite

    @property
    def _io(self) -> ContinuousBatchingIOs:
        return cast(ContinuousBatchingIOs, self.inputs_and_outputs)  # the async kind is switched off

    def prepare_next_batch(self) -> bool:
        ready: bool = super().prepare_next_batch()
        # The others ended, were cancelled or restart.
        self.speculation.keep(self.scheduler.active_requests, self.scheduler.waiting_requests)
        self.speculation.learn_ended()
        return ready

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        """Fail a request, and the further answers to its prompt: nobody has begun them, but callers wait for them."""
        super()._handle_request_error(error, state)
        for number in range(state.num_children):
            self.output_router.fail_and_deliver(state.fork(f"{state.request_id}__child#{number}"), error)

    @torch.no_grad()
    def _generation_step(self, model: nn.Module) -> None:
        if invariance_of(model) is not self.invariance:
            raise RuntimeError("hf_spec.invariant began or ended while the engine ran; stop the engine before that")
        io = self._io
        self._is_plain = self.speculation.begins_plain_step([future.state for future in io.requests_in_batch])
        with stream_context(io.compute_stream):
            if self._is_plain:
                self._plain_step(model)
            else:
                self._step(model)
        io.retrieve_device_outputs()

    def _plain_step(self, model: nn.Module) -> None:
        """Score and verify the roots alone, where each request of the batch has one and nothing else."""
        io, speculation, start = self._io, self.speculation, time.perf_counter()
        kwargs: Any = io.get_model_kwargs()
        if self.invariance is not None:
            kwargs["attention_mask"] = self._invariant_masks({})
        logits, features = self._forward(model, kwargs)
        scored = time.perf_counter()
        roots = kwargs["input_ids"][0]
        tokens, log_probs = speculation.verify_roots(roots, logits[:, None], self._warp, self.return_logprobs)
        io.output_ids[0, : len(tokens)] = tokens
        if log_probs is not None:
            io.output_ids[1, : len(tokens)] = log_probs.float().view(io.output_ids.dtype)
        speculation.record_plain_step(features, scored - start, time.perf_counter() - scored)

    def _step(self, model: nn.Module) -> None:
        io, start = self._io, time.perf_counter()
        places, features, scored = self._verify(model)
        if self._emitted is None:
            self._remove_draft_tokens()
            places, features, scored = self._verify(model)
        emitted = cast(list[Emitted], self._emitted)
        self._store_prompt_features(features)
        read = [_at(features, place, new.path) for place, new in zip(places, emitted, strict=True)]
        no_prompts = len(emitted) == len(io.requests_in_batch)
        seconds = scored - start, time.perf_counter() - scored
        self.speculation.record_step(self._scored, emitted, read, no_prompts, *seconds)
        self._move_accepted_keys(emitted)
        self._write_last_tokens(emitted)

    def _verify(self, model: nn.Module) -> tuple[list[range], Tensor | None, float]:
        """Score and verify what each request of the batch proposed.

        Return where in the packed tokens the scored nodes are, the features of all of these, and when verification
        began.
        """
        io = self._io
        self._scored = [self._scored_part(future) for future in io.requests_in_batch if future.has_new_token]
        kwargs: Any = io.get_model_kwargs()
        self._mask_trees(kwargs)
        places = self._places()
        kwargs["logits_indices"] = to_device([node for row in places for node in row] or [0], self.model_device)
        logits, features = self._forward(model, kwargs)
        width = max(map(len, places), default=1)
        if width > 1:
            ends = itertools.accumulate(map(len, places))
            nodes = [(end - len(place), end - 1) for end, place in zip(ends, places, strict=True)]
            filled = [[min(first + node, last) for node in range(width)] for first, last in nodes]
            logits = logits[to_device(filled, logits.device)]
        scored, logits = time.perf_counter(), logits.view(-1, width, logits.shape[-1])
        self._emitted = self.speculation.verify(self._scored, logits, self._warp, self.return_logprobs)
        return places, features, scored

    def _remove_draft_tokens(self) -> None:
        """Prepare the batch again without draft tokens, one of which has made the scores of others NaN."""
        io = self._io
        packed = io.input_ids[: io.num_q_tokens].tolist()
        for future in io.requests_in_batch:
            tokens, packed = packed[: future.query_length], packed[future.query_length :]
            row = self.speculation.row(future.state.request_id, future.state)
            future.state.position_offset -= future.query_length
            future.state.tokens_to_process = tokens if row.proposal is None else tokens[:1]
            future.query_length, row.proposal = len(future.state.tokens_to_process), None
        count = sum(future.query_length for future in io.requests_in_batch)
        io.prepare_batch_tensors(io.requests_in_batch, self.logit_processor, False, count, io.max_kv_read, False)

    def _places(self) -> list[range]:
        """Return where in the packed tokens the scored nodes are: they are the last tokens of their request."""
        futures = self._io.requests_in_batch
        ends = itertools.accumulate(future.query_length for future in futures)
        scoring = [end for future, end in zip(futures, ends, strict=True) if future.has_new_token]
        return [range(end - len(one.proposal.tokens), end) for end, one in zip(scoring, self._scored, strict=True)]

    def _scored_part(self, future: FutureRequestState) -> Scored:
        """Return the part of a request's proposal that the scheduler has put into the batch."""
        state = future.state
        row = self.speculation.row(state.request_id, state)
        proposal = ROOT if row.proposal is None else row.proposal.truncate(future.query_length)
        return Scored(row, proposal, self._remaining(state), state._eos_token_ids)

    def _remaining(self, state: RequestState) -> int:
        """Return how many draft tokens may be emitted: after them there is space for one more token.

        The length limit gives it, and the target's table of positions, outside of which a draft token has none.
        """
        left, table = state._new_tokens_limit - state.generated_len() - 1, self.speculation.positions
        if table is not None:
            left = min(left, table - len(state.initial_tokens) - state.generated_len())
        return max(0, left)

    def _forward(self, model: nn.Module, kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the logits that ``logits_indices`` ask for, (nodes, vocabulary), and the features of all packed
        tokens, (1, tokens, widths)."""
        features, index = self.speculation.features, kwargs["logits_indices"]
        if keeps := self.model_runner.supports_logits_to_keep(model):
            kwargs["logits_to_keep"] = index
        with features.watching() as caught:
            outputs: Any = model(**kwargs, **features.asked)
        return outputs.logits[0] if keeps else outputs.logits[0, index], features.joined(outputs, caught)

    def _mask_trees(self, kwargs: Any) -> None:
        """Give nodes of trees the positions of their depth, and hide other branches from them."""
        trees = {one.row.name: one.proposal for one in self._scored if not one.proposal.is_chain}
        for allocator in self.cache.cache_allocators.values() if trees else ():
            masks = kwargs["attention_mask"]
            mask = masks[allocator.layer_type] if isinstance(masks, dict) else masks  # (1, 1, tokens, keys)
            for state, past, nodes, keys in self._blocks(allocator):
                if (tree := trees.get(state.request_id)) is not None:
                    proposal = join_proposals([tree], self.model_device)
                    kwargs["position_ids"][0, nodes] = past + proposal.depth[0]
                    if self.invariance is None:
                        history = _length(keys) - _length(nodes)
                        seen = _seen(proposal.ancestors[0], proposal.depth[0], history, _window(allocator))
                        mask[0, 0, nodes, keys].fill_(torch.finfo(mask.dtype).min).masked_fill_(seen, 0)
        if self.invariance is not None:
            kwargs["attention_mask"] = self._invariant_masks(trees)

    def _blocks(self, allocator: Any) -> Iterator[tuple[RequestState, int, slice, slice]]:
        """Yield each request, the length of its text before this batch, and its nodes and keys among all."""
        node = key = 0
        for future in self._io.requests_in_batch:
            state, count = future.state, future.query_length
            past = state.position_offset - count
            keys = allocator.get_seqlen_k(past, count)
            yield state, past, slice(node, node + count), slice(key, key + keys)
            node, key = node + count, key + keys

    def _invariant_masks(self, trees: dict[str, RequestProposal]) -> Tensor | dict[str, Tensor]:
        """Return masks for the mode of ``hf_spec.invariant``, in which transformers makes none."""
        found: dict[str, Tensor] = {}
        for allocator in self.cache.cache_allocators.values():
            window, texts = _window(allocator), []
            for state, past, nodes, keys in self._blocks(allocator):
                count = _length(nodes)
                history, ancestors, split = _length(keys) - count, None, None
                depth = torch.arange(count, device=self.model_device)
                if (tree := trees.get(state.request_id)) is not None:
                    proposal = join_proposals([tree], self.model_device)
                    ancestors, depth, split = proposal.ancestors[0], proposal.depth[0], past
                place = past + torch.cat([torch.arange(-history, 0, device=self.model_device), depth])
                texts.append(Text(0, _seen(ancestors, depth, history, window), place, split, nodes, keys))
            found[allocator.layer_type] = mask_of_packed(texts)
        return found if len(found) > 1 else next(iter(found.values()))

    def _move_accepted_keys(self, emitted: list[Emitted]) -> None:
        """Move the keys and values of accepted paths to where those of emitted tokens belong."""
        moves = [
            (one.row, len(one.proposal.tokens), new.path)
            for one, new in zip(self._scored, emitted, strict=True)
            if new.path[-1] >= len(new.path)  # else the path's keys are in place already
        ]
        for allocator in self.cache.cache_allocators.values() if moves else ():
            sources: list[int] = []
            targets: list[int] = []
            for row, count, path in moves:
                past = row.request.position_offset - count
                written = allocator.get_write_indices(row.name, past, count)
                sources += [written[node] for node in path]
                targets += written[: len(path)]
            source, target = to_device([sources, targets], self.model_device)
            for views in cast(FullAttentionCacheAllocator, allocator)._kv_token_views.values():
                for states in views:  # keys, values
                    states.index_copy_(0, target, states.index_select(0, source))

    def _store_prompt_features(self, features: Tensor | None) -> None:
        """Keep the features of prompts, which may be read in several parts, until a drafter needs them."""
        end = 0
        for future in self._io.requests_in_batch:
            end += future.query_length
            state = future.state
            if features is not None and state.generated_len() == 0:
                row = self.speculation.row(state.request_id, state)
                part = features[:, end - future.query_length : end]
                # A view would keep the features of all other requests alive.
                row.features.append(part if part.shape == features.shape else part.clone())

    def _warp(self, states: Sequence[RequestState], logits: Tensor) -> Tensor:
        """Apply the engine's processors to ``logits`` (rows, ..., vocabulary), with each request's own settings."""
        processors = self.logit_processor
        if not processors.do_processing:
            return logits
        greedy = [state.logit_processor_kwargs.get("top_k") == 1 for state in states]
        if any(greedy):  # argmax takes the first of equally good tokens, as plain decoding does, and sorts nothing
            best = torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
            others = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
            if others:
                best[others] = self._warp([states[i] for i in others], logits[others])
            return best
        flat = logits.reshape(-1, logits.shape[-1])
        rows = [FutureRequestState(state, True, {}, 1) for state in states]
        settings = torch.empty((processors.tensors_required, len(rows)), dtype=torch.int32)
        settings = processors.prepare_tensor_args(rows, settings).to(logits.device)
        each = settings.repeat_interleave(len(flat) // len(rows), dim=1)  # (processors, nodes of all rows)
        no_ids = torch.empty((len(flat), 0), dtype=torch.long, device=logits.device)
        return processors(cast(torch.LongTensor, no_ids), flat, each).view(logits.shape)

    def _write_last_tokens(self, emitted: list[Emitted]) -> None:
        """Put the last token of each request where transformers expects the only one."""
        output_ids = self._io.output_ids
        last = [new.tokens[-1] for new in emitted]
        output_ids[0, : len(last)] = torch.tensor(last, dtype=output_ids.dtype, device=output_ids.device)
        if self.return_logprobs:
            likelihoods = torch.tensor([(new.log_probs or [0.0])[-1] for new in emitted])
            output_ids[1, : len(last)] = likelihoods.view(output_ids.dtype).to(output_ids.device)

    @torch.no_grad()
    def update_batch(self) -> None:
        scheduler = cast(SpeculativeScheduler, self.scheduler)
        before, forks = len(scheduler.active_requests), bool(scheduler._requests_to_fork)
        if not self._is_plain:
            futures = [future for future in self._io.requests_in_batch if future.has_new_token]
            for future, one, new in zip(futures, self._scored, self._emitted or [], strict=True):
                self._emit(future, one, new)
        super().update_batch()
        if forks:
            self._pass_features_to_forks()
        all_stay = self._is_plain and len(scheduler.active_requests) == before and not forks
        drafts = not (all_stay and self.speculation.is_planned()) and self._draft()
        if all_stay and not drafts:
            scheduler.plain_batch = self._io.requests_in_batch

    def _draft(self) -> bool:
        """Draft for the requests that continue; return whether there are draft tokens."""
        active = self.scheduler.active_requests
        continuing = [one.row for one in self._scored if active.get(one.row.name) is one.row.request]
        drafts = self.speculation.propose(continuing, [self._remaining(row.request) for row in continuing], self._warp)
        for row in continuing if drafts else ():
            if row.proposal is not None:
                row.request.tokens_to_process = list(row.proposal.tokens)
        return drafts

    def _emit(self, future: FutureRequestState, scored: Scored, emitted: Emitted) -> None:
        """Give a request all new tokens but the last, which transformers adds itself, and roll back rejected ones."""
        state, kept = future.state, len(emitted.tokens)
        if (drafted := len(scored.proposal.tokens) - 1) > 0:
            # The scheduler has counted all scored nodes as tokens of the request; only ``kept`` of them are emitted.
            state.position_offset -= drafted + 1
            future.complete_blocks = self.cache.count_new_complete_blocks(state, kept)
            state.position_offset += kept
        likelihoods: Sequence[float | None] = emitted.log_probs or [None] * kept
        for token, likelihood in zip(emitted.tokens[:-1], likelihoods[:-1], strict=True):
            state.update_and_check_completion(token, likelihood)

    def _pass_features_to_forks(self) -> None:
        """Copy the features of a prompt to further answers to it."""
        for name, state in self.scheduler.active_requests.items():
            parent, fork, _ = name.rpartition("__child#")
            if fork and state.generated_len() == 0:
                self.speculation.fork(parent, name, state)


ROOT = RequestProposal([0], [-1], is_chain=True)  # for a request without draft tokens; its token id is not used


def _seen(ancestors: Tensor | None, depth: Tensor, history: int, window: int | None) -> Tensor:
    """Return which of ``history`` earlier keys and of the nodes' keys each node sees: (nodes, keys) bool.

    ``ancestors`` (nodes, nodes) and ``depth`` (nodes,) of a tree; without ``ancestors`` the nodes are a chain.
    """
    count = len(depth)
    before = torch.ones((count, history), dtype=torch.bool, device=depth.device)
    nodes = (
        torch.ones((count, count), dtype=torch.bool, device=depth.device).tril() if ancestors is None else ancestors
    )
    seen = torch.cat([before, nodes], dim=1)
    if window is not None:
        places = torch.cat([torch.arange(-history, 0, device=depth.device), depth])
        seen &= depth[:, None] - places < window
    return seen


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _window(allocator: Any) -> int | None:
    return allocator.window if isinstance(allocator, _Ring) else None


def _at(features: Tensor | None, places: range, path: Sequence[int]) -> Tensor | None:
    """Return the features (tokens, widths) at the nodes of ``path``."""
    if features is None:
        return None
    if path[-1] == len(path) - 1:  # a chain, or the first nodes of a tree
        return features[0, places[0] : places[0] + len(path)].clone()  # a view would keep all features alive
    return features[0, to_device([places[node] for node in path], features.device)]


def _as_subclass(ours: type[T], made: Any) -> T:
    """Change the class of an object that transformers made to ``ours``, a subclass of its own class."""
    assert issubclass(ours, type(made))
    made.__class__ = ours
    return cast(T, made)
