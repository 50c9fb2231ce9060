"""Prometheus metrics: the engine's counters, read when asked, and latencies, observed as they come.

Names and meanings are vLLM's, with the prefix `flashkernel_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from flashkernel.engine.llm_engine import LLMEngine
from flashkernel.engine.outputs import RequestOutput

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
NEXT_TOKEN_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
REQUEST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class EngineCollector(Collector):
    """The engine's counters."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self._engine.stats()
        gauges: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Requests that hold KV cache blocks", stats.num_running),
            ("num_requests_waiting", "Requests in the queue", stats.num_waiting),
            ("kv_cache_used_blocks", "KV cache blocks that requests hold", stats.num_used_blocks),
            ("kv_cache_blocks", "KV cache blocks in all", stats.num_blocks),
            ("compiled_in_service", "Kernels compiled and graphs captured in service", stats.compiled_in_service),
            ("compiled_at_start", "Kernels that the start compiled, as no cache had them", stats.compiled_at_start),
        )
        counters: tuple[tuple[str, str, float], ...] = (
            ("prompt_tokens", "Prompt tokens of started requests", stats.prompt_tokens),
            ("prompt_tokens_cached", "Of those, tokens found in the prefix cache", stats.cached_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("num_preemptions", "Times that a request lost its blocks", stats.num_preemptions),
            ("engine_steps", "Steps computed", stats.num_steps),
            ("spec_decode_num_draft_tokens", "Tokens drafted by prompt look-up", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Of those, tokens that were kept", stats.num_accepted_tokens),
            ("engine_step_seconds", "Seconds that steps took", stats.step_s),
            ("engine_wait_seconds", "Of those, seconds that the host waited for the device", stats.wait_s),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"flashkernel_{name}", about, value)
        for name, about, value in counters:
            yield CounterMetricFamily(f"flashkernel_{name}", about, value)


class TokenLatencies(Collector):
    """A histogram that takes equal observations together, as those of one step are. For one thread."""

    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float, count: int) -> None:
        """Observes `count` tokens that took so long."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name, self._about, buckets=list(zip(names, accumulate(self._counts))), sum_value=self._sum
        )


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: LLMEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self._responses = self._counter("http_responses", "Responses, by path and status", "path", "status")
        self._requests = self._counter("request_success", "Finished requests, by finish reason", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self._requests.labels(reason)  # reported as zero from the start
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN_S)
        self._next = TokenLatencies(
            "flashkernel_inter_token_latency_seconds", "Between two tokens of a streamed request", NEXT_TOKEN_S
        )
        self.registry.register(self._next)
        self._mean = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after its first", NEXT_TOKEN_S
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end", REQUEST_S)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"flashkernel_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"flashkernel_{name}", about, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""
        self._responses.labels(path, str(status)).inc()

    def tokens(self, latency: float, count: int) -> None:
        """Observes tokens of streamed requests that came `latency` seconds after the ones before them."""
        self._next.observe(latency, count)

    def finished(self, output: RequestOutput) -> None:
        """Observes a finished request."""
        metrics, completion = output.metrics, output.outputs[0]
        self._requests.labels(completion.finish_reason).inc()
        self._whole.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.first_token_time is not None:
            self._first.observe(metrics.first_token_time - metrics.arrival_time)
            if len(completion.token_ids) > 1:
                decode_time = metrics.finished_time - metrics.first_token_time
                self._mean.observe(decode_time / (len(completion.token_ids) - 1))
