"""Routes of the pages for people: the playground, the live view, and the files they load.

In:    the room `web`.
Out:   routes without a key; what the pages show they ask the API for, with the key of the person.
Never: lets a page load or call anything but this endpoint.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mars_ray.serve.middleware.paths import routed_path
from mars_ray.web.pages import PAGES, POLICY, page, static_files

HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}


def web_routes() -> APIRouter:
    """Return the routes, one for each page and file."""
    routes = APIRouter(redirect_slashes=False, include_in_schema=False)

    async def get_page(request: Request) -> Response:
        found = page(routed_path(request.scope), str(request.scope.get("root_path") or ""))
        return Response(found.content, media_type=found.media_type, headers=HEADERS)

    async def get_file(request: Request) -> Response:
        found = static_files()[routed_path(request.scope)]
        return Response(found.content, media_type=found.media_type)

    for path in PAGES:
        routes.add_api_route(path, get_page, methods=["GET"])
    for path in static_files():
        routes.add_api_route(path, get_file, methods=["GET"])
    return routes
