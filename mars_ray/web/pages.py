"""Pages of an endpoint and the files they load, read once.

In:    the prefix of the endpoint.
Out:   the bytes of each page and file, and the Content-Security-Policy of pages.
Never: contain data of a model, a key or a caller; pages ask the API for these, like any client.
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
"""Content-Security-Policy of every page: scripts, styles and requests only of this endpoint, and no text as markup."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """Content and media type of one file."""

    content: bytes
    media_type: str


@cache
def static_files() -> Mapping[str, WebFile]:
    """Return the files that pages load, by path below the endpoint, such as "/web/style.css"."""
    return {
        f"/web/{file.name}": WebFile(file.read_bytes(), TYPES[file.suffix])
        for file in sorted(STATIC.iterdir())
        if file.suffix in TYPES
    }


@cache
def page(path: str, prefix: str) -> WebFile:
    """Return the page at `path` of an endpoint with the prefix `prefix`, such as "" or "/llm"."""
    environment = Environment(loader=PackageLoader("mars_ray", "web"), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template(PAGES[path]).render(prefix=prefix)
    return WebFile(html.encode(), "text/html; charset=utf-8")


def open_paths() -> frozenset[str]:
    """Return the paths that need no key, because browsers send none with a page."""
    return frozenset(PAGES) | frozenset(static_files())
