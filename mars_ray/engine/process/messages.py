"""The messages between an engine in a process of its own and the process that uses it.

A frame on the socket is the length in four bytes, then a pickle. It never leaves the machine: both ends are a pair of
sockets that a parent and its child hold, and nobody else can open.

Ours and not `multiprocessing.connection`: the parent reads on its event loop, and a `Connection` can only block.
"""

import asyncio
import pickle
import select
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.grammar.library import GrammarTokenizer
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import MarsRayError
from mars_ray.model.dtype import DtypeOrAuto

LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to start."""

    folder: Path
    dtype: DtypeOrAuto
    threads: int
    """Threads of a step on a CPU."""
    options: EngineOptions
    adapters: Mapping[str | None, Path] = field(default_factory=dict)
    """Folders of adapters by the name that requests know them by; None is that of requests that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change of an engine that runs."""

    max_model_len: int
    """Tokens of a sequence, prompt and output."""
    vocab_size: int
    block: int
    """Tokens proposed per forward at most."""
    token_bytes: tuple[bytes, ...]
    """The text of each token (see `model.token_bytes`)."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine runs."""

    facts: EngineFacts
    tokenizer: GrammarTokenizer | None
    """The tokenizer for grammars; None where it can follow none."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile a grammar beside the steps, and keep it; `Prepared` says when that is done."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A grammar is compiled, or cannot be."""

    grammar: GrammarSpec
    error: MarsRayError | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop a grammar that was prepared."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: Request
    stream: bool
    """Send a chunk after every step; else each sequence is one chunk, sent when it has ended."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, if it still runs."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskState:
    """Ask for the state of the engine; the answers come in order."""


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
    """Set the thresholds of requests that name none, from the next step on."""

    by_class: Mapping[str, float]


Order = Add | Cancel | AskState | SetThresholds | Prepare | Forget
Event = Started | Failed | Refused | Prepared | EngineState | list[Chunk]


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
    """The engine's end of the socket, for a thread that may wait."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._sending = connected, threading.Lock()

    def send(self, event: Event) -> None:
        """Send an event, and wait for room: the other end always reads. Any thread may call this."""
        with self._sending:
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
