"""Changes to single endpoints of transformers' server: what each refuses, and the errors that it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request
from jinja2 import TemplateError
from starlette.datastructures import UploadFile

from .policy import Policy


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
