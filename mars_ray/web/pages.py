"""Provide the pages of an endpoint and the files that they load; each is read once.

In:    the URL prefix of the endpoint.
Out:   the bytes of each page and file, and the Content-Security-Policy of pages.
Never: puts data of models, keys or callers into pages; pages fetch such data from the API, like any client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
PAGES = {"/": "playground.html", "/cluster": "cluster.html"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content-Security-Policy of all pages: scripts, styles and requests only from and to this endpoint, and no text
inserted as markup."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """Content and media type of a file or page."""

    content: bytes
    media_type: str


@cache
def static_files() -> Mapping[str, WebFile]:
    """Return the files that pages load, keyed by their paths relative to the endpoint, such as "/web/style.css"."""
    return {
        f"/web/{file.name}": WebFile(file.read_bytes(), TYPES[file.suffix])
        for file in sorted(STATIC.iterdir())
        if file.suffix in TYPES
    }


@cache
def page(path: str, prefix: str) -> WebFile:
    """Return the page at `path` of an endpoint with a URL prefix, such as "" or "/llm"."""
    environment = Environment(loader=PackageLoader("mars_ray", "web"), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template(PAGES[path]).render(prefix=prefix)
    return WebFile(html.encode(), "text/html; charset=utf-8")


def open_paths() -> frozenset[str]:
    """Return the paths that need no API key, because browsers send no key when they load a page."""
    return frozenset(PAGES) | frozenset(static_files())
