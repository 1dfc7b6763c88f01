"""The report of a generate job as one HTML file that needs nothing else.

It is readable on a phone, in the dark and without a network. Rows, reasons and settings are escaped, and the page
forbids requests and foreign scripts.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from mars_ray.batch.output.report import JobReport, PacePoint
from mars_ray.web.chart import Axis, Chart
from mars_ray.web.report import render

POINTS = 60
"""Points of a chart over time at most; shorter spans are joined."""
SPAN_S = 10.0
"""Seconds of a span at least, in a job of some minutes: the tokens of a row count when it ends, all at once."""
SPANS = 4
"""Spans of a short job at least."""
REASONS = 50
"""Reasons that are listed at most, the most frequent first."""
AIR = 0.05
"""Margin above and below the thresholds in their chart."""
UNITS_S = {"h": 3600, "min": 60, "s": 1}


def job_page(report: JobReport) -> str:
    """Write the page."""
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
    """Return the charts of speed and threshold, in the largest unit of which there are at least two."""
    joined = list(_joined(pace))
    if not joined:
        return []
    unit, size = next((each for each in UNITS_S.items() if joined[-1][1].second >= 2 * each[1]), ("s", 1))
    time = Axis(ends=(0, joined[-1][1].second / size), unit=f" {unit}")
    speeds = [(low / size, point.second / size, tokens / (point.second - low)) for low, point, tokens in joined]
    thresholds = [(low / size, point.second / size, point.threshold) for low, point, _ in joined]
    values = [value for *_, value in thresholds]
    around = Axis(ends=(max(0, min(values) - AIR), max(values) + AIR))
    return [
        Chart(title="Tokens per second", bars=speeds, x=time),
        Chart(title="Threshold", bars=thresholds, x=time, y=around),
    ]


def _joined(pace: Sequence[PacePoint]) -> Iterator[tuple[float, PacePoint, int]]:
    """Join spans too short to draw: where each begins, its last point, and its tokens."""
    seconds = pace[-1].second if pace else 0.0
    least = max(seconds / POINTS, min(SPAN_S, seconds / SPANS))
    low, tokens = 0.0, 0
    for point in pace:
        tokens += point.tokens
        if point.second > low and point.second - low >= least:
            yield low, point, tokens
            low, tokens = point.second, 0
    if tokens:
        yield low, pace[-1], tokens


def _histograms(report: JobReport) -> list[Chart]:
    named = {"Sequences by length in tokens": report.lengths, "Sequences by tokens per forward": report.ahead}
    return [
        Chart(title=title, bars=[(bar.low, bar.high, bar.count) for bar in bars])
        for title, bars in named.items()
        if bars
    ]
