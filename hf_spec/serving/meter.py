"""The metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..metrics import Counts

__all__ = ["CONTENT_TYPE_LATEST", "Meter"]

# Buckets of the histogram: answers of language models take from fractions of a second to minutes.
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Meter:
    """Counts of requests, tokens and draft tokens of one server, in a registry of its own.

    Tokens are those of finished texts, and of cancelled ones up to the cancellation. Draft tokens are those of
    finished texts only.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests.", ["endpoint", "status"])
        self.seconds = Histogram(
            "hf_spec_request_seconds",
            "Seconds from a request to the end of its answer.",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.texts = self._counter("texts", "Generated texts, by how they ended.", ["end"])
        self.plain = self._counter(
            "plain_texts", "Texts that were generated plainly, because the options allow no speculation."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of generated texts.")
        self.steps = self._counter("steps", "Verification steps, counted once for each text.")
        self.proposed = self._counter("proposed_tokens", "Draft tokens.")
        self.accepted = self._counter("accepted_tokens", "Draft tokens that were accepted.")
        self.emitted = self._counter("emitted_tokens", "Tokens that steps emitted, the target's own included.")
        self._counts = Counts()
        self.gauge("acceptance_rate", "Share of draft tokens that were accepted, since the start.", self._acceptance)
        self.gauge("mean_accepted_length", "Tokens that a step emits, since the start: tau.", self._length)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a gauge that calls ``value`` whenever it is read."""
        Gauge(f"hf_spec_{name}", meaning, registry=self.registry).set_function(value)

    def add_counts(self, counts: Counts) -> None:
        """Count the draft tokens of a text."""
        self._counts.add(counts)
        for counter, name in (
            (self.steps, "steps"),
            (self.proposed, "proposed"),
            (self.accepted, "accepted"),
            (self.emitted, "emitted"),
        ):
            counter.inc(getattr(counts, name))

    def text(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"hf_spec_{name}", meaning, labels or (), registry=self.registry)

    def _acceptance(self) -> float:
        return self._counts.acceptance_rate

    def _length(self) -> float:
        return self._counts.mean_accepted_length
