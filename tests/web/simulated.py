"""What the live view is told of a simulated cluster, whose controller is the real one, after a quarter of an hour."""

import math
import random
import time
from typing import Any

import pytest

from mars_ray.control.cluster_load import Backlog, BatchJobState
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.live_view import RunningJob
from mars_ray.serve.http.control_routes import _frame, _now
from mars_ray.simulate import simulator
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.simulator import SimulationOptions
from tests.simulate.simulation_samples import machine

REPLICAS = 40
SECONDS = 900
PLAN = ControlPlan.model_validate(
    {"classes": [{"name": "interactive", "floor": 0.95, "share": 2}, {"name": "bulk", "floor": 0.9}]}
)
JOB = RunningJob(
    name="batch-7f3a",
    job=BatchJobState(backlog=Backlog(tokens=1.3e6, seconds=2200), threshold=0.95, tokens_s=1650),
    tokens=2_100_000,
    workers=4,
    late_s=0,
    paused=False,
)


def events() -> list[dict[str, Any]]:
    """Return the events of the stream: a wave of load that falls again."""
    draw, now_s, arrivals = random.Random(0), 0.0, list[Arrival]()
    while now_s < SECONDS:
        now_s += draw.expovariate(REPLICAS * (3.2 + 2.6 * math.sin((now_s - 530) / 140)))
        arrivals.append(Arrival(now_s, 1 + int(draw.expovariate(1 / 40)), 1 + int(draw.expovariate(1 / 60))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "REPORTING", REPLICAS)
        options = SimulationOptions(replicas=REPLICAS, ticks_per_s=20)
        cluster = simulator._Cluster(Arrivals(arrivals, mix=(1, 1)), machine(), PLAN, options, None)
    for second in range(1, SECONDS + 1):
        cluster._second(second, SECONDS)
    report = cluster._controller.live("", 0)
    frames = [_frame(each) for each in report.frames]
    shift_s = time.time() - SECONDS
    told = [{"frame": each | {"unix_s": each["unix_s"] + shift_s}} for each in frames]
    return [*told, {"now": _now(report, [JOB], ["bundled", "small"]) | {"after": 0}}]
