"""A chart of a report as data: `static/chart.js` draws it, there as in the live view of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """How values stand along one side."""

    ends: tuple[float, float] | None = None
    """Where it begins and ends; None for what the values ask for."""
    unit: str = ""
    """Written behind values: " %"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Values joined by a line."""

    name: str = ""
    at: Sequence[tuple[float, float]]
    """Pairs of x and y."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value with a name."""

    name: str
    kind: str = ""
    """How it is drawn: "special", "hollow", both, or neither."""
    x: float
    y: float
    x_within: tuple[float, float]
    y_within: tuple[float, float]
    """Where the value may lie; drawn as whiskers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with whatever it shows."""

    title: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[float, float, float]] = ()
    """From where to where on the horizontal axis, and the value."""
    points: Sequence[Point] = ()
    x: Axis = Axis()
    y: Axis = Axis()
