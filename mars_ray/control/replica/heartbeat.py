"""Send the heartbeats of a replica: report the state of its engine, and follow the directive that answers.

In:    an engine, a lease, a way to send reports.
Out:   thresholds set in the engine, every second.
Never: waits for a controller longer than a heartbeat, or ends because of one.
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
    """Report once, wait at most `within_s` for the answer, and let the engine follow what holds then.

    Raises `ReplicaLostError`.
    """
    state = await engine.state()
    try:
        report = lease.report(state)
    except ReportError as error:  # the next may be well
        log.error("a heartbeat is left out: %s", error)
        return
    try:
        async with asyncio.timeout(within_s):
            lease.take(await send(report))
    except Exception as error:  # whatever ails the controller, the lease says what holds without it
        log.debug("no directive: %r", error)
    wanted = lease.in_force(report).thresholds
    if wanted != {each.name: each.threshold for each in state.classes}:
        engine.set_thresholds(wanted)
