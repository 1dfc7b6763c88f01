"""Render the pages of all reports from `report.html` and `report_parts.html`, with everything escaped.

A page is one HTML file that loads nothing and only runs `static/chart.js`, which it contains. It is readable on a
phone, in dark mode and without a network. Without scripts, tables show the data of the charts.
"""

import json
from base64 import b64encode
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mars_ray.web.chart import Chart
from mars_ray.web.pages import STATIC

FOLD_FROM = 400
"""Length from which a text is folded."""


def render(template: str, **shown: Any) -> str:
    """Render a template, named by its path below the package, such as "batch/output/report_page.html"."""
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
    html = environment.get_template(template).render(shown)
    # JSON may hold half of a surrogate pair, which cannot be written to a file.
    return html.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    """Return the source expression of a text for a Content-Security-Policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _data(chart: Chart) -> str:
    return json.dumps(asdict(chart), allow_nan=False, separators=(",", ":"))
