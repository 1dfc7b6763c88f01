"""A process that has imported the engine's libraries, and forks an engine process in milliseconds.

In:    a socket to its parent. Each message carries an engine's socket, line, working folder, standard output and
       standard error.
Out:   engine processes. An engine's line gets the process id, and closes when the engine has ended.
Never: computes, starts a thread or opens a device, because a fork copies none of them; outlives its parent.

`multiprocessing.forkserver` would run the parent's main module again in each engine, and would share one server, with
the environment of its start, with all other code of the parent.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from mars_ray.engine.process.engine_process import PID

FILES = 5
"""Number of files in a message."""
NAME = b"mars-ray-engine"
"""Name of engine processes in `ps` and `top`. The kernel keeps 15 characters."""
PR_SET_NAME = 15
LOOK_S = 1.0
"""Seconds between two looks at the parent. Its sockets stay open if another child of it has copies."""


class ForkServer:
    """The running server, single-threaded."""

    def __init__(self, control: socket.socket, run_engine: Callable[[int, int], None]) -> None:
        """Fork processes that call `run_engine` with their descriptor for orders and the process id of this server."""
        self._control: socket.socket | None = control
        self._run_engine = run_engine
        self._parent = os.getppid()
        self._lines: dict[int, socket.socket] = {}
        """Connection to the client of each engine that has not ended, by process id."""
        self._killed: set[int] = set()
        self._ended, self._waking = socket.socketpair()
        """The first is readable when an engine has ended."""
        self._ended.setblocking(False)
        self._waking.setblocking(False)
        signal.set_wakeup_fd(self._waking.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Fork engines until the parent has closed its socket and all engines have ended, or the parent has ended.

        The kernel kills engines whose server has ended.
        """
        while (self._control or self._lines) and os.getppid() == self._parent:
            pids = {line: pid for pid, line in self._lines.items() if pid not in self._killed}
            control = [self._control] if self._control else []
            ready, _, _ = select.select([*control, self._ended, *pids], [], [], LOOK_S)
            for connection in ready:
                if connection is self._ended:
                    self._reap()
                elif connection is self._control:
                    self._fork(connection)
                elif (pid := pids[connection]) in self._lines:  # the client has closed its end
                    os.kill(pid, signal.SIGKILL)
                    self._killed.add(pid)

    def _fork(self, control: socket.socket) -> None:
        message, files, _, _ = socket.recv_fds(control, 1, FILES)
        if not message:
            control.close()
            self._control = None
            return
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # the client sees the line close
            traceback.print_exc()
            pid = -1
        if pid == 0:
            self._become_engine(server, *files)
        line = socket.socket(fileno=files.pop(1))
        for file in files:
            os.close(file)
        if pid == -1:
            line.close()
            return
        self._lines[pid] = line
        with suppress(ConnectionError):  # the client has left; its end of the line is closed
            line.sendall(PID.pack(pid))

    def _reap(self) -> None:
        self._ended.recv(4096)
        for pid in [pid for pid in self._lines if os.waitpid(pid, os.WNOHANG)[0]]:
            self._lines.pop(pid).close()
            self._killed.discard(pid)

    def _become_engine(self, server: int, orders: int, line: int, folder: int, output: int, errors: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.fchdir(folder)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for file in (line, folder, output, errors):
                os.close(file)
            for connection in (self._control, self._ended, self._waking, *self._lines.values()):
                if connection is not None:
                    connection.close()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_NAME, NAME)
            self._run_engine(orders, server)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def main(descriptor: int) -> None:
    """Serve the parent at the other end of an inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, so that running requests may finish
    gc.disable()  # otherwise collections would take an eighth of the time of this import
    from mars_ray.engine.process import worker

    gc.collect()
    gc.freeze()  # otherwise a collection in an engine would copy the pages that all engines share
    gc.enable()
    ForkServer(socket.socket(fileno=descriptor), worker.main).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
