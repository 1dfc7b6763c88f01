"""The events of the live view: the cluster now, once a second, and what was before.

In:    a `ControlClient`.
Out:   JSON texts: `frames` of the past and those that come, `now`, `silent` while no controller answers.
Never: keeps anything: after a restart of the controller its new frames follow, and the page has the old ones; nor holds
       up a gateway that stops: it ends soon by itself, and whoever looks asks for what came since.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import numpy as np

from mars_ray.control.core.history import FIGURES, Frame
from mars_ray.control.core.live_report import LiveReport, RunningJob
from mars_ray.errors import UnavailableError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.http.control_client import ControlClient

EVERY_S = 1.0
LASTS_S = 15.0
"""Seconds until a viewer has to ask again: a gateway that is to stop waits for what it has begun."""
JOBS_EVERY_S = 5.0
VIEWERS = 8
"""Live views at a time: each holds one of the places that operators have."""
MANY_REPLICAS = 200
THIN = 3
"""With so many replicas every third frame of the past is sent, which draws the same at the width of a page."""


class LiveFeed:
    """Events for everybody who looks."""

    def __init__(self, control: ControlClient) -> None:
        self._control, self._viewers = control, 0

    def events(self, controller: str, after: int) -> AsyncGenerator[str, None]:
        """Return the events for one viewer, who knows the frames up to `after` of that life of the controller.

        Raises an `ApiError` where there are too many viewers.
        """
        if self._viewers >= VIEWERS:
            message = f"{VIEWERS} live views are open already, the most there may be. Close one."
            raise ApiError(429, message, type="rate_limit_error", code="overloaded")
        return self._events(controller, after)

    async def _events(self, controller: str, after: int) -> AsyncGenerator[str, None]:
        self._viewers += 1
        try:
            jobs, jobs_s = list[RunningJob](), -JOBS_EVERY_S
            ends_s = time.monotonic() + LASTS_S
            while time.monotonic() < ends_s:
                try:
                    if time.monotonic() - jobs_s >= JOBS_EVERY_S:
                        jobs, jobs_s = await self._control.jobs(), time.monotonic()
                    report = await self._control.live(controller, after)
                except UnavailableError as error:
                    yield json.dumps({"silent": str(error)})
                else:
                    first = report.controller != controller
                    for frame in _thinned(report) if first else report.frames:
                        yield json.dumps({"frame": _frame(frame), "controller": report.controller})
                    if report.frames:
                        controller, after = report.controller, report.frames[-1].number
                    yield json.dumps({"now": _now(report, jobs) | {"after": after}})
                await asyncio.sleep(EVERY_S)
        finally:
            self._viewers -= 1


def _thinned(report: LiveReport) -> tuple[Frame, ...]:
    return report.frames[::-THIN][::-1] if report.replicas > MANY_REPLICAS else report.frames


def _frame(frame: Frame) -> dict[str, Any]:
    values = np.round(frame.values_RF.astype(float), 4)
    rows = np.where(np.isnan(values), None, values)  # type: ignore[call-overload]  # JSON has no NaN
    return {"unix_s": frame.unix_s, "replicas": frame.replicas, "figures": FIGURES, "values": rows.tolist()}


def _now(report: LiveReport, jobs: list[RunningJob]) -> dict[str, Any]:
    return {
        "controller": report.controller,
        "unix_s": time.time(),
        "status": asdict(report.status),
        "replicas": report.replicas,
        "curve": [asdict(each) for each in report.curve],
        "jobs": [asdict(each) for each in jobs],
    }
