"""Routes for operators: the controller's status, manual thresholds, and the events of the live view.

In:    a `ControlClient` of each model.
Out:   routes. The access middleware allows them only for keys with the role `operate`.
Never: applies a value that the controller refuses; keeps frames of the live view between requests.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from mars_ray.chat.request_body import RequestBody
from mars_ray.control.core.live_view import FIGURES, Frame, LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus
from mars_ray.errors import ConfigError, QueueFullError, UnavailableError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.http.models import ControlClient, GatewayModels
from mars_ray.serve.http.streams import EventStreamResponse
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute
from mars_ray.storage.audit_log import AuditWriter

EVERY_S = 1.0
LASTS_S = 15.0
"""Seconds until a viewer must reconnect. Live views are short because a stopping gateway waits for open responses."""
JOBS_EVERY_S = 5.0
VIEWERS = 8
"""Maximum number of concurrent live views. Each one counts towards the limit on operators' requests."""
MANY_REPLICAS = 200
THIN = 3
"""With more than `MANY_REPLICAS` replicas, only every third past frame is sent, enough for the width of a page."""


class LiveFeed:
    """Event streams of the live view, for all viewers."""

    def __init__(self, models: GatewayModels) -> None:
        self._models = models
        self._viewers = 0

    def stream(self, model: str | None, controller: str, after: int) -> EventStreamResponse:
        """Return the events for one viewer of a model, who has a place until the response ends.

        The viewer already has the frames up to `after` of the controller with id `controller`. Raises `QueueFullError`
        if there are too many viewers.
        """
        control = self._models.control(model)
        if self._viewers >= VIEWERS:
            raise QueueFullError(f"{VIEWERS} live views are open already, which is the maximum. Close one.")
        self._viewers += 1
        return EventStreamResponse(self._events(control, controller, after), {}, self._leave)

    async def _leave(self) -> None:
        self._viewers -= 1

    async def _events(self, control: ControlClient, controller: str, after: int) -> AsyncGenerator[str, None]:
        jobs: list[RunningJob] = []
        jobs_s = -JOBS_EVERY_S
        ends_s = time.monotonic() + LASTS_S
        while time.monotonic() < ends_s:
            try:
                if time.monotonic() - jobs_s >= JOBS_EVERY_S:
                    jobs = await control.jobs()
                    jobs_s = time.monotonic()
                report = await control.live(controller, after)
            except UnavailableError as error:
                yield json.dumps({"silent": str(error)})
            else:
                first = report.controller != controller
                for frame in _thinned(report) if first else report.frames:
                    yield json.dumps({"frame": _frame(frame), "controller": report.controller})
                if report.frames:
                    controller = report.controller
                    after = report.frames[-1].number
                yield json.dumps({"now": _now(report, jobs, self._models.names()) | {"after": after}})
            await asyncio.sleep(EVERY_S)


def _thinned(report: LiveReport) -> tuple[Frame, ...]:
    return report.frames[::-THIN][::-1] if report.replicas > MANY_REPLICAS else report.frames


def _frame(frame: Frame) -> dict[str, Any]:
    values = np.round(frame.values_RF.astype(float), 4)
    rows = np.where(np.isnan(values), None, values)  # type: ignore[call-overload]  # JSON has no NaN
    return {"unix_s": frame.unix_s, "replicas": frame.replicas, "figures": FIGURES, "values": rows.tolist()}


def _now(report: LiveReport, jobs: list[RunningJob], models: list[str]) -> dict[str, Any]:
    return {
        "controller": report.controller,
        "unix_s": time.time(),
        "status": asdict(report.status),
        "replicas": report.replicas,
        "jobs": [asdict(job) for job in jobs],
        "models": models,
    }


class OverrideRequest(RequestBody, allow_inf_nan=False):
    """Body of `PUT /control/threshold`."""

    threshold: float = Field(ge=0, le=1)
    model: str | None = None
    """Model whose thresholds to override; None means the main model."""
    service_class: str | None = None
    """Class of service to override; None means all classes."""
    seconds: float | None = Field(None, gt=0)
    """Duration of the override; None means until it is cleared."""


def control_routes(models: GatewayModels, audit: AuditWriter) -> APIRouter:
    """Return the routes under `/control`."""
    routes = APIRouter(prefix="/control", route_class=JsonRoute)
    feed = LiveFeed(models)

    @routes.get("")
    async def status(model: str | None = None) -> ClusterStatus:
        """Return the replicas of a model, the load, the thresholds and the reasons for them."""
        return await models.control(model).status()

    @routes.get("/live", include_in_schema=False)
    async def live(model: str | None = None, controller: str = "", after: int = 0) -> Response:
        """Stream the history after frame `after` of the controller with id `controller`, then new events."""
        return feed.stream(model, controller, after)

    @routes.put("/threshold", status_code=204)
    async def set_threshold(body: OverrideRequest, request: Request) -> Response:
        """Set a threshold by hand. It overrides the policy until it expires or is cleared."""
        try:
            await models.control(body.model).set_threshold(body.threshold, body.service_class, body.seconds)
        except ConfigError as error:
            raise ApiError.bad_request(str(error), "threshold") from None
        details = {"threshold": body.threshold, "seconds": body.seconds} | _named(body.model)
        _record(audit, request, "threshold.set", body.service_class, details)
        return Response(status_code=204)

    @routes.delete("/threshold", status_code=204)
    async def clear_threshold(request: Request, service_class: str | None = None, model: str | None = None) -> Response:
        """Clear a threshold set by hand, so that the policy decides again."""
        try:
            await models.control(model).clear_threshold(service_class)
        except ConfigError as error:
            raise ApiError.bad_request(str(error), "service_class") from None
        _record(audit, request, "threshold.cleared", service_class, _named(model))
        return Response(status_code=204)

    return routes


def _named(model: str | None) -> dict[str, str]:
    return {} if model is None else {"model": model}


def _record(
    audit: AuditWriter, request: Request, action: str, service_class: str | None, details: dict[str, Any]
) -> None:
    audit.record(Exchange.of(request.scope).operator, action, service_class or "*", details=details)
