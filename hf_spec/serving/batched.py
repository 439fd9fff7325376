"""Many requests at a time: transformers' continuous batching, with each request's own options.

transformers' server takes sampling settings from the first request alone and drops stop strings.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import itertools
import time
from typing import Any, cast

import torch
from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig, StopStringCriteria
from transformers.cli.serving.utils import CBGenerateManager, CBStreamer, CBWorkerDeadError, _StreamError
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..batching.refusals import processors_of
from ..batching.sizes import longest_text
from ..decode.options import option
from ..defaults import fill_in
from ..scoring.plain import tokenizer_in
from .acceptance import acceptance_of_request
from .endpoints import TolerantParser
from .limits import limit_length
from .meter import Meter
from .policy import Policy
from .preparing import in_loop, when_it_leaves
from .requests import quotable

PER_REQUEST = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # the engine sets these per request


class Batched(CBGenerateManager):
    """A manager that adds requests to the engine and takes its outputs; the target's default speculator drafts."""

    def __init__(self, meter: Meter, config: ContinuousBatchingConfig | None, policy: Policy) -> None:
        config = copy.copy(config) if config is not None else ContinuousBatchingConfig()
        config.per_request_processors = True
        super().__init__(config)
        self.meter, self.policy = meter, policy
        self.numbers = itertools.count()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Start the engine at the first call; ValueError for options that it cannot apply to a single request."""
        longest = option(model, {"generation_config": gen_config}, "max_length")
        fill_in(model, gen_config)
        gen_config.max_length = longest  # None: limited by space in the cache
        refuse_options(model, gen_config)
        if self._cb is None:
            super().init_cb(model, _with_all_processors(gen_config))
            self._engine.output_router.output_queue = _Nowhere()
            while self._scheduler is None and self.is_alive():
                time.sleep(0.01)
            self._check_alive("the first one")

    def reset(self) -> None:
        """Stop the engine; the next request starts it with a newly loaded model.

        Errors: an ``HTTPException`` 409 while there are requests, because they would end.
        """
        if self._cb is not None and (self.running() or self.waiting()):
            raise HTTPException(409, "texts are being generated; try again when there are none")
        self.stop()
        self._cb = None

    @property
    def _engine(self) -> Any:
        return self._cb

    def running(self) -> int:
        """Count the requests in the batch."""
        return len(self._scheduler.active_requests) if self._scheduler else 0

    def waiting(self) -> int:
        """Count the requests that wait for space in the batch."""
        queued = self._engine.input_queue.qsize() if self._cb is not None else 0
        return queued + (len(self._scheduler.waiting_requests) if self._scheduler else 0)

    def cache_used(self) -> float:
        """Return the used share of the paged cache, prefixes kept for later included."""
        return 1 - self._scheduler.cache.compute_free_capacity() if self._scheduler else 0.0

    def draft_slots(self) -> int:
        """Count the requests that the draft holds state for."""
        speculation = getattr(self._cb, "speculation", None)
        return 0 if speculation is None else speculation.draft_slots

    @property
    def _scheduler(self) -> Any:
        processor = None if self._cb is None else self._engine.batch_processor
        return None if processor is None else processor.scheduler

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        """Start a text and return the queue of its pieces and the streamer that can cancel it."""
        text = _Text(self, model, processor, inputs, gen_config, request_id)
        parser = response_parser and TolerantParser(response_parser, processor)
        return in_loop(functools.partial(self._stream, text, parser))

    def _stream(self, text: _Text, response_parser: Any) -> tuple[asyncio.Queue[Any], CBStreamer]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop, tokenizer = asyncio.get_running_loop(), text.tokenizer._tokenizer
        streamer = _Streamer(self._engine, text.request_id, tokenizer, loop, queue, response_parser)
        streamer.text = text

        def pass_on(output: Any, ended: bool) -> None:
            try:
                streamer.put(output)
            except Exception as error:  # of tokenizer or parser: other requests' outputs come in the same call
                text.cancel()
                queue.put_nowait(_StreamError(quotable(error)))
                return
            if output.error is not None:
                queue.put_nowait(_StreamError(quotable(RuntimeError(output.error))))
            if ended:
                streamer.end()

        text.start(pass_on, streaming=True)
        when_it_leaves(text.cancel)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return a complete text, its prompt's length and its tokens; a cancelled task stops the generation."""
        text = _Text(self, model, processor, inputs, gen_config, request_id)
        future = in_loop(functools.partial(self._complete, text))
        try:
            output = await future
        except asyncio.CancelledError:
            text.cancel()
            raise
        if output.error is not None:
            dead = self._engine.background_thread_status.fatal_error is not None
            raise (CBWorkerDeadError if dead else RuntimeError)(output.error)
        tokens = output.generated_tokens
        return processor.decode(tokens, skip_special_tokens=True), len(text.prompt), tokens

    def _complete(self, text: _Text) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def pass_on(output: Any, ended: bool) -> None:
            if ended and not future.done():  # done: the client has left in the meantime
                future.set_result(output)

        text.start(pass_on, streaming=text.stops is not None)
        return future


class _Text:
    """One request: its settings, where its text ends, and its counts."""

    def __init__(
        self, manager: Batched, model: Any, processor: Any, inputs: Any, config: GenerationConfig, request_id: str
    ) -> None:
        manager._check_alive(request_id)
        self.manager, self.engine, self.config = manager, manager._engine, config
        self.request_id = f"{request_id} {next(manager.numbers)}"  # clients may use an id twice
        self.prompt: list[int] = list(inputs["input_ids"])
        # A request that the paged cache has no space for would end the engine, and all other requests with it.
        cache = longest_text(manager._scheduler.cache)
        limit_length(model, len(self.prompt), config, manager.policy, cache)
        self.tokenizer = tokenizer_in(processor)
        self.stops = StopStringCriteria(self.tokenizer, config.stop_strings) if config.stop_strings else None
        self.settings = sampling_of(model, config)
        self.seen, self.ended, self.acceptance = 0, False, acceptance_of_request()

    def start(self, pass_on: Any, streaming: bool) -> None:
        """Hand the request to the engine; ``pass_on(output, ended)`` is called in the server's loop."""
        self.engine.register_result_handler(self.request_id, lambda output: self._take(output, pass_on))
        try:
            added = self.engine.add_request(
                self.prompt,
                request_id=self.request_id,
                streaming=streaming,
                max_new_tokens=self.config.max_new_tokens,
                eos_token_id=self.config.eos_token_id,
                **self.settings,
            )
            if added is None:
                raise CBWorkerDeadError("the server is being stopped")
        except BaseException:
            self._forget()
            raise
        self.manager.meter.prompt_tokens.inc(len(self.prompt))

    def cancel(self) -> None:
        """Let the engine drop the request."""
        if not self.ended:
            self._end("cancelled", self.seen)
            self._drop()

    def _take(self, output: Any, pass_on: Any) -> None:
        if self.ended:  # an output that was on its way when the text ended
            return
        end = self._first_stop(output.generated_tokens)
        if end is not None:
            output = dataclasses.replace(output, generated_tokens=output.generated_tokens[:end])
        self.seen = len(output.generated_tokens)
        done = output.is_finished()
        if done or end is not None:
            stats = getattr(output, "speculation", None)
            self.acceptance.record(stats)
            self._end("finished" if output.error is None else "failed", self.seen)
            if stats is not None:
                self.manager.meter.add_counts(stats.counts)
            elif output.error is None:
                self.manager.meter.plain.inc()
            if not done:
                if (speculation := getattr(self.engine, "speculation", None)) is not None:
                    speculation.learn_later([*self.prompt, *output.generated_tokens])
                self._drop()
        pass_on(output, self.ended)

    def _first_stop(self, tokens: list[int]) -> int | None:
        """Count the ``tokens`` up to the first stop string, as plain ``generate`` does; None if there is none."""
        if self.stops is None:
            return None
        ids = torch.tensor([self.prompt + tokens])
        first = len(self.prompt) + self.seen + 1
        ends = (end for end in range(first, ids.shape[1] + 1) if self.stops(ids[:, :end], cast(Any, None)))
        end = next(ends, None)
        return None if end is None else end - len(self.prompt)

    def _end(self, how: str, tokens: int) -> None:
        self.ended = True
        self.manager.meter.texts.labels(how).inc()
        self.manager.meter.generated_tokens.inc(tokens)

    def _drop(self) -> None:
        self.engine.cancel_request(self.request_id)
        self._forget()

    def _forget(self) -> None:
        router = self.engine.output_router
        with router._lock:
            router.result_handlers.pop(self.request_id, None)


class _Streamer(CBStreamer):
    text: _Text

    def cancel(self) -> None:
        """Let the engine drop the request."""
        self.text.cancel()


class _Nowhere:
    """A queue that drops the outputs of requests without a client; transformers would keep them for ever."""

    def put(self, output: Any) -> None:
        pass

    def empty(self) -> bool:
        return True


def refuse_options(model: Any, config: GenerationConfig) -> None:
    """Raise a ValueError for options that the engine would drop, or could only set for all requests together."""
    if (config.num_beams or 1) > 1:
        raise ValueError("num_beams: continuous batching decodes one text per request")
    if config.max_time:
        raise ValueError("max_time: continuous batching ends texts at their length and at stop strings; leave it out")
    for processor in processors_of(model, config):
        if not isinstance(processor, PER_REQUEST):
            raise ValueError(
                f"{type(processor).__name__} does not work in continuous batching, where each request has "
                "only a temperature, top_k and top_p of its own. Leave its option out (frequency_penalty, logit_bias, "
                "or one of generation_config), or start the server without --continuous-batching"
            )


def sampling_of(model: Any, config: GenerationConfig) -> dict[str, Any]:
    """Return the engine's sampling settings for a request; greedy decoding is top-k with k = 1."""
    if not config.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    everything = model.config.get_text_config(decoder=True).vocab_size
    return {
        "temperature": float(1.0 if config.temperature is None else config.temperature),
        "top_k": min(int(config.top_k or everything), everything),  # the engine takes 32-bit integers
        "top_p": float(1.0 if config.top_p is None else config.top_p),
    }


def _with_all_processors(config: GenerationConfig) -> GenerationConfig:
    """Return settings with every processor switched on, so that the engine lets each request set its own values."""
    shared = copy.deepcopy(config)
    shared.update(do_sample=True, temperature=0.5, top_k=1, top_p=0.5, stop_strings=None, num_return_sequences=1)
    return shared
