"""``transformers serve`` with speculative decoding."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any, cast

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import Modality, split_model_id

from ..batching.refusals import refuse_batch
from ..checkpoints.resolve import as_speculator
from ..defaults import set_speculator
from ..drafts.base import Speculator, network_of
from ..invariance.mode import is_invariant
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from .acceptance import with_acceptance
from .app import add_to_app
from .batched import Batched
from .endpoints import (
    keep_unreadable_calls,
    not_batched,
    only_of,
    only_speech,
    replace_route,
    report_template_errors,
    route_of,
    with_limit,
)
from .media import fetches
from .meter import Meter
from .policy import Policy, check_address
from .preparing import Preparer
from .requests import refuse_request, refuse_template_arguments
from .sequential import OneByOne

FETCHERS = 64  # requests at a time whose pictures and sounds are fetched


class Server(Serve):
    """A server as of ``transformers serve``, with ``speculator`` as draft and ``/metrics`` for Prometheus.

    Everything about models, requests and answers is transformers' own. It runs until it is interrupted, or, with
    ``non_blocking=True``, in a thread until ``kill_server``.

    Args:
        target: directory or Hub id, the only model that is served.
        speculator: anything that ``set_speculator`` takes.
        config: settings of speculation; the draft's own by default. A function is called with the loaded draft.
        loaded: called with the target and its speculator whenever the target was loaded, to pack them, for example.
        options: those of ``transformers serve``, by the names of its constructor, and the fields of ``Policy``.

    Errors: a ValueError or an OSError if it cannot listen at the address, before anything is loaded.
    """

    def __init__(
        self,
        target: str,
        speculator: Any,
        config: SpeculationConfig | Callable[[Speculator], SpeculationConfig] | None = None,
        loaded: Callable[[PreTrainedModel, Speculator], None] | None = None,
        **options: Any,
    ) -> None:
        self.speculator, self.config, self.meter = speculator, config, Meter()
        self.preparer, self._then = Preparer(), loaded
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetching")
        self._in_thread = options.pop("non_blocking", False)
        self.policy = Policy(**{one.name: options.pop(one.name) for one in fields(Policy) if one.name in options})
        check_address(options.get("host", "localhost"), options.get("port", 8000))
        super().__init__(target, **options, non_blocking=True)  # builds everything, then calls start_server

    def start_server(self) -> None:
        """Add speculation, checks and metrics to the server that transformers has built, and start it."""
        models: Any = self._model_manager
        (loaded,) = models.loaded_models.values()
        self._refuse_target(loaded.model)
        self._set_speculator(loaded.model)
        # The model may be loaded again, after POST /reset.
        models._load_model = _then(self._set_speculator, models._load_model)
        for change in (report_template_errors, keep_unreadable_calls):
            models._load_processor = _then(change, models._load_processor)
            change(loaded.processor)
        listed = {"id": models.force_model, "object": "model", "created": int(time.time()), "owned_by": ""}
        models.get_gen_models = lambda: [listed]  # before 5.24 transformers lists all cached models
        self._add_manager(models.process_model_name(split_model_id(models.force_model)[0]), loaded.model)
        self._prepare_outside()
        app = cast(FastAPI, self.server.config.app)
        replace_route(app, "/reset", self._reset_in_turn)
        replace_route(app, "/load_model", only_of(models.force_model, route_of(app, "/load_model").endpoint))
        add_to_app(app, self.meter, self.policy)
        self.server.config.timeout_graceful_shutdown = self.policy.shutdown_seconds
        if self._in_thread:
            super().start_server()  # type: ignore[no-untyped-call]
        else:
            self._run()

    def _refuse_target(self, model: PreTrainedModel) -> None:
        """Raise a ValueError for a target whose requests would all fail."""
        models: Any = self._model_manager
        encodes, batched = model.config.is_encoder_decoder, self._generation_state._continuous_batching
        if encodes and not self._hears():
            raise ValueError(
                f"{models.force_model!r} is an encoder-decoder model that hears nothing, and the server answers for "
                "decoder-only models and for speech: call its generate(..., speculator=...) in Python"
            )
        if encodes or not batched:
            return
        if models.get_model_modality(model, processor=self._processor()) is not Modality.LLM:
            raise ValueError(  # transformers would give each request to a manager of its own, without batches
                f"{models.force_model!r} reads pictures or sounds, and transformers' server batches requests of text "
                "models alone: start it without --continuous-batching"
            )

    def _prepare_outside(self) -> None:
        """Check and prepare requests outside the event loop."""
        batched = self._generation_state._continuous_batching
        takes_seeds = not (batched and is_invariant(self._model()))
        handlers: dict[str, Any] = {
            "messages": self._chat_handler,
            "prompt": self._completion_handler,
            "input": self._response_handler,
            "questions": self._systemone_handler,
        }
        for needs, handler in handlers.items():
            check = functools.partial(refuse_request, policy=self.policy, needs=needs, takes_seeds=takes_seeds)
            handler._validate_request = _check_first(check, handler._validate_request)
            handler._resolve_model = _and_template(handler._resolve_model)
            handler.handle_request = self.preparer.around(handler.handle_request)
            if self.policy.media_hosts:
                handler.handle_request = self._fetching_before(handler.handle_request, check)
            handler._build_generation_config = _with_seed(handler._build_generation_config)
        if self.policy.per_request_spec_decode_metrics == "summary":
            for texts in (self._chat_handler, self._completion_handler, self._response_handler):
                cast(Any, texts).handle_request = with_acceptance(texts.handle_request)
        systemone: Any = self._systemone_handler
        systemone._pipeline = with_limit(systemone._pipeline, self.policy)
        if batched:
            systemone.handle_request = not_batched
        target, transcribes = cast(Any, self._model_manager).force_model, cast(Any, self._transcription_handler)
        transcribes.handle_request = only_speech(target, transcribes.handle_request, self._hears())

    def _fetching_before(self, handle: Callable[..., Any], check: Callable[[dict[str, Any]], None]) -> Any:
        """Fetch pictures and sounds of requests, which are checked before, in threads of their own.

        So a slow host delays no request that it has no part in. The handler checks the request again, with the
        content in place of the addresses.
        """

        @functools.wraps(handle)
        async def handled(body: dict[str, Any], *args: Any) -> Any:
            if fetches(body):
                await asyncio.get_running_loop().run_in_executor(self._fetchers, check, body)
            return await handle(body, *args)

        return handled

    def _model(self) -> Any:
        (loaded,) = self._model_manager.loaded_models.values()
        return loaded.model

    def _processor(self) -> Any:
        (loaded,) = self._model_manager.loaded_models.values()
        return loaded.processor

    def _hears(self) -> bool:
        return hasattr(self._processor(), "feature_extractor")

    async def _reset_in_turn(self) -> JSONResponse:
        await self.preparer.call(self._reset)  # between two requests, so that none is left without its model
        return JSONResponse({"status": "ok"})

    def _reset(self) -> None:
        """Unload the model; the next request loads it. Texts that are being generated go on with the old one."""
        manager: Any = self._generation_state._cb_manager
        if manager is not None:
            manager.reset()
        self._model_manager.shutdown()

    def _add_manager(self, name: str, model: PreTrainedModel) -> None:
        """Replace transformers' manager of ``model`` by one of ours, which also counts."""
        state, meter = self._generation_state, self.meter
        manager: OneByOne | Batched
        if state._continuous_batching:
            manager = state._cb_manager = Batched(meter, state._cb_config, self.policy)
            manager.init_cb(model, copy.deepcopy(model.generation_config))
            state._cb_model_id = name
            meter.gauge("cache_used", "Share of the paged cache that is taken.", manager.cache_used)
            meter.gauge("draft_slots", "Requests that the draft holds state for.", manager.draft_slots)
        else:
            manager = state._generate_managers[name] = OneByOne(meter, self.policy)
        meter.gauge("requests_running", "Texts that are being generated.", manager.running)
        meter.gauge("requests_waiting", "Texts that wait to be generated.", manager.waiting)

    def kill_server(self) -> None:
        """Stop a server that was started with ``non_blocking=True``."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        super().kill_server()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        try:
            self.server.run()
        finally:
            self._fetchers.shutdown(wait=False, cancel_futures=True)
            self._generation_state.shutdown()
            for manager in self._generation_state._generate_managers.values():
                manager.stop()

    def _set_speculator(self, model: PreTrainedModel) -> None:
        speculator = as_speculator(self.speculator, model)
        if (weights := network_of(speculator)) is not None:
            weights.to(input_device(model))
        if self._then is not None:
            self._then(model, speculator)
        config = self.config(speculator) if callable(self.config) else self.config
        if self._generation_state._continuous_batching:
            config = _batched_settings(speculator, config)
            refuse_batch(model, model.generation_config, config, speculator)
        set_speculator(model, speculator, config)


def _batched_settings(speculator: Speculator, config: SpeculationConfig | None) -> SpeculationConfig:
    """Return the settings in continuous batching: by default chains, of a length that depends on the load."""
    if config is None:
        config = speculator.settings(tree=None).merge(num_speculative_tokens=None)
    return config.merge(num_speculative_tokens=config.num_speculative_tokens or "auto")


def _and_template(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments of the chat template; a model that cannot be loaded is not the client's error."""

    @functools.wraps(resolve)
    def resolved(body: dict[str, Any]) -> Any:
        try:
            found = resolve(body)
        except HTTPException:
            raise
        except Exception as error:
            raise RuntimeError(f"the model cannot be loaded: {error}") from error
        refuse_template_arguments(body, getattr(found[2], "chat_template", None))
        return found

    return resolved


def _with_seed(build: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the seed of a request in its settings until its text begins: set earlier, it would act on another text."""

    @functools.wraps(build)
    def built(body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = build(body | {"seed": None}, *args, **kwargs)
        config.seed = body.get("seed")
        return config

    return built


def _then(more: Callable[[Any], None], load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        more(model)
        return model

    return loaded


def _check_first(check: Callable[[dict[str, Any]], None], validate: Callable[[dict[str, Any]], Any]) -> Any:
    @functools.wraps(validate)
    def validated(body: dict[str, Any]) -> Any:
        check(body)
        return validate(body)

    return validated
