"""Send the heartbeats of a replica: report the state of its engine, and follow the directive that answers.

In:    an engine, a lease, a function that sends reports.
Out:   thresholds set in the engine, once a second.
Never: waits for a controller longer than one heartbeat, or stops because a controller fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from mars_ray.control.replica.lease import Lease
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ReportError

log = logging.getLogger(__name__)

EVERY_S = 1.0

Send = Callable[[ReplicaReport], Awaitable[Directive]]


class ControlledEngine(Protocol):
    """Interface of an engine to its heartbeats. Both methods raise an error if the engine is gone."""

    async def state(self) -> EngineState:
        """Return the state of the engine."""

    def set_thresholds(self, by_class: Mapping[str, float], /) -> None:
        """Set the thresholds of classes from the next step on."""


async def run_heartbeats(engine: ControlledEngine, lease: Lease, send: Send, every_s: float = EVERY_S) -> None:
    """Send heartbeats until cancelled. Raises the engine's error when the engine is gone."""
    while True:
        next_s = asyncio.get_running_loop().time() + every_s
        await send_heartbeat(engine, lease, send, every_s)
        await asyncio.sleep(next_s - asyncio.get_running_loop().time())


async def send_heartbeat(engine: ControlledEngine, lease: Lease, send: Send, within_s: float) -> None:
    """Report once, wait up to `within_s` seconds for the answer, and set the engine to the thresholds then in force.

    Raises the engine's error when the engine is gone.
    """
    state = await engine.state()
    try:
        report = lease.report(state)
    except ReportError as error:  # the next report may be valid
        log.error("skipping a heartbeat: %s", error)
        return
    try:
        async with asyncio.timeout(within_s):
            lease.take(await send(report))
    except Exception as error:  # whatever the failure, the lease decides which thresholds are in force
        log.debug("received no directive: %r", error)
    thresholds = lease.in_force(report).thresholds
    if thresholds != {class_state.name: class_state.threshold for class_state in state.classes}:
        engine.set_thresholds(thresholds)
