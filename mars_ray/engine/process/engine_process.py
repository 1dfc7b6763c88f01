"""Start engine processes through a fork server.

The first engine of a program starts the server, which imports torch and transformers for some seconds. Later engines,
such as one that replaces a killed engine, start at once.
"""

import asyncio
import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from mars_ray.errors import ReplicaLostError

PID = struct.Struct("!i")
DIED = "the engine died while it started."
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""The server must be single-threaded to fork. An engine sets its own number of threads."""
SPIN = {"GOMP_SPINCOUNT": "1000"}
"""Spin count of waiting OpenMP threads, about 50 microseconds. By default they spin for many milliseconds; with other
processes on the machine they would then occupy the core that the awaited thread needs."""
READ_BY_LIBRARIES = (
    *("CUDA", "GOMP", "HF_", "HIP", "HUGGINGFACE", "KMP", "LD_", "MALLOC", "MKL", "NVIDIA", "OMP", "OPENBLAS"),
    *("PYTHON", "PYTORCH", "ROCR", "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON", "XDG"),
)
"""Prefixes of the variables that libraries read while they are imported. A change of one needs a new server."""


class EngineProcess:
    """A running engine process. Closing its line kills it, and the line closes when it has ended."""

    def __init__(self, pid: int, line: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._line = line
        self._writer = writer

    @classmethod
    async def start(cls, orders: socket.socket) -> Self:
        """Start a process that serves `orders`. Raises `ReplicaLostError` if the process does not start."""
        ours, theirs = socket.socketpair()
        line, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                _servers.fork(orders, theirs)
            [pid] = PID.unpack(await line.readexactly(PID.size))
        except BaseException as error:
            writer.close()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise ReplicaLostError(DIED) from None
            raise
        return cls(pid, line, writer)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        if not self._line.at_eof():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        with suppress(ConnectionError):
            await self._line.read()
        self._writer.close()


@dataclass(frozen=True)
class _Server:
    owner: int
    """Process that started the server. A fork of that process starts another one."""
    variables: Mapping[str, str]
    process: subprocess.Popen[bytes]
    control: socket.socket

    @classmethod
    def start(cls, variables: Mapping[str, str]) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-P", "-m", "mars_ray.engine.process.fork_server", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=SPIN | os.environ | SERVER_ENVIRONMENT,
            )
        return cls(os.getpid(), variables, process, ours)

    def usable(self, variables: Mapping[str, str]) -> bool:
        return self.owner == os.getpid() and self.variables == variables and self.process.poll() is None


class _Servers:
    """The server that forks the next engine, and former ones, which end with their last engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Server | None = None
        self._former: list[_Server] = []

    def fork(self, orders: socket.socket, line: socket.socket) -> None:
        """Ask for an engine process, with the working folder and the output of this process."""
        folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        try:
            files = [orders.fileno(), line.fileno(), folder, 1, 2]
            with self._lock:
                try:
                    socket.send_fds(self._usable().control, [b"f"], files)
                except ConnectionError:  # the server has just been killed
                    socket.send_fds(self._usable().control, [b"f"], files)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Kill the servers, and with them the engines."""
        for server in (self._current, *self._former):
            if server is not None and server.owner == os.getpid():
                server.control.close()
                server.process.kill()
                server.process.wait()

    def _usable(self) -> _Server:
        variables = {name: value for name, value in os.environ.items() if name.startswith(READ_BY_LIBRARIES)}
        if self._current is None or not self._current.usable(variables):
            self._retire()
            self._current = _Server.start(variables)
        return self._current

    def _retire(self) -> None:
        if self._current is not None:
            self._current.control.close()
            self._former = [server for server in (self._current, *self._former) if server.process.poll() is None]


_servers = _Servers()
atexit.register(_servers.close)
