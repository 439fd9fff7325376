"""Additions to the web application of transformers' server: metrics, cancelled requests and OpenAI's errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from .guard import error_answer, guard
from .meter import CONTENT_TYPE_LATEST, Meter
from .policy import Policy
from .preparing import LEAVING

# Errors of the client: bad values, bodies that are no JSON objects, and chats that the model's template rejects.
MISTAKES = (ValueError, RequestValidationError, TemplateError)
UNREADABLE = "There was an error parsing the body"  # what FastAPI says of it
CLOSED_BY_CLIENT = "499"  # the status that nginx logs


def add_to_app(app: FastAPI, meter: Meter, policy: Policy) -> None:
    """Add ``/metrics``, count requests, cancel those whose clients have gone, and format errors as OpenAI does."""
    guard(app, policy)
    app.add_api_route("/metrics", lambda: Response(meter.text(), media_type=CONTENT_TYPE_LATEST))
    app.add_middleware(_Watch, meter=meter)

    for kind in (HTTPException, *MISTAKES, CBWorkerDeadError, Exception):
        app.add_exception_handler(kind, _error_response)


def _error_response(request: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, MISTAKES) else 503 if isinstance(error, CBWorkerDeadError) else 500
    status, headers = getattr(error, "status_code", status), getattr(error, "headers", None) or {}
    message = str(getattr(error, "detail", "") or error or type(error).__name__)
    if isinstance(error, RequestValidationError):
        message = "; ".join(map(_why_no_object, error.errors()))
    elif message == UNREADABLE:
        message = "the body cannot be read: it is not UTF-8, or nested too deep, or holds a number of too many digits."
    elif status in (404, 405) and message in ("Not Found", "Method Not Allowed"):
        instead = f"it takes {headers['Allow']}" if "Allow" in headers else "docs/serving.md lists what there is"
        message = f"there is no {request.method} {request.url.path}; {instead}."
    message = message.encode(errors="replace").decode()  # it may quote half of a surrogate pair
    return error_answer(status, message, **headers)


def _why_no_object(found: dict[str, Any]) -> str:
    """Say what is wrong with a body, of which FastAPI has ``found`` that it is no JSON object."""
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found['ctx']['error']}, at character {found['loc'][-1] + 1}."
    if found["type"] == "missing":
        return "the body is empty; send a JSON object."
    if isinstance(found.get("input"), bytes):
        return "the body is not read as JSON; send the header Content-Type: application/json."
    if found["loc"] == ("body",):
        return f"the body is JSON of another kind ({type(found.get('input')).__name__}); send a JSON object."
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


class _Watch:
    """Middleware that counts requests by status, and cancels a request when its client closes the connection.

    Without it, an answer that is not streamed is generated to its end, although nobody waits for it.
    """

    def __init__(self, app: Any, meter: Meter) -> None:
        self.app, self.meter = app, meter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(self.app, scope, receive, send)
        start = time.perf_counter()
        try:
            await answer.give()
        finally:
            endpoint = getattr(scope.get("route"), "path", "other")
            self.meter.requests.labels(endpoint, answer.status).inc()
            self.meter.seconds.labels(endpoint).observe(time.perf_counter() - start)


class _Answer:
    """One answer, which is cancelled when the client leaves."""

    def __init__(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        self.receive, self.send = receive, send
        self.status, self.complete = "500", False
        self.messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self.leaving: list[Callable[[], None]] = []
        LEAVING.set(self.leaving)
        self.task = asyncio.ensure_future(app(scope, self.messages.get, self._send))

    async def give(self) -> None:
        """Wait until the answer is given, or the client has gone."""
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.task
        except asyncio.CancelledError:
            for cancel in self.leaving:  # a stream that has not begun does not notice the cancellation
                cancel()
            if self.status != CLOSED_BY_CLIENT:  # cancelled by the server itself
                raise
        finally:
            watch.cancel()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
        await self.send(message)
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def _watch(self) -> None:
        while (message := await self.receive())["type"] != "http.disconnect":
            await self.messages.put(message)
        if not self.complete:  # the same message comes after a complete answer
            self.status = CLOSED_BY_CLIENT
            self.task.cancel()
        await self.messages.put(message)
