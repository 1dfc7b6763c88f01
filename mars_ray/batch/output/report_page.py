"""The report of a generate job as one HTML file that needs nothing else.

It is readable on a phone, in the dark and without a network. Rows, reasons and settings are escaped, and the page
forbids scripts and requests.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from mars_ray.batch.output.report import Bar, JobReport, PacePoint
from mars_ray.report.chart import Chart, Span, chart, unit_of
from mars_ray.report.page import render

POINTS = 400
"""Points of a chart over time at most; shorter spans are joined."""
REASONS = 50
"""Reasons that are listed at most, the most frequent first."""
AIR = 0.05
"""Margin above and below the thresholds in their chart."""


def page(report: JobReport) -> str:
    """Write the page."""
    reasons = sorted(report.errors_by_reason.items(), key=lambda item: (-item[1], item[0]))
    return render(
        "batch/output/report_page.html",
        report=report,
        charts=_charts(report),
        reasons=reasons[:REASONS],
        other_reasons=reasons[REASONS:],
        duration=timedelta(seconds=round(report.seconds)),
    )


def _charts(report: JobReport) -> dict[str, Chart]:
    """Lay out the charts there is something to draw in, by title."""
    charts = {}
    joined = list(_joined(report.pace))
    if joined:
        unit = unit_of(joined[-1][1].second)
        pace = [Span(low=low, high=point.second, value=tokens / (point.second - low)) for low, point, tokens in joined]
        threshold = [Span(low=low, high=point.second, value=point.threshold) for low, point, _ in joined]
        values = [span.value for span in threshold]
        charts["Tokens per second"] = chart(pace, 0, _above(pace), unit)
        charts["Threshold"] = chart(threshold, max(0, min(values) - AIR), max(values) + AIR, unit)
    for title, bars in (
        ("Sequences by length in tokens", report.lengths),
        ("Sequences by tokens per forward", report.ahead),
    ):
        if bars:
            charts[title] = _histogram(bars)
    return charts


def _joined(pace: Sequence[PacePoint]) -> Iterator[tuple[float, PacePoint, int]]:
    """Join spans too short to draw: where each begins, its last point, and its tokens."""
    least = pace[-1].second / POINTS if pace else 0.0
    low, tokens = 0.0, 0
    for point in pace:
        tokens += point.tokens
        if point.second > low and point.second - low >= least:
            yield low, point, tokens
            low, tokens = point.second, 0


def _histogram(bars: Sequence[Bar]) -> Chart:
    spans = [Span(low=bar.low, high=bar.high, value=bar.count) for bar in bars]
    return chart(spans, 0, _above(spans))


def _above(spans: Sequence[Span]) -> float:
    return 1.08 * max(span.value for span in spans) or 1.0
