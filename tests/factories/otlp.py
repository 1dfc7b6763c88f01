"""A collector: an HTTP server that reads OTLP with the official protobuf messages, and can be slow or refuse."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Received:
    """A span as the collector got it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    failed: bool
    resource: dict[str, Any]
    headers: dict[str, str]


@dataclass
class Collector:
    """What a collector received. While `open` is cleared, it keeps its clients waiting."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    raw: bytes = b""

    def environment(self, **more: str) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50", **more}

    def trace(self, trace_id: str, *, root: str) -> dict[str, list[Received]]:
        """The spans of a trace by their names, once the one named `root` has come with all others of its batch."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            found: dict[str, list[Received]] = {}
            for span in [span for span in self.spans if span.trace_id == trace_id]:
                found.setdefault(span.name, []).append(span)
            if root in found:
                return found
            assert time.monotonic() < until_s, f"no span {root}; there are {[span.name for span in self.spans]}"
            time.sleep(0.01)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a port of its own."""
    found = Collector()
    found.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.open.wait(PATIENCE_S)
            if found.status == 200:
                assert self.path == "/v1/traces"
                found.raw += body
                self._keep(ExportTraceServiceRequest.FromString(body))
            self.send_response(found.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def _keep(self, request: Any) -> None:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found.spans += [self._span(span, resource.resource) for span in scope.spans]

        def _span(self, span: Any, resource: Any) -> Received:
            return Received(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                start_s=span.start_time_unix_nano / 1e9,
                end_s=span.end_time_unix_nano / 1e9,
                attributes=_values(span.attributes),
                events=tuple(event.name for event in span.events),
                links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                failed=span.status.code == 2,
                resource=_values(resource.attributes),
                headers={name.lower(): value for name, value in self.headers.items()},
            )

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.open.set()
        server.shutdown()
        server.server_close()
        thread.join()
