"""Requests one after the other: transformers' generation thread, measured, and stopped when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled
from transformers.generation.streamers import BaseStreamer

from ..decoding.outputs import forget_speculation, last_speculation
from ..scoring.plain import position_limit, room_behind
from .meter import Meter
from .requests import quotable


class OneByOne(GenerateManager):
    """Call ``generate`` for one request after the other; the target's default speculator guesses."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = meter
        # Each of these is counted by one thread: that of the server or that of the manager.
        self._submitted = self._began = self._ended = 0

    def running(self) -> int:
        """Count the texts that are being generated."""
        return self._began - self._ended

    def waiting(self) -> int:
        """Count the requests that wait for their turn."""
        return self._submitted - self._began

    def began(self) -> None:
        """Note that a text is being generated."""
        self._began += 1

    def ended(self) -> None:
        """Note that it no longer is."""
        self._ended += 1

    def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Start a text and return the queue of its pieces and the streamer that can cancel it."""
        return super().generate_streaming(cast(Any, _Measured(model, self)), *args, **kwargs)

    async def generate_non_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a whole text, its prompt's length and its tokens; a cancelled task stops its generation."""
        measured = _Measured(model, self)
        try:
            return await super().generate_non_streaming(cast(Any, measured), *args, **kwargs)
        except asyncio.CancelledError:
            measured.streamer.cancel()
            raise

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Submit to the thread."""
        self._submitted += 1
        return super().submit(fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Submit to the thread. What is returned may be cancelled; what the thread reports to may not."""
        self._submitted += 1
        future = super().async_submit(fn, *args, **kwargs)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may look
        return asyncio.shield(future)


class _Measured:
    """Be the model whose ``generate`` is called, and count."""

    def __init__(self, model: Any, manager: OneByOne) -> None:
        self.model, self.manager = model, manager
        self.streamer: Any = _Listener()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, **kwargs: Any) -> Any:
        """Generate as the model does; the thread of the manager calls this."""
        meter, streams = self.manager.meter, "streamer" in kwargs
        self.manager.began()
        prompt_length = kwargs["input_ids"].shape[-1]
        meter.prompt_tokens.inc(prompt_length)
        config = kwargs["generation_config"]
        has_beams = (config.num_beams or 1) > 1  # which take no streamer
        if streams or not has_beams:
            self.streamer = kwargs.setdefault("streamer", self.streamer)
        forget_speculation(self.model)  # what this request does not guess is not that of the one before
        try:
            if (size := position_limit(self.model)) is not None and config.max_new_tokens is not None:
                room = room_behind(prompt_length, size, "the model has room")
                config.max_new_tokens = min(config.max_new_tokens, room)
            if (seed := vars(config).pop("seed", None)) is not None:
                torch.manual_seed(seed)
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
                meter.guessed(stats.counts)
            return out
        finally:
            meter.generated_tokens.inc(self.streamer.total_tokens)
            self.manager.ended()


class _Listener(BaseStreamer):
    """Count tokens of a text that is not streamed, and end it when it is cancelled."""

    def __init__(self) -> None:
        self.total_tokens, self._cancelled, self._began = 0, False, False

    def put(self, value: Tensor) -> None:
        if self._cancelled:
            raise _GenerationCancelled
        self.total_tokens += value.numel() if self._began else 0
        self._began = True  # the first value is the prompt

    def end(self) -> None:
        pass

    def cancel(self) -> None:
        """Raise at the next token."""
        self._cancelled = True
