"""Ray shell: the child process of `Reporter`. It passes reports from standard input to the controller.

It ends when its input ends, or with an error when no cluster is at the address.
"""

import asyncio
import logging
import os
import sys

import ray

from mars_ray.control.core.ray_controller import RayController
from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.process.messages import frame, read_message
from mars_ray.errors import MarsRayError


async def main() -> None:
    """Answer reports until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is no answer
    reports = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), sys.stdin)
    name, address, plan = await read_message(reports)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    controller = RayController(name, plan)
    while True:
        report: ReplicaReport | None = await read_message(reports)
        if report is None:
            return
        try:
            answer: object = await controller.handle_report(report)
        except MarsRayError as error:
            answer = error
        answers.write(frame(answer))
        answers.flush()


if __name__ == "__main__":
    asyncio.run(main())
