"""Spans on their way to a collector. The modules that make them load the OpenTelemetry SDK.

In:    spans with their times; the standard environment variables `OTEL_*`.
Out:   batches of spans over OTLP, sent by a thread.
Never: makes a caller wait for the collector, or keeps more than `OTEL_BSP_MAX_QUEUE_SIZE` spans and one batch.
"""

import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SERVICE = "mars-ray"
"""Name of the service if the environment sets none."""
CLOSE_S = 2.0
"""Maximum seconds to wait at the end for the last spans to be sent."""
Attribute = str | bool | int | float | Sequence[str]


class Tracer:
    """Makes spans and exports them. `instance` tells processes of one service apart.

    Call it from one thread. The environment is `os.environ`, because the SDK reads no other.
    """

    def __init__(self, environment: Mapping[str, str], *, instance: str) -> None:
        attributes: dict[str, str] = {SERVICE_VERSION: version("mars-ray"), SERVICE_INSTANCE_ID: instance}
        named = environment.get(OTEL_SERVICE_NAME) or f"{SERVICE_NAME}=" in environment.get(
            OTEL_RESOURCE_ATTRIBUTES, ""
        )
        if not named:
            attributes[SERVICE_NAME] = SERVICE
        self._exporter = _CountingExporter(OTLPSpanExporter())
        self._processor = _BoundedProcessor(self._exporter)
        # The SDK's own handler at exit would wait up to half a minute for a collector that does not answer.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("mars_ray", version("mars-ray"))
        self._propagator = TraceContextTextMapPropagator()

    def remote_parent(self, headers: Mapping[str, str]) -> Context:
        """Return the context that the headers `traceparent` and `tracestate` describe; empty if they are not valid."""
        return self._propagator.extract(headers, Context())

    def start(
        self,
        name: str,
        start_unix_s: float,
        *,
        parent: Context | Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Attribute | None] | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Return a span that began at `start_unix_s`, with the attributes that have a value.

        It has no parent if `parent` is None or an empty context.
        """
        if isinstance(parent, Span):
            parent = set_span_in_context(parent, Context())
        return self._tracer.start_span(
            name,
            parent or Context(),
            kind,
            {name: value for name, value in (attributes or {}).items() if value is not None},
            links,
            start_time=nanoseconds(start_unix_s),
            set_status_on_exception=False,
        )

    def counts(self) -> dict[str, int]:
        """Return the number of spans so far: exported, dropped because the queue was full, and those that the collector
        did not take."""
        return {
            "exported": self._exporter.exported,
            "dropped": self._processor.dropped,
            "failed": self._exporter.failed,
        }

    def close(self) -> None:
        """Send the spans that are left, but wait no longer than `CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # or it would try again for as long as one request may last


def nanoseconds(unix_s: float) -> int:
    """Return a time in the unit of OpenTelemetry."""
    return int(unix_s * 1e9)


class _CountingExporter(SpanExporter):
    """Counts the spans that an exporter takes. Runs in the thread of the processor."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._closed = False
        self.taken = self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    """Drops and counts new spans while the queue is full. The SDK's processor drops old ones and counts nothing."""

    def __init__(self, exporter: _CountingExporter) -> None:
        super().__init__(exporter)
        self._counting = exporter
        self._room: int = self._default_max_queue_size()  # type: ignore[no-untyped-call]
        self._queued = 0
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if not (span.context and span.context.trace_flags.sampled):
            return
        if self._queued - self._counting.taken >= self._room:
            self.dropped += 1
            return
        self._queued += 1
        super().on_end(span)
