"""The messages between an engine process and its parent.

A frame is a length in four bytes, followed by a pickle. Frames are sent through a socket pair that only parent and
child hold. `multiprocessing.connection` blocks, so the event loop of the parent cannot use it.
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
from typing import Any

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
    """Number of threads for a step on a CPU."""
    options: EngineOptions
    adapters: Mapping[str | None, Path] = field(default_factory=dict)
    """Adapter folders by the names that requests use; None is the key of the default adapter."""


@dataclass(frozen=True, slots=True)
class Launch:
    """First order: start this engine, with these environment variables."""

    spec: EngineSpec
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Constants of a running engine."""

    max_model_len: int
    """Maximum number of tokens of a sequence, prompt and output together."""
    vocab_size: int
    block: int
    """Largest number of tokens proposed per forward."""
    token_bytes: tuple[bytes, ...]
    """Bytes of each token (see `model.token_bytes`)."""
    notice: str = ""
    """Sentence that goes with every figure of the engine; usually empty."""


@dataclass(frozen=True, slots=True)
class Started:
    """Event: the engine has started."""

    facts: EngineFacts
    tokenizer: GrammarTokenizer | None
    """Tokenizer for grammars; None if the model's tokenizer is not a fast one."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Command to compile a grammar in a thread and keep the result. The engine answers with `Prepared`."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """Event: a grammar is compiled, or its compilation failed with `error`."""

    grammar: GrammarSpec
    error: MarsRayError | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Command to drop a prepared grammar."""

    grammar: GrammarSpec


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Command to load an adapter in a thread and keep it. The engine answers with `AdapterLoaded`."""

    number: int
    """Number that later commands refer to. Each command has a new one."""
    folder: Path


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Event: an adapter is loaded, or could not be loaded because of `error`."""

    number: int
    nbytes: int = 0
    """Memory of the adapter in bytes."""
    block: int = 1
    """Largest number of tokens that the adapter proposes per forward."""
    error: MarsRayError | None = None


@dataclass(frozen=True, slots=True)
class UseAdapters:
    """Command to replace all adapters with a name by these: numbers of loaded adapters, by the names in requests.
    Requests in the engine keep the adapter that they began with."""

    by_name: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Command to drop a loaded adapter. It is freed once the requests that use it have ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Add:
    """Command to queue a request."""

    request: Request
    stream: bool
    """Whether to send a chunk after every step. False sends a single chunk per sequence when the sequence has ended."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command to end a request if it is still running."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskState:
    """Command to report the state of the engine. Reports arrive in the order of the commands."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: a request was not queued, or a failed step ended all requests."""

    request_id: str
    error: MarsRayError


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the engine did not start."""

    error: MarsRayError


@dataclass(frozen=True, slots=True)
class SetThresholds:
    """Command to set the thresholds of classes from the next step on."""

    by_class: Mapping[str, float]


Order = Add | Cancel | AskState | SetThresholds | Prepare | Forget | LoadAdapter | UseAdapters | ForgetAdapter
Event = Started | Failed | Refused | Prepared | AdapterLoaded | EngineState | list[Chunk]


def frame(message: object) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message, or None if the process at the other end has ended."""
    try:
        [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class OrderSocket:
    """The engine's end of the socket, with blocking methods."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, event: Event) -> None:
        """Send an event. Any thread may call this; it blocks while the socket buffer is full."""
        with self._sending:
            self._socket.sendall(frame(event))

    def waiting(self) -> bool:
        """Return whether an order has arrived or the other end has closed the socket."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> Order | None:
        """Wait for an order and return it; return None if the other end has closed the socket."""
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
