"""The spans of a job and of its rows. Loaded only if traces are on, because it loads the OpenTelemetry SDK.

In:    the results of rows, as they arrive at the driver; the report at the end.
Out:   one span for the job; for each row a trace of its own, with a link to the job's span.
Never: puts a prompt, an answer, or the id of a row into a span: a row is named by the digest that is its key.
"""

import time
from collections.abc import Callable

from opentelemetry.trace import Link, Status, StatusCode

from mars_ray.batch.output.report import JobReport
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.traces.engine_call import EndedSequence
from mars_ray.traces.sequence_spans import MAX_SEQUENCES, add_sequence_spans
from mars_ray.traces.tracer import Tracer, nanoseconds


class JobSpans:
    """Makes the spans of one job, which begins now. `clock` returns Unix time."""

    def __init__(self, tracer: Tracer, *, rows: int, clock: Callable[[], float] = time.time) -> None:
        self._tracer = tracer
        self._clock = clock
        self._span = tracer.start("generate", clock(), attributes={"mars_ray.rows": rows})
        self._links = (Link(self._span.get_span_context()),)

    def add(self, result: RowResult) -> None:
        """Add the spans of a row that has a result now. A row begins when its first sequence is queued."""
        sequences = result.sequences
        ended_unix_s = max((sequence.ended_unix_s for sequence in sequences), default=self._clock())
        began_unix_s = min(map(_queued_unix_s, sequences), default=ended_unix_s)
        attributes = {"mars_ray.row": result.key.hex(), "mars_ray.worker": result.worker}
        span = self._tracer.start("row", began_unix_s, attributes=attributes, links=self._links)
        if span.is_recording():
            for sequence in sequences[:MAX_SEQUENCES]:
                add_sequence_spans(self._tracer, span, sequence)
            if result.error is not None:
                span.set_status(Status(StatusCode.ERROR))
        span.end(nanoseconds(ended_unix_s))

    def end(self, report: JobReport) -> None:
        """End the span of the job, and send the spans that are left."""
        self._span.set_attributes(
            {
                "mars_ray.status": report.status,
                "mars_ray.rows.done": report.rows,
                "mars_ray.rows.failed": report.errors,
                "mars_ray.tokens_per_forward": report.tokens_per_forward,
                "gen_ai.usage.output_tokens": report.tokens,
            }
        )
        self._span.end(nanoseconds(self._clock()))
        self._tracer.close()


def _queued_unix_s(sequence: EndedSequence) -> float:
    return sequence.ended_unix_s - sequence.decode_s - sequence.prefill_s - sequence.queued_s
