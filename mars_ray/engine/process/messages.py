"""What passes between an engine in a process of its own and the one that asks.

In:    objects.
Out:   frames on a stream socket: the length in four bytes, then a pickle.
Never: leaves the machine: both ends are a pair of sockets that a parent and its child hold, and nobody else can open.
"""

import asyncio
import pickle
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import MarsRayError
from mars_ray.model.dtype import AskedDtype

LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to start."""

    folder: Path
    dtype: AskedDtype
    threads: int
    """Threads of a step on a CPU."""
    options: EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is fixed of an engine that runs."""

    positions: int
    """Tokens of a sequence, prompt and output."""
    vocabulary: int
    block: int
    """Tokens proposed per forward at most."""
    token_bytes: tuple[bytes, ...]
    """The text of each token (see `model.token_bytes`)."""


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: Request
    whole: bool
    """Each sequence leaves as one chunk, once it ended: the fewer chunks, the less both ends have to do."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, if it still runs."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskState:
    """Say how the engine is; answered in order."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not queued, or all that runs failed."""

    request_id: str
    error: MarsRayError


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine did not start."""

    error: MarsRayError


@dataclass(frozen=True, slots=True)
class SetThresholds:
    """From the next step on, of requests that name none."""

    by_class: Mapping[str, float]


Order = Add | Cancel | AskState | SetThresholds
Event = EngineFacts | Failed | Refused | EngineState | list[Chunk]


def frame(message: object) -> bytes:
    """Return a message as it goes over the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """Return what the engine says next; None when it is gone."""
    try:
        [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        event: Event = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return event


class OrderSocket:
    """The engine's end, for a thread that may wait."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, event: Event) -> None:
        """Send, and wait for room: who asks always reads."""
        self._socket.sendall(frame(event))

    def waiting(self) -> bool:
        """Return whether there is something to receive, or the other end is gone."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> Order | None:
        """Wait for an order; None when the other end is gone."""
        head = self._exactly(LENGTH.size)
        body = head and self._exactly(*LENGTH.unpack(head))
        return pickle.loads(body) if body else None

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)
