"""Send the heartbeats of a replica: report the state of its engine, and follow the directive that answers.

In:    an engine, a lease, a function that sends reports.
Out:   thresholds set in the engine, once a second.
Never: waits for a controller longer than one heartbeat, or stops because a controller fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mars_ray.control.replica.lease import Lease
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import ReportError

log = logging.getLogger(__name__)

EVERY_S = 1.0

Send = Callable[[ReplicaReport], Awaitable[Directive]]


async def run_heartbeats(engine: AsyncEngine, lease: Lease, send: Send, every_s: float = EVERY_S) -> None:
    """Send heartbeats until cancelled. Raises `ReplicaLostError` when the engine is gone."""
    while True:
        next_s = asyncio.get_running_loop().time() + every_s
        await send_heartbeat(engine, lease, send, every_s)
        await asyncio.sleep(next_s - asyncio.get_running_loop().time())


async def send_heartbeat(engine: AsyncEngine, lease: Lease, send: Send, within_s: float) -> None:
    """Report once, wait up to `within_s` seconds for the answer, and set the engine to the thresholds then in force.

    Raises `ReplicaLostError`.
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
