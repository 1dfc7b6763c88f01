"""Routes for usage: `/v1/usage` for the account of the key, `/admin/usage` for operators.

In:    the meter of the gateway, or None if the endpoint counts no usage.
Out:   sums by day, account, key and model.
Never: shows the usage of another account at `/v1/usage`.
"""

import asyncio
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from mars_ray.errors import ConfigError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.usage_report import UsageQuery, parse_query, report_rows
from mars_ray.platform.usage.usage_rows import UsageSums
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute

USAGE_PATH = "/v1/usage"


class UsageReport(BaseModel):
    """Usage of some days. Each row has the columns of `group_by`, and counts."""

    object: Literal["list"] = "list"
    start: str
    end: str
    data: list[dict[str, Any]]


Day = Annotated[date | None, Query(description="Day in UTC, such as 2026-11-25.")]
GroupBy = Annotated[str, Query(max_length=100, description="Some of day, account, key, model, separated by commas.")]


def usage_routes(meter: GatewayMeter | None) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False)

    async def report(account: str | None, start: date | None, end: date | None, group_by: str) -> Response:
        if meter is None:
            message = "This endpoint counts no usage. Set keys, oidc or storage in its serve config."
            raise ApiError(404, message, type="not_found_error", code="usage_not_counted")
        try:
            query = parse_query(start, end, group_by, datetime.now(UTC).date())
        except ConfigError as error:
            raise ApiError.bad_request(str(error)) from None
        sums = await meter.link.report(query, account)
        # In a thread, because thousands of rows would hold up the event loop.
        content = await asyncio.to_thread(_content, query, sums)
        return Response(content, media_type="application/json")

    @routes.get(USAGE_PATH, response_model=UsageReport)
    async def own_usage(
        request: Request, start: Day = None, end: Day = None, group_by: GroupBy = "day,model"
    ) -> Response:
        """Return the usage of all keys of the caller's account."""
        return await report(Exchange.of(request.scope).owner, start, end, group_by)

    @routes.get("/admin/usage", response_model=UsageReport)
    async def all_usage(
        start: Day = None,
        end: Day = None,
        group_by: GroupBy = "day,account,key,model",
        account: Annotated[str | None, Query(max_length=128)] = None,
    ) -> Response:
        """Return the usage of one account, or of all."""
        return await report(account, start, end, group_by)

    return routes


def _content(query: UsageQuery, sums: UsageSums) -> str:
    report = UsageReport(start=query.start, end=query.end, data=report_rows(sums, query.by))
    return report.model_dump_json()
