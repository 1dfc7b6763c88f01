"""Metrics of the HTTP gateway, and the merging of the metrics of several processes into one page.

In:    exchanges; the metrics of the engines as text.
Out:   Prometheus text.
Never: lets a caller determine the value of a label: all unknown paths have the same label.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.replicas.engine_metrics import SECONDS

ROUTES = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics", "/openapi.json")
)
OTHER = "other"


class GatewayMetrics:
    """Metrics of one process that accepts HTTP requests."""

    def __init__(self, *, model: str, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "gateway": gateway}
        names = list(self._labels)
        self._requests = Counter(
            "mars:http_requests",
            "HTTP requests by route and status.",
            [*names, "route", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "mars:http_refused", "Refused HTTP requests by error code.", [*names, "code"], registry=self._registry
        )
        self._seconds = Histogram(
            "mars:http_request_duration_seconds",
            "Seconds from the end of the headers to the end of the answer.",
            [*names, "route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        in_flight = Gauge(
            "mars:http_requests_in_flight", "Requests of known callers in flight.", names, registry=self._registry
        )
        self._in_flight = in_flight.labels(**self._labels)

    def observe(self, exchange: Exchange) -> None:
        """Count an exchange that has ended."""
        route = exchange.path if exchange.path in ROUTES else OTHER
        self._requests.labels(**self._labels, route=route, status=str(exchange.status)).inc()
        self._seconds.labels(**self._labels, route=route).observe(exchange.seconds)
        if exchange.code:
            self._refused.labels(**self._labels, code=exchange.code).inc()

    def text(self, in_flight: int) -> str:
        """Return all metrics as Prometheus text."""
        self._in_flight.set(in_flight)
        return generate_latest(self._registry).decode()


def merge_metrics(texts: Iterable[str]) -> str:
    """Return one text with every sample of `texts`; each metric family appears once, as Prometheus requires."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, family)
            if merged is not family:
                merged.samples.extend(family.samples)

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry).decode()
