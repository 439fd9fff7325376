"""Changes to single endpoints of transformers' server: what each refuses, and the errors that it returns."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request
from jinja2 import TemplateError
from starlette.datastructures import UploadFile
from transformers.utils import logging

from ..scoring.plain import tokenizer_in
from .policy import Policy

logger = logging.get_logger(__name__)
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)  # what a malformed tool call raises
AS_TEXT = "a tool call that is cut off or malformed is passed on as text"


def route_of(app: FastAPI, path: str) -> Any:
    """Return the route of an endpoint."""
    return next(route for route in app.router.routes if getattr(route, "path", None) == path)


def replace_route(app: FastAPI, path: str, endpoint: Callable[..., Any]) -> None:
    """Let ``endpoint`` answer POST requests to ``path``."""
    app.router.routes.remove(route_of(app, path))
    app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


def only_of(target: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict ``load``, the endpoint that loads models, to the served one, by the name the server was started with.

    Any other spelling, a revision or a file of it, would be loaded as a second model.
    """

    async def load_model(body: dict[str, Any]) -> Any:
        if body.get("model") != target:
            raise HTTPException(400, f"this server serves {target!r} alone; start another one for other models")
        return await load(body)

    return load_model


def only_speech(target: str, transcribe: Callable[..., Any], hears: bool) -> Callable[..., Any]:
    """Restrict ``transcribe`` to speech models, which the target is if it ``hears``, and complete requests."""

    async def transcribed(request: Request) -> Any:
        if not hears:
            raise HTTPException(400, f"{target!r} is no model of speech")
        form = await request.form()  # the request keeps the form, so it can be read again
        if not isinstance(form.get("file"), UploadFile):
            raise HTTPException(400, "file: it is left out, or no file")
        if form.get("model") != target:
            raise HTTPException(400, f"model: this server serves {target!r} alone")
        return await transcribe(request)

    return transcribed


async def not_batched(_body: dict[str, Any], _request_id: str) -> Any:
    """Refuse decisions in continuous batching, which changes the attention of the target."""
    raise HTTPException(400, "decisions need a server without --continuous-batching")


def with_limit(pipeline_of: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Let the pipelines of ``pipeline_of`` refuse prompts that are too long for the policy, all questions together."""

    @functools.wraps(pipeline_of)
    def limited(*args: Any) -> Any:
        pipeline = pipeline_of(*args)
        if "preprocess" not in vars(pipeline):
            pipeline.preprocess = _counted(pipeline.preprocess, policy)
        return pipeline

    return limited


def _counted(preprocess: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    @functools.wraps(preprocess)
    def counted(*args: Any, **kwargs: Any) -> Any:
        found = preprocess(*args, **kwargs)
        size, most = sum(inputs["input_ids"].shape[-1] for inputs, _ in found["prompts"]), policy.max_prompt_tokens
        if size > most:
            raise ValueError(f"the prompts have {size} tokens, and this server takes {most} (--max-prompt-tokens)")
        return found

    return counted


def report_template_errors(processor: Any) -> None:
    """Let ``processor`` answer 400 for a chat, or an image in it, that it rejects, whatever its code raises."""
    render = processor.apply_chat_template

    @functools.wraps(render)
    def rendered(*args: Any, **kwargs: Any) -> Any:
        try:
            return render(*args, **kwargs)
        except (HTTPException, MemoryError):
            raise
        except Exception as error:
            said = str(error) if isinstance(error, ValueError | TemplateError) else f"{type(error).__name__}: {error}"
            raise HTTPException(400, f"the model's chat template does not take these messages: {said}") from error

    cast(Any, processor).apply_chat_template = rendered


def keep_unreadable_calls(processor: Any) -> None:
    """Let ``processor`` return a complete answer as text if a tool call in it is cut off or malformed."""
    tokenizer = tokenizer_in(processor)
    parse = tokenizer.parse_response

    @functools.wraps(parse)
    def parsed(response: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = parse(response, *args, **kwargs)
            for call in found.get("tool_calls") or ():
                _check_call(call)
        except UNREADABLE:
            logger.warning_once(AS_TEXT)
            return {"content": tokenizer.decode(response, skip_special_tokens=True)}
        return found

    tokenizer.parse_response = parsed


def _check_call(call: Any) -> None:
    """Raise one of ``UNREADABLE`` for a tool call without a name or arguments."""
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError("the name is no text")
    _ = function["arguments"]


class TolerantParser:
    """A parser of streamed answers that passes on a tool call which it cannot read as text, and all that follows."""

    def __init__(self, parser: Any, processor: Any) -> None:
        self._parser, self._tokenizer = parser, tokenizer_in(processor)
        self.initial_events = parser.initial_events
        self._unsent, self._reads = "", True

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the events of further text."""
        self._unsent += text
        return self._events(lambda: self._parser.feed(text))

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the last events, after a message that streams do not read."""
        return {}, self._events(lambda: self._parser.finalize()[1])

    def _events(self, parse: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        if self._reads:
            try:
                events = parse()
                for event in events:
                    if event["type"] == "region_close" and event["field"] == "tool_calls":
                        _check_call(event["value"])
            except UNREADABLE:
                logger.warning_once(AS_TEXT)
                self._reads = False
            else:
                for event in events:
                    if event["type"] == "region_chunk" and not event["dirty"]:  # dirty: a call, sent at its end
                        self._unsent = self._unsent.rpartition(event["text"])[2]
                if events and events[-1]["type"] == "region_close":
                    self._unsent = ""
                return events
        text, self._unsent = self._special.sub("", self._unsent), ""
        return [{"type": "region_chunk", "field": "content", "text": text}]

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Match what other streams leave out."""
        special = (str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        return re.compile("|".join(map(re.escape, special)) or "(?!)")
