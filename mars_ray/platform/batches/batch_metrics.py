"""Metrics of batches, from the figures that their runner publishes.

In:    figures of all batches of an endpoint.
Out:   gauges without the name of a gateway, because every gateway shows the same figures.
Never: shows figures of a runner that no longer publishes.
"""

from prometheus_client import CollectorRegistry, Gauge

from mars_ray.platform.batches.batch_figures import BatchFigures


class BatchMetrics:
    """The gauges in one registry."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model

        def gauge(name: str, text: str, label: str | None = None) -> Gauge:
            return Gauge(f"mars:{name}", text, ["model_name", *([label] if label else [])], registry=registry)

        self._unfinished = gauge("batches", "Batches that have not ended, by status.", "status")
        self._ended = gauge("batches_ended", "Batches that ended since their runner started, by status.", "status")
        self._rows = gauge("batch_rows", "Rows done since the runner started: completed or failed.", "outcome")
        self._rows_left = gauge("batch_rows_left", "Rows of checked batches that are not done.")
        self._deadline = gauge("batch_deadline_timestamp_seconds", "Unix time of the earliest deadline of a batch.")
        self._bytes = gauge("batch_file_bytes", "Bytes of all files in the storage, results included.")

    def show(self, figures: BatchFigures | None) -> None:
        """Set the gauges. They have no samples without figures."""
        for metric in (self._unfinished, self._ended, self._rows, self._rows_left, self._deadline, self._bytes):
            metric.clear()
        if figures is None:
            return
        for metric, counts in ((self._unfinished, figures.unfinished), (self._ended, figures.ended)):
            for status, count in counts.items():
                metric.labels(self._model, status).set(count)
        for outcome, count in figures.rows.items():
            self._rows.labels(self._model, outcome).set(count)
        self._rows_left.labels(self._model).set(figures.rows_left)
        self._bytes.labels(self._model).set(figures.file_bytes)
        if figures.deadline_unix_s is not None:
            self._deadline.labels(self._model).set(figures.deadline_unix_s)
