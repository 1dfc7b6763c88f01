"""Summarize the records of a load: counts, rates and distributions of latencies, as tables and as JSON.

Requests that did not complete are counted but have no latency. Percentiles are interpolated; standard deviations use
ddof 0.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mars_ray.load.record import RequestOutcome, RequestRecord, RequestSlo
from mars_ray.measure import Spread, spread

LATENCIES = {
    "ttft": "TTFT",
    "ttft_arrival": "TTFT, arrival",
    "tpot": "TPOT",
    "chunk_gap": "chunk gap",
    "e2e": "E2E",
    "delay": "delay",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distribution of one latency."""

    samples: int
    mean: float
    median: float
    p90: float
    p99: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Distributions of the latencies of completed requests, in milliseconds. None for a latency without samples."""

    ttft: Distribution | None
    """Time to first token: from sending the request to the first chunk."""
    ttft_arrival: Distribution | None
    """Time from the scheduled arrival to the first chunk; None in a closed loop."""
    tpot: Distribution | None
    """Time per output token: (E2E - TTFT) / (tokens - 1)."""
    chunk_gap: Distribution | None
    """Time between chunks, over all requests; a chunk may hold several tokens."""
    e2e: Distribution | None
    """Time from sending the request to the end of the reply; in an open loop, from the scheduled arrival."""
    delay: Distribution | None
    """Time from the scheduled arrival to sending the request; None in a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Rate and share of the requests that completed within all limits."""

    requests_per_s: float
    fraction: float
    """Share of the good requests among all requests that were not interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a load."""

    duration_s: float
    """Seconds from the start of the load to the end of its last request."""
    requests: dict[str, int]
    """Number of requests by outcome."""
    errors: dict[str, str]
    """First error message for each outcome other than ok."""
    waited: int
    """Number of requests that found all clients busy when they arrived."""
    requests_per_s: float
    """Completed requests per second."""
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    without_usage: int
    """Number of completed requests without a token count."""
    tokens_per_forward: float | None
    """Tokens divided by forwards, over the replies that report this ratio."""
    retry_after_s: Spread | None
    latency_ms: Latencies
    goodput: Goodput | None
    """Goodput under the SLO; None without an SLO."""


def summarize(records: Sequence[RequestRecord], slo: RequestSlo | None) -> Summary:
    """Return the summary of the records, which may be empty."""
    completed = [record for record in records if record.outcome is RequestOutcome.OK]
    duration_s = max((record.end_s for record in records), default=0.0)
    output_tokens = sum(record.completion_tokens or 0 for record in completed)
    retries_s = [record.retry_after_s for record in records if record.retry_after_s is not None]
    counts = Counter(record.outcome for record in records)
    return Summary(
        duration_s=duration_s,
        requests={outcome.value: counts[outcome] for outcome in RequestOutcome if counts[outcome]},
        errors={record.outcome.value: record.error for record in reversed(records) if record.error},
        waited=sum(record.waited for record in records),
        requests_per_s=_rate(len(completed), duration_s),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in completed),
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration_s),
        without_usage=sum(record.completion_tokens is None for record in completed),
        tokens_per_forward=_tokens_per_forward(completed),
        retry_after_s=spread(retries_s) if retries_s else None,
        latency_ms=latencies(completed),
        goodput=None if slo is None else goodput(records, slo, duration_s),
    )


def goodput(records: Iterable[RequestRecord], slo: RequestSlo, duration_s: float) -> Goodput:
    """Return the rate and share of the requests that met all limits."""
    ended = [record for record in records if record.outcome is not RequestOutcome.INTERRUPTED]
    good = sum(slo.met_by(record) for record in ended)
    return Goodput(requests_per_s=_rate(good, duration_s), fraction=good / len(ended) if ended else 0.0)


def latencies(completed: Sequence[RequestRecord]) -> Latencies:
    """Return the latencies of completed requests."""
    arrived = [record for record in completed if record.scheduled_s is not None]
    return Latencies(
        ttft=distribution_ms(record.ttft_s for record in completed),
        ttft_arrival=distribution_ms(record.ttft_due_s for record in arrived),
        tpot=distribution_ms(record.tpot_s for record in completed),
        chunk_gap=distribution_ms(gap for record in completed for gap in record.chunk_gaps_s),
        e2e=distribution_ms(record.e2e_s for record in completed),
        delay=distribution_ms(record.delay_s for record in arrived),
    )


def distribution_ms(seconds: Iterable[float | None]) -> Distribution | None:
    """Return the distribution, in milliseconds, of the values that are not None, or None if there are no such
    values."""
    measured_ms = [1000 * value for value in seconds if value is not None]
    if not measured_ms:
        return None
    median, p90, p99 = np.percentile(measured_ms, [50, 90, 99]).tolist()
    return Distribution(
        samples=len(measured_ms),
        mean=float(np.mean(measured_ms)),
        median=median,
        p90=p90,
        p99=p99,
        std=float(np.std(measured_ms)),
    )


def _tokens_per_forward(completed: Iterable[RequestRecord]) -> float | None:
    counts = [(record.completion_tokens, record.tokens_per_forward) for record in completed]
    pairs = [(tokens, rate) for tokens, rate in counts if tokens and rate]
    return sum(tokens for tokens, _ in pairs) / sum(tokens / rate for tokens, rate in pairs) if pairs else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def show_summary(title: str, summary: Summary) -> None:
    """Print the summary as tables."""
    console = Console()
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    counts = Table(show_header=False)
    for name, value in _counts(summary).items():
        counts.add_row(name, escape(value))
    console.print(counts)
    latencies = Table(title="Latencies of completed requests in milliseconds")
    for column in ("", "mean", "median", "p90", "p99", "std", "samples"):
        latencies.add_column(column, justify="right" if column else "left")
    for name, label in LATENCIES.items():
        if (latency := getattr(summary.latency_ms, name)) is not None:
            figures = (latency.mean, latency.median, latency.p90, latency.p99, latency.std)
            latencies.add_row(label, *map(shown_ms, figures), f"{latency.samples:,}")
    if latencies.row_count:
        console.print(latencies)


def shown_ms(figure: float) -> str:
    """Return a latency in milliseconds as the text of a cell, with decimals below 100."""
    return f"{figure:,.2f}" if figure < 100 else f"{figure:,.0f}"


def _counts(summary: Summary) -> dict[str, str]:
    """Return the counts and rates by label, leaving out those that do not apply."""
    rows = {f"requests: {outcome}": _request_row(summary, outcome) for outcome in summary.requests}
    if summary.waited:
        rows["waited for a client"] = f"{summary.waited:,}"
    if summary.retry_after_s:
        retry = summary.retry_after_s
        rows["Retry-After"] = f"{retry.min:g} / {retry.median:g} / {retry.max:g} s (min / median / max)"
    rows["duration"] = f"{summary.duration_s:.2f} s"
    rows["completed requests/s"] = f"{summary.requests_per_s:.3f}"
    rows["output tokens/s"] = f"{summary.output_tokens_per_s:,.1f}"
    rows["tokens, by usage"] = f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"
    if summary.without_usage:
        rows["completed without usage"] = f"{summary.without_usage:,}; their tokens are not counted"
    if summary.tokens_per_forward:
        rows["tokens per forward"] = f"{summary.tokens_per_forward:.2f}"
    if summary.goodput:
        goodput = summary.goodput
        rows["goodput"] = f"{goodput.requests_per_s:.3f} requests/s, {goodput.fraction:.1%} of all"
    return rows


def _request_row(summary: Summary, outcome: str) -> str:
    error = summary.errors.get(outcome)
    return f"{summary.requests[outcome]:,}" + (f"  (first: {error})" if error else "")


def samples(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return all records as columns and rows, with times in milliseconds since the load began."""
    rows = [[figure(record) for figure in SAMPLE_COLUMNS.values()] for record in records]
    return {"columns": list(SAMPLE_COLUMNS), "rows": rows}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


SAMPLE_COLUMNS: dict[str, Callable[[RequestRecord], Any]] = {
    "number": lambda record: record.number,
    "outcome": lambda record: record.outcome.value,
    "http_status": lambda record: record.http_status,
    "scheduled_ms": lambda record: _ms(record.scheduled_s),
    "waited": lambda record: record.waited,
    "sent_ms": lambda record: _ms(record.sent_s),
    "first_chunk_ms": lambda record: _ms(record.chunk_s[0]) if record.chunk_s else None,
    "end_ms": lambda record: _ms(record.end_s),
    "prompt_tokens": lambda record: record.prompt_tokens,
    "completion_tokens": lambda record: record.completion_tokens,
    "tokens_per_forward": lambda record: record.tokens_per_forward,
    "retry_after_s": lambda record: record.retry_after_s,
    "error": lambda record: record.error,
    "chunk_gaps_ms": lambda record: [_ms(gap) for gap in record.chunk_gaps_s],
}
"""Figure of each column of the samples."""
