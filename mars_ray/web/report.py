"""Render the pages of reports from `report.html` and `report_parts.html`, and escape all text.

A page is one HTML file that loads no other file; its only script is `static/chart.js`, whose text is part of the page.
The page can be read on a phone, in dark mode and without a network. If scripts are blocked, tables still show the data
of the charts.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mars_ray.web.pages import STATIC

FOLD_FROM = 400
"""Length in characters above which a text is folded."""


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


def render(template: str, **values: Any) -> str:
    """Render a template, given by its path in the package, such as "batch/output/report_page.html"."""
    environment = Environment(
        loader=PackageLoader("mars_ray", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": _shown, "data": _data}
    style, script = ((STATIC / name).read_text() for name in ("style.css", "chart.js"))
    environment.globals |= {
        "fold_from": FOLD_FROM,
        "style": Markup(style),
        "script": Markup(script),
        "sources": f"style-src '{_digest(style)}'; script-src '{_digest(script)}'",
    }
    html = environment.get_template(template).render(values)
    # JSON may contain half of a surrogate pair, which cannot be written to a file.
    return html.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    """Return the hash of a script or style, as a source in a Content-Security-Policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _data(chart: Chart) -> str:
    return json.dumps(asdict(chart), allow_nan=False, separators=(",", ":"))
