"""Servers on the loopback address for the tests, what their clients ask, and what plain ``generate`` answers."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from openai import APIError, APITimeoutError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo
from hf_spec.serving.server import Server

TARGET = str(demo.path())
DRAFT = demo.path("draft-eagle3")
# Room for 640 tokens in small blocks: a crowd does not fit, so that requests wait, and some are put aside.
BATCHES = {"continuous_batching": True, "cb_block_size": 16, "cb_num_blocks": 40, "cb_max_batch_tokens": 128}
PROMPTS = (
    "Once upon a time, there was a little dog",
    "Lily went to the park with",
    "Tom found a big red ball. The big red ball was",
    "Sara and Ben",
    "The sun was",
)


@contextmanager
def serving(speculator: Any = DRAFT, config: Any = None, target: str = TARGET, **options: Any) -> Iterator[Client]:
    """Run a server in a thread and yield a client of it."""
    options = {"device": "cpu", "dtype": "float32", "port": 0, "non_blocking": True} | options
    server = Server(target, speculator, config, **options)
    try:
        until(lambda: server.server.started)
        yield Client(server)
    finally:
        server.kill_server()


def until(done: Callable[[], Any], seconds: float = 120) -> None:
    """Wait for what must come."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


class Client:
    """Ask a server with the official client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        port = server.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://localhost:{port}"
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def complete(self, prompt: str, new: int, stream: bool = False, pause: float = 0, **options: Any) -> str:
        """Return the text that follows ``prompt``; ``pause`` after each piece of a stream."""
        options = {"model": TARGET, "prompt": prompt, "max_tokens": new, "temperature": 0} | options
        if not stream:
            return self.openai.completions.create(**options).choices[0].text
        text = ""
        for chunk in self.openai.completions.create(stream=True, **options):
            text += chunk.choices[0].text
            time.sleep(pause)
        return text

    def leave(self, prompt: str, pieces: int, stream: bool = True) -> None:
        """Ask for a long text, and close the connection after some pieces of it, or while waiting for the whole."""
        options: dict[str, Any] = {"model": TARGET, "prompt": prompt, "max_tokens": 900, "temperature": 0}
        options["extra_body"] = {"generation_config": '{"max_new_tokens": 900, "eos_token_id": 2047}'}  # no early end
        if not stream:
            with pytest.raises(APITimeoutError):
                self.openai.with_options(timeout=0.3).completions.create(**options)
            return
        with self.openai.completions.create(stream=True, **options) as answer:
            for _, _ in zip(range(pieces), answer, strict=False):
                pass

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Send what the official client would not, and return the status and what is answered."""
        headers["Content-Type"] = "application/json"
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def metrics(self) -> dict[str, float]:
        """Read ``/metrics``: a number by name, or by name and value of the label."""
        text = self.openai.get(f"{self.url}/metrics", cast_to=str)
        return {
            ".".join(
                [sample.name.removeprefix("hf_spec_"), *(v for k, v in sample.labels.items() if k != "endpoint")]
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def is_idle(self) -> bool:
        """Tell whether nothing runs, nothing waits, and nothing is kept of what did."""
        engine = self.server._generation_state._cb_manager
        if engine is not None and engine.running() == engine.waiting() == 0:
            engine._scheduler.cache.evict_cached_blocks()  # prefixes that are kept for later
        found = self.metrics()
        handlers = 0 if engine is None or engine._cb is None else len(engine._cb.output_router.result_handlers)
        kept = found.get("cache_used", 0) + found.get("draft_slots", 0) + handlers
        return found["requests_running"] == found["requests_waiting"] == kept == 0


@cache
def target() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32), AutoTokenizer.from_pretrained(TARGET)


@cache
def plain(prompt: str, new: int, stop: str | None = None) -> str:
    """Return the text of plain ``generate``."""
    model, tokenizer = target()
    inputs = tokenizer(prompt, return_tensors="pt")
    options = {} if stop is None else {"stop_strings": stop, "tokenizer": tokenizer}
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)
    return str(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def crowd(client: Client, requests: int, seed: int = 0, lengths: tuple[int, ...] = (1, 2, 7, 24, 60)) -> int:
    """Send many requests at a time, good, bad, cancelled and slowly read ones; return how many texts were compared."""
    rng = random.Random(seed)
    asked = [(rng.choice(PROMPTS), rng.choice(lengths), rng.random()) for _ in range(requests)]

    def ask(request: tuple[str, int, float]) -> bool:
        prompt, new, kind = request
        if kind < 0.1:
            client.leave(prompt, pieces=new, stream=kind < 0.07)
        elif kind < 0.2:
            with pytest.raises(APIError, match="max_tokens"):
                client.complete(prompt, new=-1)
        else:
            text = client.complete(prompt, new, stream=kind < 0.6, pause=0.05 if kind < 0.3 else 0)
            assert text == plain(prompt, new), request
            return True
        return False

    for prompt, new, _ in asked:
        plain(prompt, new)
    with ThreadPoolExecutor(requests) as pool:
        return sum(pool.map(ask, asked))
