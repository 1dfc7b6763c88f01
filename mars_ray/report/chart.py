"""The geometry of a small chart: where marks, grid lines and labels stand, in percent of the drawing.

Matplotlib finds the ticks, but does not draw: its SVG has the colours, fonts and width of the moment it was made, where
the page draws these marks with its own style sheet, at any width, in light and dark, and with a text on each mark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

TICKS = 5
UNITS_S = {"h": 3600, "min": 60, "s": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A value between two points of the horizontal axis."""

    low: float
    high: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A span as it is drawn; `top` counts from the upper edge."""

    left: float
    right: float
    top: float
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label, so far from the left or from the upper edge."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything a page needs to draw the chart."""

    marks: tuple[Mark, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]


def chart(spans: Sequence[Span], bottom: float, top: float, unit: str = "") -> Chart:
    """Lay out at least one span; `bottom` and `top` are the ends of the vertical axis."""
    first, last = spans[0].low, spans[-1].high
    scale = UNITS_S.get(unit, 1)

    def across(value: float) -> float:
        return 100 * (value - first) / (last - first)

    def down(value: float) -> float:
        return 100 * (top - value) / (top - bottom)

    def position(value: float) -> str:
        return f"{short(value / scale)} {unit}".strip()

    return Chart(
        marks=tuple(
            Mark(
                left=across(span.low),
                right=across(span.high),
                top=down(span.value),
                says=f"{position(span.low)} to {position(span.high)}: {short(span.value)}",
            )
            for span in spans
        ),
        across=_ticks(first / scale, last / scale, lambda value: across(value * scale), unit),
        up=_ticks(bottom, top, down, ""),
    )


def short(value: float) -> str:
    """Write a number in few characters: 950, 0.85, 12.5k, 3M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def unit_of(seconds: float) -> str:
    """Name the largest unit of which there are at least two."""
    return next((unit for unit, size in UNITS_S.items() if seconds >= 2 * size), "s")


def _ticks(low: float, high: float, at: Callable[[float], float], unit: str) -> tuple[Tick, ...]:
    values = MaxNLocator(nbins=TICKS).tick_values(low, high)
    return tuple(
        Tick(at=at(value), label=f"{short(value)} {unit}".strip())
        for value in (float(each) for each in values)
        if low <= value <= high
    )
