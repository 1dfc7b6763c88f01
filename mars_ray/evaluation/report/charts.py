"""The charts of an evaluation: quality by speed, and where acceptance stops."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mars_ray.evaluation.results import Metrics, Results
from mars_ray.evaluation.settings import AR, EXACT
from mars_ray.web.chart import Axis, Chart, Line, Point

SPECIAL = (AR.name, EXACT.name)
AIR = 0.06
"""Margin around the points, as a share of what they span."""


def charts_of(results: Results) -> list[Chart]:
    """Return the charts there is something to draw in."""
    forwards = [
        _point(name, each, each.tokens_per_forward, each.tokens_per_forward_std or 0.0)
        for name, each in results.overall.items()
        if each.tokens_per_forward is not None
    ]
    clock = [
        _point(name, results.overall[name], each.tokens_per_s, each.tokens_per_s_std)
        for name, each in results.speed.settings.items()
    ]
    # A setting that never looks ahead stops nowhere.
    stops = {name: each for name, each in results.stops.items() if name.startswith("threshold") and any(each[1:])}
    charts = [
        _quality("Accuracy against tokens per forward", forwards),
        _quality("Accuracy against tokens per second", clock),
    ]
    if stops:
        charts.append(_stops("Share of the forwards that gave 1, 2, … tokens", stops))
    return charts


def best(points: Sequence[Point]) -> list[Point]:
    """Return those that no other beats in one thing without losing in the other, slowest first."""
    return sorted(
        (
            one
            for one in points
            if not any(
                other.x >= one.x and other.y >= one.y and (other.x, other.y) != (one.x, one.y) for other in points
            )
        ),
        key=lambda point: point.x,
    )


def _point(name: str, figures: Metrics, x: float, spread: float) -> Point:
    return Point(
        name=name.removeprefix("threshold "),
        kind="special" if name in SPECIAL else "",
        x=x,
        y=100 * figures.accuracy,
        x_within=(x - spread, x + spread),
        y_within=(100 * figures.accuracy_low, 100 * figures.accuracy_high),
    )


def _quality(title: str, points: Sequence[Point]) -> Chart:
    """Draw accuracy against speed; a line joins the best, the others are hollow."""
    front = best(points)
    return Chart(
        title=title,
        lines=[Line(at=[(point.x, point.y) for point in front])],
        points=[point if point in front else replace(point, kind=f"{point.kind} hollow") for point in points],
        x=_around([end for point in points for end in point.x_within]),
        y=_around([end for point in points for end in point.y_within], " %"),
    )


def _stops(title: str, stops: Mapping[str, Sequence[int]]) -> Chart:
    """Draw a line for each setting."""
    lines = [
        Line(name=name, at=[(gain, 100 * count / (sum(counts) or 1)) for gain, count in enumerate(counts, start=1)])
        for name, counts in stops.items()
    ]
    return Chart(title=title, lines=lines, y=Axis(unit=" %"))


def _around(values: Sequence[float], unit: str = "") -> Axis:
    air = AIR * (max(values) - min(values)) or 1.0
    return Axis(ends=(min(values) - air, max(values) + air), unit=unit)
