"""Render the report of a generate job as one self-contained HTML file.

Rows, reasons and settings are escaped. The page's Content-Security-Policy forbids all requests, and all scripts except
those in the file.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from mars_ray.batch.output.report import JobReport, PacePoint
from mars_ray.web.report import Axis, Chart, render

POINTS = 60
"""Maximum number of points in a chart over time. If a job has more time spans, neighbouring ones are joined."""
SPAN_S = 10.0
"""Minimum time span in seconds. All tokens of a row are counted at the time when the row ends, so shorter spans would
show bursts."""
SPANS = 4
"""Minimum number of time spans in the charts of a short job."""
REASONS = 50
"""Maximum number of error kinds to list, most frequent first."""
AIR = 0.05
"""Margin above and below the curve in the chart of thresholds."""
UNITS_S = {"h": 3600, "min": 60, "s": 1}


def job_page(report: JobReport) -> str:
    """Return the HTML page of a report."""
    reasons = sorted(report.errors_by_reason.items(), key=lambda item: (-item[1], item[0]))
    return render(
        "batch/output/report_page.html",
        report=report,
        drawn=[*_over_time(report.pace), *_histograms(report)],
        reasons=reasons[:REASONS],
        other_reasons=reasons[REASONS:],
        duration=timedelta(seconds=round(report.seconds)),
    )


def _over_time(pace: Sequence[PacePoint]) -> list[Chart]:
    """Return charts of speed and threshold over time. The unit of time is the largest that is at most half the job's
    time."""
    joined = list(_joined(pace))
    if not joined:
        return []
    end_s = joined[-1].high
    unit, size = next((item for item in UNITS_S.items() if end_s >= 2 * item[1]), ("s", 1))
    time_axis = Axis(ends=(0, end_s / size), unit=f" {unit}")
    speeds = [(span.low / size, span.high / size, span.tokens / (span.high - span.low)) for span in joined]
    thresholds = [(span.low / size, span.high / size, span.threshold) for span in joined if span.tokens]
    values = [value for *_, value in thresholds] or [1.0]
    threshold_axis = Axis(ends=(max(0, min(values) - AIR), max(values) + AIR))
    return [
        Chart(title="Tokens per second", bars=speeds, x=time_axis),
        Chart(title="Threshold", bars=thresholds, x=time_axis, y=threshold_axis),
    ]


class _Span(NamedTuple):
    """A time span in seconds."""

    low: float
    high: float
    tokens: int
    threshold: float
    """Mean over the tokens."""


def _joined(pace: Sequence[PacePoint]) -> Iterator[_Span]:
    """Join time spans that are too short to draw."""
    seconds = pace[-1].second if pace else 0.0
    shortest_s = max(seconds / POINTS, min(SPAN_S, seconds / SPANS))
    low = 0.0
    points: list[PacePoint] = []
    for point in pace:
        points.append(point)
        if point.second > low and point.second - low >= shortest_s:
            yield _span(low, points)
            low = point.second
            points = []
    if sum(point.tokens for point in points):
        yield _span(low, points)


def _span(low: float, points: Sequence[PacePoint]) -> _Span:
    tokens = sum(point.tokens for point in points)
    weighted = sum(point.threshold * point.tokens for point in points)
    return _Span(low, points[-1].second, tokens, weighted / tokens if tokens else 1.0)


def _histograms(report: JobReport) -> list[Chart]:
    histograms = {"Sequences by length in tokens": report.lengths, "Sequences by tokens per forward": report.ahead}
    return [
        Chart(title=title, bars=[(bar.low, bar.high, bar.count) for bar in bars])
        for title, bars in histograms.items()
        if bars
    ]
