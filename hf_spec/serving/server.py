"""``transformers serve`` for a target that guesses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import split_model_id

from ..checkpoints.resolve import as_speculator
from ..defaults import set_speculator
from ..drafts.base import Speculator
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from .app import add_to_app
from .meter import Meter
from .requests import refuse_request
from .sequential import OneByOne

if TYPE_CHECKING:
    from fastapi import FastAPI


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
        for timed in models.loaded_models.values():
            self._let_guess(timed.model)
        models._load_model = _then(self._let_guess, models._load_model)  # they may be loaded anew, by POST /reset
        name = models.process_model_name(split_model_id(models.force_model)[0])
        self._generation_state._generate_managers[name] = one_by_one = OneByOne(self.meter)
        handlers: dict[str, Any] = {
            "messages": self._chat_handler,
            "prompt": self._completion_handler,
            "input": self._response_handler,
        }
        for needs, handler in handlers.items():
            check = functools.partial(refuse_request, needs=needs)
            handler._validate_request = _first(check, handler._validate_request)
        self.meter.gauge("requests_running", "Texts that are being generated.", lambda: one_by_one.running)
        self.meter.gauge("requests_waiting", "Texts that wait for their turn.", one_by_one.waiting)
        add_to_app(cast("FastAPI", self.server.config.app), self.meter)
        if self._in_thread:
            super().start_server()  # type: ignore[no-untyped-call]
        else:
            self._run()

    def _run(self) -> None:
        try:
            self.server.run()
        finally:
            self._generation_state.shutdown()

    def _let_guess(self, model: PreTrainedModel) -> None:
        speculator = as_speculator(self.speculator, model)
        weights = getattr(speculator, "model", speculator)
        if isinstance(weights, torch.nn.Module):
            weights.to(input_device(model))
        set_speculator(model, speculator, self.config(speculator) if callable(self.config) else self.config)


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
