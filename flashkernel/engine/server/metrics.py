"""What Prometheus is told: counts of the engine, read when asked, and times, noted as they come."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from flashkernel.engine.core import Engine
from flashkernel.engine.sequence import Completion

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
NEXT_TOKEN_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
REQUEST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class EngineCounts(Collector):
    """The engine's own counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        now = self._engine.stats()
        for name, about, value in (
            ("running", "Requests that are computed", now.running),
            ("waiting", "Requests in the queue", now.waiting),
            ("pages_in_use", "Pages of keys and values that requests hold", now.pages_in_use),
            ("pages", "Pages of keys and values there are", now.pages),
        ):
            yield GaugeMetricFamily(f"flashkernel_{name}", about, value)
        for name, about, value in (
            ("prompt_tokens", "Tokens of prompts that were begun", now.prompt_tokens),
            ("cached_prompt_tokens", "Of those, tokens found in the cache", now.cached_tokens),
            ("generated_tokens", "Tokens generated", now.generated_tokens),
            ("preemptions", "Times that a request gave its pages back to wait", now.preemptions),
            ("steps", "Batches computed", now.steps),
        ):
            yield CounterMetricFamily(f"flashkernel_{name}", about, value)


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCounts(engine))
        self._responses = Counter(
            "flashkernel_http_responses", "Answers, by path and status", ["path", "status"], registry=registry
        )
        self._requests = Counter(
            "flashkernel_requests", "Requests the engine is done with, by how they ended", ["reason"], registry=registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._requests.labels(reason)  # a zero is told as well
        self._first = Histogram(
            "flashkernel_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._next = Histogram(
            "flashkernel_inter_token_seconds",
            "Between two tokens of a streamed request",
            buckets=NEXT_TOKEN_S,
            registry=registry,
        )
        self._mean = Histogram(
            "flashkernel_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first",
            buckets=NEXT_TOKEN_S,
            registry=registry,
        )
        self._whole = Histogram(
            "flashkernel_request_seconds",
            "From a request's arrival to its end",
            buckets=REQUEST_S,
            registry=registry,
        )

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def token(self, before: float | None, now: float) -> None:
        """A streamed request has a token; `before` is when it had the one before."""
        if before is not None:
            self._next.observe(now - before)

    def finished(self, done: Completion) -> None:
        timing = done.timing
        self._requests.labels(done.reason).inc()
        self._whole.observe(timing.finished - timing.arrived)
        if timing.first_token is not None:
            self._first.observe(timing.first_token - timing.arrived)
            if len(done.tokens) > 1:
                self._mean.observe((timing.finished - timing.first_token) / (len(done.tokens) - 1))
