"""The Prometheus metrics of one engine.

Metrics that mean the same as in vLLM have vLLM's names, prefix included, because dashboards, alerts and autoscalers
ask for exactly these names. Metrics that vLLM lacks have the prefix `mars:`.

In:    requests, their chunks as these leave the engine, and the state of the engine.
Out:   OpenMetrics text, whose histograms hold the trace ids of traced requests as exemplars.
Never: lets a caller determine the value of a label.
"""

import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest

from mars_ray.engine.chunk import Chunk, Finished, FinishReason
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import METRICS, EngineState

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would add a series per metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
REASONS: Mapping[FinishReason, str] = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""vLLM's name of each finish reason."""


class EngineMetrics:
    """The metrics of one engine. `clock` returns seconds."""

    def __init__(self, *, model: str, replica: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "replica": replica}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.forwards = self._counter("mars:sequence_forwards", "Forwards that produced a token, counted per sequence.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.first_token = self._seconds(
            "time_to_first_token", "Seconds from the arrival of a request to its first token."
        )
        self.inter_token = self._seconds(
            "inter_token_latency", "Seconds per token; the tokens of one step share its time equally."
        )
        self.whole = self._seconds("e2e_request_latency", "Seconds from the arrival of a request to its last token.")
        self.queued = self._seconds("request_queue_time", "Seconds from the arrival of a request to its first step.")
        self.prefill = self._seconds("request_prefill_time", "Seconds from the first step to the first token.")
        self.decode = self._seconds("request_decode_time", "Seconds from the first token to the last one.")
        self.per_token = self._seconds(
            "request_time_per_output_token", "Mean seconds per token after the first one, by sequence."
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", LENGTHS)
        self.answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of a sequence.", LENGTHS)
        self.longest_answer = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest sequence of a request.", LENGTHS
        )
        self.accepted = self._histogram(
            "mars:accepted_tokens", "Tokens that a forward produced for a sequence.", TOKENS
        )
        self.block = self._histogram("mars:block", "Tokens that a forward proposed for a sequence.", TOKENS)
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._state = {
            metric: (Counter if metric.counter else Gauge)(
                metric.name,
                metric.help,
                [*self._labels, *([metric.label] if metric.label else [])],
                registry=self._registry,
            )
            for metric in METRICS
        }
        self._counted = defaultdict[tuple[str, str], float](float)
        """Values of the counters of the state when the metrics were last read, by name and label."""

    def begin(self, request: Request) -> "RequestObserver":
        """Return an observer for a request that arrives now."""
        return RequestObserver(self, request)

    def ended(self, reason: FinishReason) -> None:
        """Count a sequence that has ended."""
        self._success.labels(**self._labels, finished_reason=REASONS[reason]).inc()

    def text(self, state: EngineState) -> str:
        """Return all metrics as OpenMetrics text, with those of `state`."""
        for metric, exported in self._state.items():
            values = metric.read(state)
            for label, value in (values if isinstance(values, Mapping) else {"": values}).items():
                series = exported.labels(**self._labels, **({metric.label: label} if metric.label else {}))
                if isinstance(series, Counter):
                    counted = self._counted[metric.name, label]
                    series.inc(value - counted if value >= counted else value)  # a new process counts from 0
                    self._counted[metric.name, label] = value
                else:
                    series.set(value)
        return openmetrics_text(self._registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, list(self._labels), registry=self._registry).labels(**self._labels)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", meaning, SECONDS)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, meaning, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)


class RequestObserver:
    """Observes one request on its way through the engine."""

    def __init__(self, metrics: EngineMetrics, request: Request) -> None:
        self._metrics = metrics
        self._prompt_tokens = len(request.prompt)
        self._arrived_s = metrics.clock()
        self._last_s: dict[int, float] = {}
        """Arrival time of the last chunk of each sequence."""
        self._left = len(request.indices)
        """Number of sequences that have not ended."""
        self._tokens = Counts[int]()
        """Number of tokens of each sequence that came from this engine."""
        self._exemplar = {"trace_id": request.trace_id} if request.trace_id else None

    def observe(self, chunk: Chunk) -> None:
        """Count a chunk that leaves the engine."""
        metrics = self._metrics
        now_s = metrics.clock()
        if count := len(chunk.tokens):
            self._tokens[chunk.index] += count
            metrics.generation_tokens.inc(count)
            metrics.forwards.inc()
            metrics.accepted.observe(count)
            metrics.block.observe(chunk.masks + 1)
            last_s = self._last_s.get(chunk.index)
            if last_s is None:
                metrics.first_token.observe(now_s - self._arrived_s, self._exemplar)
            else:
                for _ in range(count):
                    metrics.inter_token.observe((now_s - last_s) / count, self._exemplar)
            self._last_s[chunk.index] = now_s
        if chunk.finished:
            self._observe_end(chunk.index, chunk.finished, now_s - self._arrived_s)

    def _observe_end(self, index: int, finished: Finished, seconds: float) -> None:
        metrics = self._metrics
        metrics.ended(finished.reason)
        metrics.queued.observe(finished.queued_s, self._exemplar)
        metrics.prefill.observe(finished.prefill_s, self._exemplar)
        metrics.decode.observe(finished.decode_s, self._exemplar)
        metrics.whole.observe(seconds, self._exemplar)
        if (tokens := self._tokens[index]) > 1:
            metrics.per_token.observe(finished.decode_s / (tokens - 1), self._exemplar)
        metrics.answer_length.observe(self._tokens[index])
        if index == 0:
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.prompt_length.observe(self._prompt_tokens)
            metrics.prefix_queries.inc(self._prompt_tokens)
            metrics.prefix_hits.inc(finished.cached_tokens)
        self._left -= 1
        if not self._left:
            metrics.longest_answer.observe(max(self._tokens.values(), default=0))


def openmetrics_text(registry: CollectorRegistry) -> str:
    """Return the metrics of a registry as OpenMetrics text, with exemplars.

    The text is legal in every version of the format. Without `ALLOWUTF8`, prometheus_client replaces the colon in the
    names of samples, but not in those of their families.
    """
    text: bytes = generate_latest(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.decode()
