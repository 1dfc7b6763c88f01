"""Metrics of the HTTP gateway, and the merge of metrics of several processes into one page.

In:    exchanges; the texts of the engines.
Out:   Prometheus text.
Never: labels by anything a caller chooses: paths it does not know are one.
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
    """The figures of one process that takes HTTP requests."""

    def __init__(self, *, model: str, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "gateway": gateway}
        names = list(self._labels)
        self._requests = Counter(
            "mars:http_requests", "By route and status.", [*names, "route", "status"], registry=self._registry
        )
        self._refused = Counter("mars:http_refused", "By error code.", [*names, "code"], registry=self._registry)
        self._seconds = Histogram(
            "mars:http_request_duration_seconds",
            "From the end of the headers to the end of the answer.",
            [*names, "route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        in_flight = Gauge("mars:http_requests_in_flight", "Of known callers.", names, registry=self._registry)
        self._in_flight = in_flight.labels(**self._labels)

    def observe(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        route = exchange.path if exchange.path in ROUTES else OTHER
        self._requests.labels(**self._labels, route=route, status=str(exchange.status)).inc()
        self._seconds.labels(**self._labels, route=route).observe(exchange.seconds)
        if exchange.code:
            self._refused.labels(**self._labels, code=exchange.code).inc()

    def text(self, in_flight: int) -> str:
        """Return everything."""
        self._in_flight.set(in_flight)
        return generate_latest(self._registry).decode()


def merge_metrics(texts: Iterable[str]) -> str:
    """Return one text with every sample of `texts`; each family is named once, as Prometheus requires."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family).samples.extend(
                [] if family is families[family.name] else family.samples
            )

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry).decode()
