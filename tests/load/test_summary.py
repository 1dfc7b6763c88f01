"""Latencies, rates and goodput of records made by hand."""

import json
import statistics
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError
from mars_ray.load.record import RequestOutcome, RequestSlo, parse_slo
from mars_ray.load.summary import SAMPLE_COLUMNS, Goodput, distribution_ms, samples, show_summary, summarize
from mars_ray.measure import Spread
from tests.load.server_samples import record

FAILED = record(
    number=1, outcome=RequestOutcome.LIMITED, chunk_s=(), end_s=1.25, completion_tokens=None, error="HTTP 429: busy"
)


def test_latencies_of_a_closed_loop_count_from_sending() -> None:
    seen = record()
    assert (seen.ttft_s, seen.ttft_due_s, seen.tpot_s, seen.e2e_s) == (0.5, 0.5, 0.25, 1.5)
    assert (seen.chunk_gaps_s, seen.delay_s) == ([0.25, 0.5], 0.0)


def test_latencies_of_an_open_loop_count_from_the_arrival_but_ttft_is_there_from_sending_too() -> None:
    seen = record(scheduled_s=0.25, waited=True)
    assert (seen.ttft_s, seen.ttft_due_s, seen.tpot_s, seen.e2e_s, seen.delay_s) == (0.5, 1.25, 0.25, 2.25, 0.75)


@pytest.mark.parametrize("changes", [{"completion_tokens": 1}, {"completion_tokens": None}, {"chunk_s": ()}])
def test_there_is_no_time_per_token_without_a_second_token_a_count_or_a_stream(changes: dict[str, Any]) -> None:
    assert record(**changes).tpot_s is None


def test_several_tokens_a_chunk_make_the_gap_between_chunks_no_time_per_token() -> None:
    seen = record(completion_tokens=101)
    assert seen.tpot_s == pytest.approx(0.01)
    assert statistics.mean(seen.chunk_gaps_s) == pytest.approx(0.375)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30))
def test_a_distribution_is_what_the_standard_library_says(seconds: list[float]) -> None:
    found = distribution_ms(seconds)
    assert found is not None
    milliseconds = [1000 * value for value in seconds]
    assert found.samples == len(seconds)
    assert found.mean == pytest.approx(statistics.fmean(milliseconds))
    assert found.median == pytest.approx(statistics.median(milliseconds))
    assert found.std == pytest.approx(statistics.pstdev(milliseconds), abs=1e-6)
    if len(seconds) > 1:
        hundredths = statistics.quantiles(milliseconds, n=100, method="inclusive")
        assert (found.p90, found.p99) == pytest.approx((hundredths[89], hundredths[98]))


def test_a_summary_counts_every_outcome_and_takes_latencies_of_completed_requests_alone() -> None:
    slow = record(number=2, sent_s=1.0, chunk_s=(3.0,), end_s=5.0, completion_tokens=3, tokens_per_forward=1.5)
    later = replace(FAILED, number=3, error="HTTP 429: busy still")
    found = summarize([record(tokens_per_forward=5.0), FAILED, slow, later], None)
    assert found.requests == {"ok": 2, "429": 2}
    assert found.errors == {"429": "HTTP 429: busy"}
    assert (found.duration_s, found.requests_per_s, found.output_tokens_per_s) == (5.0, 0.4, 1.6)
    assert (found.prompt_tokens, found.output_tokens, found.without_usage, found.waited) == (20, 8, 0, 0)
    assert found.tokens_per_forward == pytest.approx(8 / 3)  # 8 tokens in 1 + 2 forwards
    latency = found.latency_ms
    assert latency.ttft and latency.tpot and latency.e2e and latency.chunk_gap
    assert (latency.ttft.median, latency.tpot.median, latency.e2e.median) == (1250.0, 625.0, 2750.0)
    assert (latency.chunk_gap.samples, latency.chunk_gap.mean) == (2, 375.0)
    assert (latency.ttft_arrival, latency.delay, found.goodput) == (None, None, None)


def test_an_open_loop_says_who_waited_and_how_long() -> None:
    found = summarize([record(scheduled_s=0.5, waited=True), record(number=1, scheduled_s=1.0)], None)
    assert found.waited == 1
    assert found.latency_ms.delay and found.latency_ms.ttft_arrival
    assert (found.latency_ms.delay.mean, found.latency_ms.ttft_arrival.mean) == (250.0, 750.0)


def test_times_to_retry_are_summed_up_by_their_range_and_median() -> None:
    records = [record(outcome=RequestOutcome.LIMITED, retry_after_s=value) for value in (1.0, 8.0, 2.0, None)]
    assert summarize(records, None).retry_after_s == Spread(2.0, 1.0, 8.0)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (RequestSlo(ttft_ms=500), True),
        (RequestSlo(ttft_ms=499), False),
        (RequestSlo(tpot_ms=250), True),
        (RequestSlo(tpot_ms=249), False),
        (RequestSlo(e2e_ms=1500, ttft_ms=500, tpot_ms=250), True),
        (RequestSlo(e2e_ms=1499, ttft_ms=500, tpot_ms=250), False),
    ],
)
def test_a_good_request_keeps_every_limit(slo: RequestSlo, kept: bool) -> None:
    assert slo.met_by(record()) is kept
    assert not slo.met_by(record(outcome=RequestOutcome.BROKEN))


def test_limits_of_an_open_loop_count_from_the_arrival() -> None:
    assert not RequestSlo(ttft_ms=500).met_by(record(scheduled_s=0.9))
    assert not RequestSlo(e2e_ms=1500).met_by(record(scheduled_s=0.9))


def test_what_was_not_measured_is_not_kept_but_one_token_has_no_next_one_to_be_late() -> None:
    assert not RequestSlo(tpot_ms=1e9).met_by(record(completion_tokens=None))
    assert not RequestSlo(ttft_ms=1e9).met_by(record(chunk_s=()))
    assert RequestSlo(tpot_ms=1).met_by(record(completion_tokens=1))


def test_goodput_is_of_all_requests_that_were_not_interrupted() -> None:
    late = record(number=2, scheduled_s=0.0, end_s=4.0)
    interrupted = record(number=3, outcome=RequestOutcome.INTERRUPTED)
    found = summarize([record(), FAILED, late, interrupted], RequestSlo(e2e_ms=2000))
    assert found.goodput == Goodput(requests_per_s=1 / 4, fraction=1 / 3)


def test_limits_are_read_from_one_text_or_many() -> None:
    assert (
        parse_slo(["ttft:200,tpot:20.5"])
        == parse_slo(["tpot:20.5", "ttft:200"])
        == RequestSlo(ttft_ms=200, tpot_ms=20.5)
    )
    assert parse_slo([]) is None


@pytest.mark.parametrize(
    "text", ["itl:3", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:1,ttft:2", ""]
)
def test_a_limit_that_cannot_be_used_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="slo "):
        parse_slo([text])


def test_no_records_make_a_summary_and_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = summarize([], RequestSlo(ttft_ms=1))
    assert (found.requests, found.requests_per_s, found.goodput) == ({}, 0.0, Goodput(requests_per_s=0.0, fraction=0.0))
    show_summary("nothing", found)
    assert "completed requests/s" in capsys.readouterr().out


def test_every_sample_is_in_the_report_and_the_table_names_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(scheduled_s=0.5), FAILED]
    found = summarize(records, None)
    written = json.loads(json.dumps({"summary": asdict(found), "samples": samples(records)}, allow_nan=False))
    first, second = (dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in written["samples"]["rows"])
    assert (first["scheduled_ms"], first["first_chunk_ms"], first["end_ms"]) == (500.0, 1500.0, 2500.0)
    assert first["chunk_gaps_ms"] == [250.0, 500.0]
    assert (second["outcome"], second["first_chunk_ms"], second["chunk_gaps_ms"]) == ("429", None, [])
    assert written["summary"]["latency_ms"]["ttft"]["median"] == 500.0
    show_summary("a [load]", found)
    shown = capsys.readouterr().out
    assert "a [load]" in shown and "HTTP 429: busy" in shown and "TTFT, arrival" in shown
