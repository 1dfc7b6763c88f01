"""The messages between an engine process and its parent.

A frame is the length in four bytes, then a pickle. Frames travel through a socket pair that only parent and child hold.
`multiprocessing.connection` does not fit, because it blocks and the parent reads in an event loop.
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
    """The engine to start in a child process."""

    folder: Path
    dtype: DtypeOrAuto
    threads: int
    """Threads of a step on a CPU."""
    options: EngineOptions
    adapters: Mapping[str | None, Path] = field(default_factory=dict)
    """Folders of adapters by the name in requests; None is the name of the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Constants of a running engine."""

    max_model_len: int
    """Longest sequence in tokens, prompt and output."""
    vocab_size: int
    block: int
    """Largest number of tokens proposed per forward."""
    token_bytes: tuple[bytes, ...]
    """Bytes of each token (see `model.token_bytes`)."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine runs."""

    facts: EngineFacts
    tokenizer: GrammarTokenizer | None
    """Tokenizer for grammars; None if the model's tokenizer is not a fast one."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile a grammar in a thread and keep it; the engine answers with `Prepared`."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A grammar is compiled, or has failed with `error`."""

    grammar: GrammarSpec
    error: MarsRayError | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop a prepared grammar."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: Request
    stream: bool
    """Send a chunk after every step; False sends one chunk for each sequence when it has ended."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request if it still runs."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskState:
    """Ask for the state of the engine. Answers come in the order of the questions."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not queued, or failed together with all others."""

    request_id: str
    error: MarsRayError


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine did not start."""

    error: MarsRayError


@dataclass(frozen=True, slots=True)
class SetThresholds:
    """Set thresholds of classes, from the next step on."""

    by_class: Mapping[str, float]


Order = Add | Cancel | AskState | SetThresholds | Prepare | Forget
Event = Started | Failed | Refused | Prepared | EngineState | list[Chunk]


def frame(message: object) -> bytes:
    """Return a message as a frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """Return the next event; None if the engine is gone."""
    try:
        [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        event: Event = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return event


class OrderSocket:
    """The engine's end of the socket, with blocking calls."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, event: Event) -> None:
        """Send an event from any thread. It may block until the other end, which always reads, has read."""
        with self._sending:
            self._socket.sendall(frame(event))

    def waiting(self) -> bool:
        """Return whether an order has arrived or the other end is gone."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> Order | None:
        """Wait for an order; None if the other end is gone."""
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
