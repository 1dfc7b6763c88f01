"""Metrics of the HTTP gateway, and the merging of the metrics of several processes into one page.

In:    exchanges; the state of the cluster; the metrics of the engines as text.
Out:   Prometheus text or OpenMetrics text, whichever the scraper accepts.
Never: lets a caller determine the value of a label: all unknown paths have the same label.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mars_ray.control.core.status import ClusterStatus
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.replicas.engine_metrics import SECONDS, openmetrics_text

ROUTES = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/metrics",
        "/openapi.json",
    )
)
OTHER = "other"
OPENMETRICS = "application/openmetrics-text"


class GatewayMetrics:
    """Metrics of one process that accepts HTTP requests."""

    def __init__(self, *, model: str, gateway: str, routes: frozenset[str] = ROUTES) -> None:
        self._routes = routes
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
        gauge = partial(Gauge, registry=self._registry)
        in_flight = gauge("mars:http_requests_in_flight", "Requests of known callers in flight.", names)
        self._in_flight = in_flight.labels(**self._labels)
        self._spans = gauge(
            "mars:trace_spans",
            "Spans so far, by outcome: exported, dropped because the queue was full, or failed to be sent.",
            [*names, "outcome"],
        )
        # Every gateway has the same prices, so these samples carry no name of a gateway.
        self._price = gauge(
            "mars:price_per_million_tokens",
            "Price of a million generated tokens at the measured tokens per second.",
            ["model_name"],
        )
        self._expected_price = gauge(
            "mars:expected_price_per_million_tokens",
            "Expected price of a million generated tokens at the present demand, by threshold.",
            ["model_name", "threshold"],
        )

    def observe(self, exchange: Exchange) -> None:
        """Count an exchange that has ended."""
        route = exchange.path if exchange.path in self._routes else OTHER
        self._requests.labels(**self._labels, route=route, status=str(exchange.status)).inc()
        exemplar = {"trace_id": exchange.trace.trace_id} if exchange.trace else None
        self._seconds.labels(**self._labels, route=route).observe(exchange.seconds, exemplar)
        if exchange.code:
            self._refused.labels(**self._labels, code=exchange.code).inc()
        if exchange.usage:
            self._migrations.inc(exchange.usage.migrations)

    def text(
        self,
        in_flight: int,
        status: ClusterStatus | None,
        spans: Mapping[str, int],
    ) -> str:
        """Return all metrics as OpenMetrics text. Prices that `status` lacks have no sample."""
        self._in_flight.set(in_flight)
        for outcome, count in spans.items():
            self._spans.labels(**self._labels, outcome=outcome).set(count)
        self._price.clear()
        self._expected_price.clear()
        model = self._labels["model_name"]
        if status and status.price_per_million_tokens is not None:
            self._price.labels(model).set(status.price_per_million_tokens)
        for point in status.curve if status else ():
            if point.price_per_million_tokens is not None:
                self._expected_price.labels(model, f"{point.threshold:g}").set(point.price_per_million_tokens)
        return openmetrics_text(self._registry)


def merge_metrics(texts: Iterable[str], accept: str = "") -> tuple[bytes, str]:
    """Return one page with every sample of the OpenMetrics `texts`, and its media type.

    Each metric family appears once, as Prometheus requires. The page is Prometheus text, or OpenMetrics text, which
    includes exemplars, if the header Accept asks for `application/openmetrics-text`.
    """
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            merged = families.setdefault(family.name, family)
            if merged is not family:
                merged.samples.extend(family.samples)

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    if OPENMETRICS in accept:
        return openmetrics_text(registry).encode(), f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
