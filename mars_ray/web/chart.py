"""Charts of a report as data, drawn by `static/chart.js`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis."""

    ends: tuple[float, float] | None = None
    """First and last value; None fits the data."""
    unit: str = ""
    """Suffix of values, such as " %"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line chart series."""

    name: str = ""
    at: Sequence[tuple[float, float]]
    """Pairs of x and y."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A labelled point."""

    name: str
    kind: str = ""
    """Style: "special", "hollow", both, or neither."""
    x: float
    y: float
    x_within: tuple[float, float]
    y_within: tuple[float, float]
    """Interval of the value, drawn as whiskers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines, bars and points."""

    title: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[float, float, float]] = ()
    """Left edge, right edge and value of each bar."""
    points: Sequence[Point] = ()
    x: Axis = Axis()
    y: Axis = Axis()
