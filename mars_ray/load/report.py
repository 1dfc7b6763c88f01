"""Print the summary of a load as tables, and convert its records to JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mars_ray.load.record import RequestRecord
from mars_ray.load.summary import Summary

LATENCIES = {
    "ttft": "TTFT",
    "ttft_arrival": "TTFT, arrival",
    "tpot": "TPOT",
    "chunk_gap": "chunk gap",
    "e2e": "E2E",
    "delay": "delay",
}


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
            latencies.add_row(label, *map(_shown, figures), f"{latency.samples:,}")
    if latencies.row_count:
        console.print(latencies)


def _shown(figure: float) -> str:
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
