"""Keep other drivers out of the folder of a job or run: a lock on a disk, a lease file in a store.

The lease only makes the error message come early. For jobs, it is the log that reliably prevents two drivers from
writing.
"""

import fcntl
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
"""Seconds without a renewal, while the store answers, after which a driver counts as dead."""
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
            with suppress(Exception):  # the store is away; the lease runs out by itself
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
        # The time of the reads does not count, because a store that is away keeps the other driver from renewing.
        for _ in range(round(LEASE_S / POLL_S)):
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


@contextmanager
def locked(lock: Path, *, of: Path) -> Iterator[None]:
    """Hold the file `lock`, for the work in the folder `of`, during the `with` block.

    Raises `OutputError` if another process holds the lock, or its folder is not writable.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise OutputError(f"Cannot write to {lock.parent}: {error.strerror}. Give another output.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another process is working in {of}. Wait until it ends, or give another output."
            ) from None
        yield


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
