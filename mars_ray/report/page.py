"""Render the pages of all reports: the look (`page.html`), some parts (`page_parts.html`), and that all is escaped.

A page is one HTML file that runs no script and fetches nothing, readable on a phone, in the dark and without a network.
"""

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    environment.filters["told"] = _told
    environment.globals["fold_from"] = FOLD_FROM
    html = environment.get_template(template).render(shown)
    # Half of a surrogate pair, as JSON may hold it, could not be written to a file.
    return html.encode("utf-8", "replace").decode()


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
