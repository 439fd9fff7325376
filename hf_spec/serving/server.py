"""``transformers serve`` for a target that guesses."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, HTTPException
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import split_model_id

from ..batching.refusals import refuse_batch
from ..checkpoints.resolve import as_speculator
from ..defaults import set_speculator
from ..drafts.base import Speculator, network_of
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from .app import add_to_app
from .batched import Batched
from .meter import Meter
from .requests import refuse_request
from .sequential import OneByOne


class Server(Serve):
    """Serve ``target`` as ``transformers serve`` does, with ``speculator`` guessing and ``/metrics`` for Prometheus.

    Everything about models, requests and answers is transformers' own. Runs until it is interrupted, or, with
    ``non_blocking=True``, in a thread until ``kill_server``.

    Args:
        target: directory or Hub id, the only model that is served.
        speculator: anything that ``set_speculator`` takes.
        config: how to guess; by default as the draft says. A function is asked once the draft is loaded.
        options: those of ``transformers serve``, by the names of its constructor.
    """

    def __init__(
        self,
        target: str,
        speculator: Any,
        config: SpeculationConfig | Callable[[Speculator], SpeculationConfig] | None = None,
        **options: Any,
    ) -> None:
        self.speculator, self.config, self.meter = speculator, config, Meter()
        self._in_thread = options.pop("non_blocking", False)
        super().__init__(target, **options, non_blocking=True)  # builds everything, then calls start_server

    def start_server(self) -> None:
        """Add what is ours to the server that transformers has built, and start it."""
        models: Any = self._model_manager
        (loaded,) = models.loaded_models.values()
        self._let_guess(loaded.model)
        models._load_model = _then(self._let_guess, models._load_model)  # it may be loaded anew, after POST /reset
        models.process_model_name = functools.partial(_only, models.force_model, models.process_model_name)
        listed = {"id": models.force_model, "object": "model", "created": int(time.time()), "owned_by": ""}
        models.get_gen_models = lambda: [listed]  # before 5.24 transformers lists all that was ever downloaded
        self._add_manager(models.process_model_name(split_model_id(models.force_model)[0]), loaded.model)
        handlers: dict[str, Any] = {
            "messages": self._chat_handler,
            "prompt": self._completion_handler,
            "input": self._response_handler,
        }
        for needs, handler in handlers.items():
            check = functools.partial(refuse_request, needs=needs)
            handler._validate_request = _first(check, handler._validate_request)
            if not self._generation_state._continuous_batching:  # where all requests draw from one stream
                handler._build_generation_config = _with_seed(handler._build_generation_config)
        add_to_app(cast(FastAPI, self.server.config.app), self.meter)
        if self._in_thread:
            super().start_server()  # type: ignore[no-untyped-call]
        else:
            self._run()

    def _add_manager(self, name: str, model: PreTrainedModel) -> None:
        """Let the texts of ``model`` be generated, and counted, our way."""
        state, meter = self._generation_state, self.meter
        manager: OneByOne | Batched
        if state._continuous_batching:
            manager = state._cb_manager = Batched(meter, state._cb_config)
            manager.init_cb(model, copy.deepcopy(model.generation_config))
            state._cb_model_id = name
            meter.gauge("cache_used", "Share of the paged cache that is taken.", manager.cache_used)
            meter.gauge("draft_slots", "Requests that the draft keeps something of.", manager.draft_slots)
        else:
            manager = state._generate_managers[name] = OneByOne(meter)
        meter.gauge("requests_running", "Texts that are being generated.", manager.running)
        meter.gauge("requests_waiting", "Texts that wait for their turn.", manager.waiting)

    def _run(self) -> None:
        try:
            self.server.run()
        finally:
            self._generation_state.shutdown()

    def _let_guess(self, model: PreTrainedModel) -> None:
        speculator = as_speculator(self.speculator, model)
        if (weights := network_of(speculator)) is not None:
            weights.to(input_device(model))
        config = self.config(speculator) if callable(self.config) else self.config
        if self._generation_state._continuous_batching:
            config = _of_batches(speculator, config)
            refuse_batch(model, model.generation_config, config)
        set_speculator(model, speculator, config)


def _of_batches(speculator: Speculator, config: SpeculationConfig | None) -> SpeculationConfig:
    """Return settings of guesses in continuous batching; unasked they are chains, and as deep as the load allows."""
    if config is None:
        config = speculator.settings(tree=None).merge(num_speculative_tokens=None)
    return config.merge(num_speculative_tokens=config.num_speculative_tokens or "auto")


def _only(target: str, process: Callable[[str], str], name: str) -> str:
    """Return the full ``name`` of the model that is served; ``POST /load_model`` would load others beside it."""
    if (full := process(name)) != process(split_model_id(target)[0]):
        raise HTTPException(400, f"this server serves {target!r} alone, not {name!r}; start another one for it")
    return full


def _with_seed(build: Callable[..., Any]) -> Callable[..., Any]:
    """Let the settings of a request keep its seed until its turn comes: set at once, it would be another text's."""

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


def _first(check: Callable[[dict[str, Any]], None], validate: Callable[[dict[str, Any]], None]) -> Any:
    @functools.wraps(validate)
    def validated(body: dict[str, Any]) -> None:
        check(body)
        validate(body)

    return validated
