"""Lease file in a store, which shows other drivers that a job or run has a live driver.

The lease only makes the error message come early. For jobs, it is the log that reliably prevents two drivers from
writing.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from upath import UPath

from mars_ray.errors import OutputError
from mars_ray.storage.location import store_errors

RENEW_S = 5.0
LEASE_S = 20.0
"""Seconds without a renewal after which a driver counts as dead."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    host: str
    pid: int
    machine: str
    """Boot id and PID namespace, within which a PID identifies a process."""
    renewed: int


class DriverLease:
    """Lease file at `path` for the work in the folder `of`."""

    def __init__(self, path: UPath, *, of: UPath) -> None:
        self._path = path
        self._of = of
        self._held = _Lease(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), renewed=0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease during the `with` block. Raises `OutputError` if another process holds it."""
        with store_errors(self._path, OutputError, "Cannot write to", "Give another output."):
            self._wait_for_other()
            self._renew()
        ended = threading.Event()
        renewing = threading.Thread(target=self._renew_until, args=[ended], name="driver-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            if self._is_ours():
                self._path.fs.rm(self._path.path)

    def _renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_S):
            with suppress(Exception):  # errors of the store are reported when the results are written
                if not self._is_ours():  # this driver was suspended, and another one took over
                    return
                self._renew()

    def _renew(self) -> None:
        self._held = replace(self._held, renewed=self._held.renewed + 1)
        self._path.fs.pipe_file(self._path.path, json.dumps(asdict(self._held)).encode())

    def _is_ours(self) -> bool:
        lease = self._read()
        return lease is not None and (lease.machine, lease.pid) == (self._held.machine, self._held.pid)

    def _wait_for_other(self) -> None:
        lease = self._read()
        if lease is None or (lease.machine == _machine() and not psutil.pid_exists(lease.pid)):
            return
        holder = f"process {lease.pid} on {lease.host}"
        print(f"mars-ray: waiting {LEASE_S:g} s to see whether {holder} still uses {self._of}", file=sys.stderr)
        began_s = time.monotonic()
        while time.monotonic() - began_s < LEASE_S:
            time.sleep(POLL_S)
            now = self._read()
            if now is None:
                return
            if now != lease:
                raise OutputError(
                    f"Another process ({holder}) is working in {self._of}. Wait until it ends, or give another output."
                )

    def _read(self) -> _Lease | None:
        try:
            # `cat_file` needs only one request. Opening the file and then reading it takes two, and the second fails
            # if the lease is renewed in between.
            return _Lease(**json.loads(self._path.fs.cat_file(self._path.path)))
        except FileNotFoundError:
            return None


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
