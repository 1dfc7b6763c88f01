"""The pages an endpoint shows, and the files they load: read once, and the same for everybody.

In:    nothing but the prefix an endpoint is reached under.
Out:   the bytes of each page and file, with what each may do in a browser.
Never: holds anything of a model, a key or a caller: those a page asks the API for, as any client.
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
"""Content-Security-Policy of every page: code and style from this endpoint's files only, requests to it alone, and no
text can become markup."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file as it is sent."""

    content: bytes
    media_type: str


@cache
def static_files() -> Mapping[str, WebFile]:
    """Return what pages load, by path below the endpoint: "/web/style.css"."""
    return {
        f"/web/{file.name}": WebFile(file.read_bytes(), TYPES[file.suffix])
        for file in sorted(STATIC.iterdir())
        if file.suffix in TYPES
    }


@cache
def page(path: str, prefix: str) -> WebFile:
    """Return the page at `path` of an endpoint reached under `prefix`: "" or "/llm"."""
    environment = Environment(loader=PackageLoader("mars_ray", "web"), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template(PAGES[path]).render(prefix=prefix)
    return WebFile(html.encode(), "text/html; charset=utf-8")


def open_paths() -> frozenset[str]:
    """Return the paths that need no key: a browser sends none with a page."""
    return frozenset(PAGES) | frozenset(static_files())
