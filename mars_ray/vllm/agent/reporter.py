"""Send reports through a child process that has joined the Ray cluster of the controller.

Ray ends a process whose cluster is lost. In a process of its own, that does not end the server.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.process.messages import frame, read_message
from mars_ray.errors import MarsRayError, UnavailableError

ANSWER_S = 30.0
"""Seconds after which a child that does not answer is replaced."""


class Reporter:
    """Sends reports to the controller `name` on the cluster at `address`; one report at a time is on its way."""

    def __init__(self, name: str, address: str, plan: ControlPlan) -> None:
        self._first = frame((name, address, plan))
        self._child: Process | None = None
        self._asking: asyncio.Task[Directive] | None = None

    async def send(self, report: ReplicaReport) -> Directive:
        """Return the directive that answers this report, or the answer to an earlier one that is still on its way.

        Raises `UnavailableError` if no controller answers, and `ReportError`.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(report))
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        """End the child."""
        if self._asking is not None:
            self._asking.cancel()
        await self._end_child()

    async def _ask(self, report: ReplicaReport) -> Directive:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._exchange(frame(report))
        except (TimeoutError, OSError) as error:
            await self._end_child()
            raise UnavailableError(
                "the process that reports to the controller does not answer; the next heartbeat starts another."
            ) from error
        if isinstance(answer, Directive):
            return answer
        if isinstance(answer, MarsRayError):
            raise answer
        await self._end_child()
        raise UnavailableError("the process that reports to the controller ended; the next heartbeat starts another.")

    async def _exchange(self, report: bytes) -> object:
        if self._child is None:
            module = "mars_ray.vllm.agent.ray_reporter"
            self._child = await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=PIPE, stdout=PIPE)
            report = self._first + report
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(report)
        await self._child.stdin.drain()
        return await read_message(self._child.stdout)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()
