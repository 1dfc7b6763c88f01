"""Charts of reports as data, which `static/chart.js` draws."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a chart."""

    ends: tuple[float, float] | None = None
    """Minimum and maximum of the axis; None fits the axis to the data."""
    unit: str = ""
    """Suffix of the values, such as " %"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line in a chart."""

    name: str = ""
    at: Sequence[tuple[float, float]]
    """Points of the line as (x, y)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A labelled point in a chart."""

    name: str
    kind: str = ""
    """Styles separated by a space: "special", "hollow", both or neither."""
    x: float
    y: float
    x_within: tuple[float, float]
    """Interval of `x`, drawn as whiskers."""
    y_within: tuple[float, float]
    """Interval of `y`, drawn as whiskers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines, bars and points."""

    title: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[float, float, float]] = ()
    """Bars as (left edge, right edge, value)."""
    points: Sequence[Point] = ()
    x: Axis = Axis()
    y: Axis = Axis()
