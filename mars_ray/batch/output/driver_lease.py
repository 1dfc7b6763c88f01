"""Says in a store that the driver of a job lives, so that nobody takes the job over from it.

This is a courtesy: it tells a person at once. What keeps two drivers apart for certain is the log of the job.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from upath import UPath

from mars_ray.errors import OutputError
from mars_ray.storage.location import store_errors

RENEW_S = 5.0
LEASE_S = 20.0
"""A driver whose lease stays as it is for so long is gone."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    host: str
    pid: int
    machine: str
    """The start of a machine, and the processes on it that have numbers of their own."""
    renewed: int


class DriverLease:
    """The lease at `place`, which is an object of the job."""

    def __init__(self, place: UPath, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._renewed, self._last_s = 0, 0.0

    @contextmanager
    def held(self) -> Iterator["DriverLease"]:
        """Hold it within the block. Raises `OutputError` while another process does."""
        with store_errors(self._place, OutputError, "Cannot write to", "Give another output."):
            self._wait_for_other()
            self.renew()
        try:
            yield self
        finally:
            self._place.fs.rm(self._place.path)

    def renew(self) -> None:
        """Say that this driver lives, if that was not said a moment ago."""
        now_s = self._clock()
        if self._renewed and now_s - self._last_s < RENEW_S:
            return
        self._renewed, self._last_s = self._renewed + 1, now_s
        lease = _Lease(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), renewed=self._renewed)
        self._place.fs.pipe_file(self._place.path, json.dumps(asdict(lease)).encode())

    def _wait_for_other(self) -> None:
        found = self._read()
        if found is None or (found.machine == _machine() and not psutil.pid_exists(found.pid)):
            return
        who = f"process {found.pid} on {found.host}"
        print(f"generate: looking for {LEASE_S:g} s whether {who} still works in {self._job}", file=sys.stderr)
        began_s = self._clock()
        while self._clock() - began_s < LEASE_S:
            time.sleep(POLL_S)
            now = self._read()
            if now is None:
                return
            if now != found:
                raise OutputError(
                    f"Another process ({who}) is working in {self._job}. Wait for it, or give another output."
                )

    def _read(self) -> _Lease | None:
        try:
            return _Lease(**json.loads(self._place.read_bytes()))
        except FileNotFoundError:
            return None

    @property
    def _job(self) -> UPath:
        return self._place.parent.parent


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()
