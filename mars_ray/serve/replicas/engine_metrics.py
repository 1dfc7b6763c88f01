"""The Prometheus metrics of one engine, under the names that vLLM's dashboards use, with the prefix `mars:`.

In:    requests, their chunks as these leave the engine, and the state of the engine.
Out:   Prometheus text.
Never: lets a caller determine the value of a label.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would add a series per metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


class EngineMetrics:
    """The metrics of one engine. `clock` returns seconds."""

    def __init__(self, *, model: str, replica: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "replica": replica}
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.forwards = self._counter("sequence_forwards", "Forwards that produced a token, counted per sequence.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self.first_token = self._seconds(
            "time_to_first_token", "Seconds from the arrival of a request to its first token."
        )
        self.inter_token = self._seconds(
            "inter_token_latency", "Seconds per token; the tokens of one step share its time equally."
        )
        self.whole = self._seconds("e2e_request_latency", "Seconds from the arrival of a request to its last token.")
        self.queued = self._seconds("request_queue_time", "Seconds from the arrival of a request to its first step.")
        self.accepted = self._histogram("accepted_tokens", "Tokens that a forward produced for a sequence.", TOKENS)
        self.block = self._histogram("block", "Tokens that a forward proposed for a sequence.", TOKENS)
        self.success = Counter(
            "mars:request_success",
            "Sequences that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._running = self._gauge("num_requests_running", "Sequences that have a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences in the queue.")
        self._kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of the cache that is filled, 0 to 1.")
        self._steps = self._gauge("engine_steps", "Steps that ran a forward so far.")
        self._preemptions = self._gauge("num_preemptions", "Sequences preempted so far.")
        self._threshold = Gauge(
            "mars:threshold",
            "Threshold of requests that do not set one.",
            [*self._labels, "service_class"],
            registry=self._registry,
        )
        self._slow_steps = Gauge(
            "mars:rehearsal_slow_steps",
            "Steps slower than on the rehearsed machine so far. With this metric, all times have a modelled step time.",
            [*self._labels, "machine"],
            registry=self._registry,
        )
        self._threshold_changes = self._gauge("threshold_changes", "Changes of the threshold so far.")
        self._curve = self._by_threshold("tokens_per_forward", "Tokens per forward, by threshold.")
        self._agreement = self._by_threshold(
            "agreement", "Share of tokens that autoregressive decoding would also choose."
        )

    def begin(self, request: Request) -> "RequestObserver":
        """Return an observer for a request that arrives now."""
        return RequestObserver(self, request)

    def ended(self, reason: str) -> None:
        """Count a sequence that has ended."""
        self.success.labels(**self._labels, finished_reason=reason).inc()

    def text(self, state: EngineState) -> str:
        """Return all metrics as Prometheus text, with the gauges of `state`."""
        self._running.set(state.running)
        self._waiting.set(state.waiting)
        self._kv_cache_usage.set(state.kv_cache_usage)
        self._steps.set(state.steps)
        self._preemptions.set(state.preemptions)
        for service_class in state.classes:
            self._threshold.labels(**self._labels, service_class=service_class.name).set(service_class.threshold)
        self._threshold_changes.set(state.threshold_changes)
        if state.rehearsal:
            self._slow_steps.labels(**self._labels, machine=state.rehearsal.name).set(state.rehearsal.slow_steps)
        for point in state.profile:
            labels = self._labels | {"threshold": f"{point.threshold:g}"}
            self._curve.labels(**labels).set(point.tokens_per_forward)
            if point.agreement is not None:
                self._agreement.labels(**labels).set(point.agreement)
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"mars:{name}", meaning, list(self._labels), registry=self._registry).labels(**self._labels)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"mars:{name}", meaning, list(self._labels), registry=self._registry).labels(**self._labels)

    def _by_threshold(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"mars:{name}", meaning, [*self._labels, "threshold"], registry=self._registry)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return self._histogram(f"{name}_seconds", meaning, SECONDS)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"mars:{name}", meaning, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)


class RequestObserver:
    """Observes one request on its way through the engine."""

    def __init__(self, metrics: EngineMetrics, request: Request) -> None:
        self._metrics = metrics
        self._prompt_tokens = len(request.prompt)
        self._arrived_s = metrics.clock()
        self._last_s: dict[int, float] = {}
        """Arrival time of the last chunk of each sequence."""

    def observe(self, chunk: Chunk) -> None:
        """Count a chunk that leaves the engine."""
        metrics = self._metrics
        now_s = metrics.clock()
        if count := len(chunk.tokens):
            metrics.generation_tokens.inc(count)
            metrics.forwards.inc()
            metrics.accepted.observe(count)
            metrics.block.observe(chunk.masks + 1)
            last_s = self._last_s.get(chunk.index)
            if last_s is None:
                metrics.first_token.observe(now_s - self._arrived_s)
            else:
                for _ in range(count):
                    metrics.inter_token.observe((now_s - last_s) / count)
            self._last_s[chunk.index] = now_s
        if finished := chunk.finished:
            metrics.ended(finished.reason)
            metrics.queued.observe(finished.queued_s)
            metrics.whole.observe(now_s - self._arrived_s)
            if chunk.index == 0:
                metrics.prompt_tokens.inc(self._prompt_tokens)
                metrics.prefix_queries.inc(self._prompt_tokens)
                metrics.prefix_hits.inc(finished.cached_tokens)
