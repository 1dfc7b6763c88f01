"""The results of an evaluation as PNGs, for a light or a dark ground: quality by speed, and where acceptance stops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox

from mars_ray.evaluation.results import Results
from mars_ray.evaluation.settings import AR, EXACT

MARKERS = {AR.name: "s", EXACT.name: "D"}
DOTS_PER_INCH = 160
POINTS_PER_PIXEL = 72 / 100
"""While it is laid out, at the 100 pixels per inch of matplotlib."""
PLACES = [(right, up) for distance in range(5) for up in (9 + 14 * distance, -17 - 14 * distance) for right in (5, -25)]
"""Place of a name, in pixels from its point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Colours of a ground, as in the style of the page."""

    ground: str
    ink: str
    soft: str
    line: str
    mark: str
    special: str


LIGHT = Look(ground="#ffffff", ink="#1d2125", soft="#646b73", line="#e2e3e1", mark="#3a6ea5", special="#a86400")
DARK = Look(ground="#1c1f22", ink="#e4e6e8", soft="#99a1a9", line="#2f3337", mark="#7aa9d8", special="#e0a64a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting in a chart of quality against speed."""

    name: str
    x: float
    x_std: float
    accuracy: float
    low: float
    high: float


def by_forwards(results: Results) -> list[Point]:
    """Return accuracy against tokens per forward, of the settings that answered anything."""
    return [
        Point(
            name=name,
            x=each.tokens_per_forward,
            x_std=each.tokens_per_forward_std or 0.0,
            accuracy=each.accuracy,
            low=each.accuracy_low,
            high=each.accuracy_high,
        )
        for name, each in results.overall.items()
        if each.tokens_per_forward is not None
    ]


def by_clock(results: Results) -> list[Point]:
    """Return accuracy against tokens per second."""
    return [
        Point(
            name=name,
            x=results.speed.settings[name].tokens_per_s,
            x_std=results.speed.settings[name].tokens_per_s_std,
            accuracy=each.accuracy,
            low=each.accuracy_low,
            high=each.accuracy_high,
        )
        for name, each in results.overall.items()
    ]


def best(points: Sequence[Point]) -> list[Point]:
    """Return those that no other beats in one thing without losing in the other, slowest first."""
    return sorted(
        (
            one
            for one in points
            if not any(
                other.x >= one.x
                and other.accuracy >= one.accuracy
                and (other.x, other.accuracy) != (one.x, one.accuracy)
                for other in points
            )
        ),
        key=lambda point: point.x,
    )


def quality_chart(points: Sequence[Point], x_label: str, look: Look) -> bytes:
    """Draw accuracy against speed; a line joins the best, the others are hollow."""
    figure, axes = _axes(look)
    front = best(points)
    axes.plot([point.x for point in front], [point.accuracy for point in front], color=look.mark, lw=1, alpha=0.6)
    for point in points:
        colour = look.special if point.name in MARKERS else look.mark
        axes.errorbar(
            point.x,
            point.accuracy,
            xerr=point.x_std,
            yerr=[[max(0.0, point.accuracy - point.low)], [max(0.0, point.high - point.accuracy)]],
            fmt=MARKERS.get(point.name, "o"),
            ms=6,
            color=colour,
            mfc=colour if point in front else look.ground,
            ecolor=to_rgba(colour, 0.45),
            elinewidth=0.8,
            capsize=2,
            zorder=3,
        )
    axes.set_xlabel(x_label)
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.draw_without_rendering()  # places of points are known from here on
    _label(axes, points, look)
    return _png(figure)


def stops_chart(stops: Mapping[str, Sequence[int]], look: Look) -> bytes:
    """Draw which share of the forwards gave 1, 2, ... tokens, a line for each setting."""
    figure, axes = _axes(look)
    # A ramp of colours, for the order of the thresholds says more than their names.
    ramp = colormaps["viridis"]
    for number, (name, counts) in enumerate(stops.items()):
        total, colour = sum(counts) or 1, ramp(0.15 + 0.7 * number / max(1, len(stops) - 1))
        shares = [count / total for count in counts]
        axes.plot(range(1, len(counts) + 1), shares, "o-", ms=4, lw=1.4, color=colour, label=name)
    axes.set_xlabel("tokens accepted before acceptance stopped")
    axes.set_ylabel("share of forwards")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, labelcolor=look.ink, fontsize=8)
    return _png(figure)


def _axes(look: Look) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor=look.ground)
    axes = figure.subplots()
    axes.set_facecolor(look.ground)
    axes.grid(color=look.line, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=look.soft, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(look.line)
    axes.xaxis.label.set_color(look.ink)
    axes.yaxis.label.set_color(look.ink)
    return figure, axes


def _label(axes: Axes, points: Sequence[Point], look: Look) -> None:
    """Name the points, each at the first of `PLACES` where it covers neither another point nor a name."""
    at = {point.name: axes.transData.transform((point.x, point.accuracy)) for point in points}
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at.values()]
    for point in points:
        name = point.name.removeprefix("threshold ")
        x, y = at[point.name]
        size = (6 * len(name), 10)
        boxes = [(right, up, Bbox.from_bounds(x + right, y + up, *size)) for right, up in PLACES]
        right, up, box = next((each for each in boxes if not any(each[2].overlaps(other) for other in taken)), boxes[0])
        taken.append(box)
        axes.annotate(
            name,
            (point.x, point.accuracy),
            xytext=(right * POINTS_PER_PIXEL, up * POINTS_PER_PIXEL),
            textcoords="offset points",
            fontsize=8,
            color=look.ink,
        )


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    # Without the version of matplotlib and a time the same results give the same file.
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()
