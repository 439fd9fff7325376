"""Statistics of a single request in its answer, under vLLM's names: ``metrics.speculative_decoding``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse

from ..metrics import Counts, SpeculationStats

SEPARATORS = (",", ":")  # as in transformers' answers


def acceptance_of(counts: Counts) -> dict[str, Any]:
    """Return the figures of a text under vLLM's names; none if no step drafted.

    Only steps that drafted count, so ``mean_acceptance_length`` may be larger than τ, which counts all steps.
    ``acceptance_histogram[j]`` counts the steps that accepted exactly ``j`` draft tokens. ``num_spec_tokens`` is the
    longest draft of a step.
    """
    if not counts.proposed_at:
        return {}
    steps = counts.proposed_at[0]
    at_least = [steps, *counts.accepted_at, 0]
    return {
        "mean_acceptance_length": 1 + counts.accepted / steps,
        "draft_acceptance_rate": counts.acceptance_rate,
        "acceptance_histogram": [held - more for held, more in itertools.pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.proposed,
        "num_spec_tokens": len(counts.proposed_at),
    }


class Acceptance:
    """The figures of one request: its manager records them when the text ends, and its answer shows them."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def record(self, stats: SpeculationStats | None) -> None:
        """Keep the figures of ``stats`` as they are now; None: the text was generated plainly."""
        self.figures = {} if stats is None else acceptance_of(stats.counts)

    def add_to(self, answer: Any) -> bool:
        """Add the figures to an answer, or an event of a stream, that has ``usage``; tell whether it has."""
        place = answer.get("response", answer) if isinstance(answer, dict) else None  # an event of /v1/responses
        if not (self.figures and isinstance(place, dict) and place.get("usage")):
            return False
        place["metrics"] = {"speculative_decoding": self.figures}
        return True


_OF_REQUEST: contextvars.ContextVar[Acceptance] = contextvars.ContextVar("_OF_REQUEST")


def acceptance_of_request() -> Acceptance:
    """Return where the figures of the request that is being handled are recorded."""
    return _OF_REQUEST.get(Acceptance())


def with_acceptance(handle: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Let ``handle`` show the figures of each request in its answer, or in the event with ``usage`` of its stream."""

    @functools.wraps(handle)
    async def handled(*args: Any) -> Any:
        own = Acceptance()
        _OF_REQUEST.set(own)
        answer = await handle(*args)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _streamed(answer.body_iterator, own)
        elif isinstance(answer, JSONResponse) and own.add_to(content := json.loads(bytes(answer.body))):
            return JSONResponse(content, answer.status_code)
        return answer

    return handled


async def _streamed(pieces: AsyncIterable[Any], own: Acceptance) -> AsyncGenerator[Any, None]:
    """Pass on the ``pieces`` of a stream, each of whole events."""
    async with contextlib.aclosing(pieces) if isinstance(pieces, AsyncGenerator) else contextlib.nullcontext():
        async for piece in pieces:
            yield "\n\n".join(_event(event, own) for event in piece.split("\n\n")) if own.figures else piece


def _event(event: str, own: Acceptance) -> str:
    name, found, data = event.partition("data: ")
    if not found or '"usage":' not in data:  # a text cannot hold it: its quotes are escaped
        return event
    content = json.loads(data)
    return (
        name + found + json.dumps(content, ensure_ascii=False, separators=SEPARATORS) if own.add_to(content) else event
    )
