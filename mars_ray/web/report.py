"""Render the pages of all reports: the look (`report.html`), some parts (`report_parts.html`), and that all is escaped.

A page is one HTML file that fetches nothing and runs nothing but `static/chart.js`, which it holds; readable on a
phone, in the dark and without a network. Where scripts are off, tables have what charts would show.
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
"""Characters of a text that is folded behind its beginning."""


def render(template: str, **shown: Any) -> str:
    """Fill a template, named by its path below the package: "batch/output/report_page.html"."""
    environment = Environment(
        loader=PackageLoader("mars_ray", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"told": _told, "data": _data}
    style, script = ((STATIC / name).read_text() for name in ("style.css", "chart.js"))
    environment.globals |= {
        "fold_from": FOLD_FROM,
        "style": Markup(style),
        "script": Markup(script),
        "sources": f"style-src '{_digest(style)}'; script-src '{_digest(script)}'",
    }
    html = environment.get_template(template).render(shown)
    # Half of a surrogate pair, as JSON may hold it, could not be written to a file.
    return html.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    """Name a text in a Content-Security-Policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _data(chart: Chart) -> str:
    return json.dumps(asdict(chart), allow_nan=False, separators=(",", ":"))
