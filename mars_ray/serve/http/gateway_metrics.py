"""Metrics of the HTTP gateway, and the merging of the metrics of several processes into one page.

In:    exchanges; the state of the cluster; the metrics of the engines as text.
Out:   Prometheus text.
Never: lets a caller determine the value of a label: all unknown paths have the same label.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mars_ray.control.core.status import ClusterStatus
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.replicas.engine_metrics import SECONDS

ROUTES = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/metrics",
        "/openapi.json",
    )
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
        migrations = Counter(
            "mars:stream_migrations",
            "Moves of begun streams to another engine, because theirs was lost.",
            names,
            registry=self._registry,
        )
        self._migrations = migrations.labels(**self._labels)
        in_flight = Gauge(
            "mars:http_requests_in_flight", "Requests of known callers in flight.", names, registry=self._registry
        )
        self._in_flight = in_flight.labels(**self._labels)
        # Every gateway has the same prices, so these samples carry no name of a gateway.
        self._price = Gauge(
            "mars:price_per_million_tokens",
            "Price of a million generated tokens at the measured tokens per second.",
            ["model_name"],
            registry=self._registry,
        )
        self._expected_price = Gauge(
            "mars:expected_price_per_million_tokens",
            "Expected price of a million generated tokens at the present demand, by threshold.",
            ["model_name", "threshold"],
            registry=self._registry,
        )

    def observe(self, exchange: Exchange) -> None:
        """Count an exchange that has ended."""
        route = exchange.path if exchange.path in ROUTES else OTHER
        self._requests.labels(**self._labels, route=route, status=str(exchange.status)).inc()
        self._seconds.labels(**self._labels, route=route).observe(exchange.seconds)
        if exchange.code:
            self._refused.labels(**self._labels, code=exchange.code).inc()
        if exchange.usage:
            self._migrations.inc(exchange.usage.migrations)

    def text(self, in_flight: int, status: ClusterStatus | None) -> str:
        """Return all metrics as Prometheus text. Prices that `status` lacks have no sample."""
        self._in_flight.set(in_flight)
        self._price.clear()
        self._expected_price.clear()
        model = self._labels["model_name"]
        if status and status.price_per_million_tokens is not None:
            self._price.labels(model).set(status.price_per_million_tokens)
        for point in status.curve if status else ():
            if point.price_per_million_tokens is not None:
                self._expected_price.labels(model, f"{point.threshold:g}").set(point.price_per_million_tokens)
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
