"""A child process that exchanges JSON objects, one per line, and that may be killed at any time."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Self

START_SECONDS = 60.0
LINE_BYTES = 256 << 20
"""Maximum length of a line from the child, far more than the token ids of the largest prompt take."""


class JsonProcess:
    """A running child process. Create it with `start`, and use it in one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(
        cls, module: str, *arguments: str, first: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> tuple[Self, dict[str, Any]]:
        """Run a module, send it the message `first`, and return the child with its first message.

        If the child sends no message, this kills it and raises `ConnectionError` or `TimeoutError`.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=os.environ | (env or {}),
        )
        child = cls(process)
        try:
            if first is not None:
                child.send(first)
            async with asyncio.timeout(START_SECONDS):
                return child, await child.receive()
        except BaseException:
            await child.close()
            raise

    @property
    def ended(self) -> bool:
        """True once the child has ended."""
        return self.process.returncode is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises `ConnectionError` if the child has closed its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def drain(self) -> None:
        """Wait until the child has read most of the sent messages."""
        assert self.process.stdin is not None
        await self.process.stdin.drain()

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `ConnectionError` once the child has ended."""
        assert self.process.stdout is not None
        try:
            line = await self.process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            await self.process.wait()  # a child that is killed while it ends has no certain exit status
            raise ConnectionResetError("the child process ended") from error
        message: dict[str, Any] = json.loads(line)
        return message

    async def close(self) -> None:
        """Kill the child. No call to `receive` may be pending."""
        if not self.ended:
            self.process.kill()
        await self.process.communicate()  # reads remaining output, so that the pipes close
