"""The spans of HTTP requests. Loaded only if traces are on, because it loads the OpenTelemetry SDK.

In:    exchanges of known callers, when their key is known and when their response has ended.
Out:   one span for the request, one for the generation, those of its sequences, and one for the stream.
Never: puts a prompt, an answer or a key into a span, or begins a span for an unknown caller.
"""

from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id

from mars_ray.engine.request import Request
from mars_ray.serve.middleware.exchange import Exchange, RequestTrace, TracedGeneration
from mars_ray.serve.middleware.scope import Headers
from mars_ray.traces.sequence_spans import MAX_SEQUENCES, add_sequence_spans
from mars_ray.traces.tracer import Attribute, Tracer, nanoseconds

PROVIDER = "mars-ray"
DISCONNECTED = "client_disconnected"
PARENT_HEADERS = (b"traceparent", b"tracestate")


class RequestSpans:
    """Makes the spans of HTTP requests. `routes` are the paths that may appear in the name of a span."""

    def __init__(self, tracer: Tracer, routes: frozenset[str]) -> None:
        self._tracer = tracer
        self._routes = routes

    def counts(self) -> Mapping[str, int]:
        """Return the number of spans by outcome."""
        return self._tracer.counts()

    def close(self) -> None:
        """Send the spans that wait, and end. This blocks."""
        self._tracer.close()

    def begin(self, exchange: Exchange, headers: Headers) -> None:
        """Begin the trace of a request whose caller is known. A request that is not sampled gets no trace."""
        is_route = exchange.path in self._routes
        span = self._tracer.start(
            f"{exchange.method} {exchange.path}" if is_route else exchange.method,
            exchange.arrived_unix_s,
            parent=self._tracer.remote_parent(_parent_headers(headers)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": exchange.method,
                "http.route": exchange.path if is_route else None,
                "url.scheme": "http",
                "mars_ray.request_id": exchange.request_id,
                "mars_ray.service_class": exchange.service_class,
            },
        )
        context = span.get_span_context()
        if context.trace_flags.sampled:
            exchange.trace_id = format_trace_id(context.trace_id)
            exchange.trace = RequestTrace(span, exchange.trace_id)

    def end(self, exchange: Exchange) -> None:
        """End the trace of a request, if it has one, and add the spans below the request's own."""
        if (trace := exchange.trace) is None:
            return
        span: Span = trace.span
        end_unix_s = exchange.arrived_unix_s + exchange.seconds
        error = _error(exchange)
        if trace.generation:
            self._add_generation(span, trace.generation, exchange, end_unix_s, error)
        if exchange.status is not None:
            span.set_attribute("http.response.status_code", exchange.status)
        if error:
            span.set_attribute("error.type", error)
            if exchange.status is None or exchange.status == 200 or exchange.status >= 500:  # others are the caller's
                span.set_status(Status(StatusCode.ERROR))
        span.end(nanoseconds(end_unix_s))

    def _add_generation(
        self, parent: Span, generation: TracedGeneration, exchange: Exchange, end_unix_s: float, error: str | None
    ) -> None:
        sequences = [(prompt, sequence) for prompt, call in enumerate(generation.calls) for sequence in call.sequences]
        last_unix_s = max((sequence.ended_unix_s for _, sequence in sequences), default=end_unix_s)
        usage = exchange.usage
        span = self._tracer.start(
            f"{generation.operation} {generation.model}",
            generation.began_unix_s,
            parent=parent,
            attributes=_request_attributes(generation, generation.calls[0].request),
        )
        span.set_attribute("gen_ai.response.finish_reasons", [sequence.reason for _, sequence in sequences])
        if usage:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "gen_ai.usage.output_tokens": usage.tokens,
                    "mars_ray.migrations": usage.migrations,
                }
            )
        for call in generation.calls:
            for loss in call.losses:
                span.add_event(loss.name, timestamp=nanoseconds(loss.unix_s))
        for prompt, sequence in sequences[:MAX_SEQUENCES]:
            add_sequence_spans(self._tracer, span, sequence, prompt=prompt)
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(nanoseconds(end_unix_s if error else last_unix_s))
        if generation.streamed and exchange.headers_s is not None:
            stream = self._tracer.start("stream", exchange.arrived_unix_s + exchange.headers_s, parent=parent)
            stream.end(nanoseconds(end_unix_s))


def _parent_headers(headers: Headers) -> Mapping[str, str]:
    """Return the headers that name the parent. A header that is sent twice counts as not sent."""
    names = [name for name, _ in headers]
    return {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in PARENT_HEADERS and names.count(name) == 1
    }


def _error(exchange: Exchange) -> str | None:
    """Return the code or the status of the error, or `client_disconnected` if the client left before the end."""
    if exchange.code or (exchange.status or 0) >= 400:
        return exchange.code or str(exchange.status)
    generation = exchange.trace.generation if exchange.trace else None
    calls = generation.calls if generation else []
    if exchange.status is None or any(len(call.sequences) < len(call.request.indices) for call in calls):
        return DISCONNECTED
    return None


def _request_attributes(generation: TracedGeneration, request: Request) -> Mapping[str, Attribute | None]:
    sampling = request.sampling
    decode = request.decode
    return {
        "gen_ai.operation.name": generation.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "mars_ray.prompts": len(generation.calls),
        "mars_ray.mode": decode.mode.value,
        "mars_ray.service_class": request.service_class,
    }
