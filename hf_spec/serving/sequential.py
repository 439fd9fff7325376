"""Requests one after the other: transformers' generation thread with metrics, stopped when the client has gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled
from transformers.generation.streamers import BaseStreamer

from ..decode.options import option
from ..decode.outputs import forget_speculation, last_speculation
from ..sampling import other_random_numbers, set_seed
from ..scoring.plain import tokenizer_in
from .acceptance import acceptance_of_request
from .endpoints import TolerantParser
from .limits import limit_length
from .meter import Meter
from .policy import Policy
from .preparing import in_loop, shielded, when_it_leaves
from .requests import quotable

STOP_SECONDS = 5  # seconds that a running text has to finish its step when the server ends


class OneByOne(GenerateManager):
    """A manager that calls ``generate`` for one request after the other; the target's default speculator drafts."""

    def __init__(self, meter: Meter, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter, self.policy, self.stopping = meter, policy, False
        # Each counter is changed by one thread only: that of the server or that of the manager.
        self._submitted = self._began = self._ended = 0

    def running(self) -> int:
        """Count the requests that are being answered."""
        return self._began - self._ended

    def waiting(self) -> int:
        """Count the requests that wait for their turn."""
        return self._submitted - self._began

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        """Start a text and return the queue of its pieces and the streamer that can cancel it."""
        limit_length(model, inputs["input_ids"].shape[-1], gen_config, self.policy)
        start = super().generate_streaming
        parser = response_parser and TolerantParser(response_parser, processor)

        def started() -> Any:
            measured = cast(Any, _Measured(model, self))
            queue, streamer = start(measured, processor, inputs, gen_config, request_id, cast(Any, parser))
            when_it_leaves(streamer.cancel)
            return queue, streamer

        return in_loop(started)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a complete text, its prompt's length and its tokens; a cancelled task stops the generation."""
        limit_length(model, inputs["input_ids"].shape[-1], gen_config, self.policy)
        measured = _Measured(model, self)
        try:
            return await super().generate_non_streaming(
                cast(Any, measured), processor, inputs, gen_config, *args, **kwargs
            )
        except asyncio.CancelledError:
            measured.streamer.cancel()
            raise

    def stop(self) -> None:
        """Wait until the thread is idle, so that the history of n-grams can be saved."""
        self.stopping = True
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._thread.submit(int).result(timeout=STOP_SECONDS)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Submit to the thread."""
        self._submitted += 1
        return super().submit(self._counted(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Submit to the thread. The returned future may be cancelled; the one that the thread sets may not."""
        submit = super().async_submit

        def submitted() -> asyncio.Future[Any]:
            self._submitted += 1
            return shielded(submit(self._counted(fn), *args, **kwargs))

        return in_loop(submitted)

    def _counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Count the calls of ``fn``, any work of the thread: texts, and decisions, which are no texts."""

        @functools.wraps(fn)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._began += 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._ended += 1

        return counted


class _Measured:
    """A stand-in for the model whose ``generate`` counts."""

    def __init__(self, model: Any, manager: OneByOne) -> None:
        self.model, self.manager, self.acceptance = model, manager, acceptance_of_request()
        self._listener = _Listener()
        self.streamer: Any = self._listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, **kwargs: Any) -> Any:
        """Generate as the model does; called in the manager's thread."""
        meter, streams = self.manager.meter, "streamer" in kwargs
        prompt_length = kwargs["input_ids"].shape[-1]
        meter.prompt_tokens.inc(prompt_length)
        config = kwargs["generation_config"]
        has_beams = (option(self.model, kwargs, "num_beams") or 1) > 1  # beam search takes no streamer
        if streams or not has_beams:
            self.streamer = kwargs.setdefault("streamer", self.streamer)
            self.streamer.end = self._recorded(self.streamer.end)
        else:
            kwargs["stopping_criteria"] = StoppingCriteriaList([_Leaving(self)])
        if (reader := kwargs.get("tokenizer")) is not None:  # a processor cannot compile stop strings
            kwargs["tokenizer"] = tokenizer_in(reader)
        seed = vars(config).pop("seed", None)
        forget_speculation(self.model)  # or a plain text would show those of the last request
        try:
            self.end_if_unwanted()
            with _seeded(seed, self.model.device):
                out = self.model.generate(**kwargs)
        except _GenerationCancelled:
            meter.texts.labels("cancelled").inc()
            raise
        except Exception as error:
            meter.texts.labels("failed").inc()
            if streams:
                raise RuntimeError(quotable(error)) from error
            raise
        else:
            meter.texts.labels("finished").inc()
            if has_beams:
                self.streamer.total_tokens = out.shape[-1] - prompt_length
            stats = last_speculation(self.model)
            if stats is None:
                meter.plain.inc()
            else:
                meter.add_counts(stats.counts)
            return out
        finally:
            meter.generated_tokens.inc(self.streamer.total_tokens)

    def end_if_unwanted(self) -> None:
        """Raise if the client has left, or the server ends."""
        if self.manager.stopping or self._listener.is_cancelled:
            raise _GenerationCancelled

    def _recorded(self, end: Callable[[], None]) -> Callable[[], None]:
        """Record the acceptance before the stream ends: its last event shows it."""

        def ended() -> None:
            self.acceptance.record(last_speculation(self.model))
            end()

        return ended


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from ``seed`` in this context, if there is one; texts after it do not follow from it."""
    if seed is None:
        yield
        return
    with other_random_numbers(device):
        set_seed(seed)
        yield


class _Leaving(StoppingCriteria):
    """Asked in each step of a beam search, to end one that nobody waits for."""

    def __init__(self, text: _Measured) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.text.end_if_unwanted()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _Listener(BaseStreamer):
    """A streamer for texts that are not streamed, which counts tokens and ends the text when it is cancelled."""

    def __init__(self) -> None:
        self.total_tokens, self.is_cancelled, self._began = 0, False, False

    def put(self, value: Tensor) -> None:
        if self.is_cancelled:
            raise _GenerationCancelled
        self.total_tokens += value.numel() if self._began else 0
        self._began = True  # the first value is the prompt

    def end(self) -> None:
        pass

    def cancel(self) -> None:
        """Raise at the next token."""
        self.is_cancelled = True
