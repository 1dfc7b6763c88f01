"""Metrics of a gateway's platform: usage and batches.

In:    the meter of the gateway, figures of batches.
Out:   OpenMetrics text.
Never: lets a caller determine the value of a label.
"""

from prometheus_client import CollectorRegistry, Gauge

from mars_ray.platform.batches.batch_figures import BatchFigures
from mars_ray.platform.batches.batch_metrics import BatchMetrics
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.serve.replicas.engine_metrics import openmetrics_text


class PlatformMetrics:
    """Metrics of one process that accepts HTTP requests."""

    def __init__(self, *, model: str, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "gateway": gateway}
        names = list(self._labels)
        self._records_waiting = Gauge(
            "mars:usage_records_waiting",
            "Usage records of requests that the meter has not confirmed.",
            names,
            registry=self._registry,
        )
        self._limited = Gauge(
            "mars:usage_refused",
            "Requests so far that a limit of their key or account refused, by limit.",
            [*names, "limit"],
            registry=self._registry,
        )
        self._batches = BatchMetrics(model, self._registry)

    def text(self, meter: GatewayMeter | None, batches: BatchFigures | None) -> str:
        """Return all metrics. What is None has no sample."""
        if meter:
            self._records_waiting.labels(**self._labels).set(meter.records_waiting)
            for limit, count in meter.refused.items():
                self._limited.labels(**self._labels, limit=limit).set(count)
        self._batches.show(batches)
        return openmetrics_text(self._registry)
