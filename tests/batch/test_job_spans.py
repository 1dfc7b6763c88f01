"""Spans of a job: each row is a trace of its own that links to the job's."""

import pytest

from mars_ray.batch.output.report import JobReport
from mars_ray.batch.rows.row_tables import RowResult, from_table, to_table
from mars_ray.batch.run.job_spans import JobSpans
from mars_ray.traces.engine_call import EndedSequence
from mars_ray.traces.tracer import Tracer
from tests.batch.test_job_page import FULL
from tests.factories.otlp import collector

SEQUENCE = EndedSequence(
    index=0,
    mode="threshold",
    ended_unix_s=1000.0,
    queued_s=3.0,
    prefill_s=2.0,
    decode_s=1.0,
    reason="stop",
    prompt_tokens=7,
    cached_tokens=2,
    tokens=9,
    forwards=3,
    threshold_low=0.9,
    threshold_high=1.0,
    block=8,
)
ROWS = [
    RowResult(key=b"\x01" * 16, records=("secret",), sequences=(SEQUENCE,), worker="one"),
    RowResult(key=b"\x02" * 16, error="secret", reason="secret"),
]


def test_times_of_sequences_survive_the_way_to_the_driver() -> None:
    assert from_table(to_table(ROWS)) == ROWS


def test_rows_link_to_the_job_and_hold_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        spans = JobSpans(Tracer({}, instance="i"), rows=2, clock=lambda: 2000.0)
        for row in ROWS:
            spans.add(row)
        report: JobReport = FULL
        spans.end(report)
        by_name = {span.name: span for span in reversed(found.spans)}
    job, read, decode = by_name["generate"], by_name["read"], by_name["decode"]
    rows = [span for span in found.spans if span.name == "row"]
    assert [row.links for row in rows] == [((job.trace_id, job.span_id),)] * 2
    assert len({span.trace_id for span in (job, *rows)}) == 3
    assert (rows[0].start_s, rows[0].end_s, rows[1].end_s) == (994.0, 1000.0, 2000.0)
    assert (read.start_s, decode.start_s, decode.parent_id) == (997.0, 999.0, rows[0].span_id)
    assert [row.failed for row in rows] == [False, True]
    assert decode.attributes["mars_ray.tokens_per_forward"] == 3
    assert (job.attributes["mars_ray.rows.done"], job.attributes["mars_ray.status"]) == (FULL.rows, FULL.status)
    assert job.resource["service.name"] == "mars-ray"
    assert b"secret" not in found.raw


def test_a_row_that_the_sampler_leaves_out_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        for name, value in found.environment(OTEL_TRACES_SAMPLER="always_off").items():
            monkeypatch.setenv(name, value)
        spans = JobSpans(Tracer({}, instance="i"), rows=1)
        spans.add(ROWS[0])
        spans.end(FULL)
    assert not found.spans
