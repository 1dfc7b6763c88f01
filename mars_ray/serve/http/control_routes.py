"""Routes of operators: what the controller decided, and thresholds set by hand.

In:    a `ControlClient`.
Out:   routes; the access middleware lets only keys of the role `operate` come here.
Never: applies a value the controller refuses.
"""

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field

from mars_ray.control.core.status import ClusterStatus
from mars_ray.errors import ConfigError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.request_body import RequestBody
from mars_ray.serve.http.control_client import ControlClient
from mars_ray.serve.http.live_feed import LiveFeed
from mars_ray.serve.http.sse import EventStreamResponse
from mars_ray.serve.middleware.json_body import JsonRoute


class OverrideRequest(RequestBody):
    """Body of `PUT /control/threshold`."""

    model_config = ConfigDict(allow_inf_nan=False)

    threshold: float = Field(ge=0, le=1)
    service_class: str | None = None
    """None is all of them."""
    seconds: float | None = Field(None, gt=0)
    """None lasts until it is cleared."""


def control_routes(control: ControlClient) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/control", route_class=JsonRoute)
    feed = LiveFeed(control)

    @routes.get("")
    async def status() -> ClusterStatus:
        """Replicas, load, thresholds and the reasons for them."""
        return await control.status()

    @routes.get("/live", include_in_schema=False)
    async def live(controller: str = "", after: int = 0) -> Response:
        """Stream what came since `after` in that life of the controller, and what comes, to the live view."""
        return EventStreamResponse(feed.events(controller, after), {})

    @routes.put("/threshold", status_code=204)
    async def set_threshold(body: OverrideRequest) -> Response:
        """Set a threshold by hand; the policy is not asked until it ends or is cleared."""
        try:
            await control.set_threshold(body.threshold, body.service_class, body.seconds)
        except ConfigError as error:
            raise ApiError.bad_request(str(error), "threshold") from None
        return Response(status_code=204)

    @routes.delete("/threshold", status_code=204)
    async def clear_threshold(service_class: str | None = None) -> Response:
        """Let the policy decide again."""
        try:
            await control.clear_threshold(service_class)
        except ConfigError as error:
            raise ApiError.bad_request(str(error), "service_class") from None
        return Response(status_code=204)

    return routes
