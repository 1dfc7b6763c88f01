"""Says in a store that the driver of a job or run lives, so that nobody takes its work over.

This is a courtesy: it tells a person at once. What keeps two drivers of a job apart for certain is the log of the job.
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
    """The lease at `place` on the work in the folder `of`."""

    def __init__(self, place: UPath, *, of: UPath) -> None:
        self._place, self._of = place, of
        self._held = _Lease(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), renewed=0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it within the block. Raises `OutputError` while another process does."""
        with store_errors(self._place, OutputError, "Cannot write to", "Give another output."):
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
                self._place.fs.rm(self._place.path)

    def _renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_S):
            with suppress(Exception):  # a store that is away is waited for by those who write
                if not self._is_ours():  # this driver was frozen, and given up
                    return
                self._renew()

    def _renew(self) -> None:
        self._held = replace(self._held, renewed=self._held.renewed + 1)
        self._place.fs.pipe_file(self._place.path, json.dumps(asdict(self._held)).encode())

    def _is_ours(self) -> bool:
        found = self._read()
        return found is not None and (found.machine, found.pid) == (self._held.machine, self._held.pid)

    def _wait_for_other(self) -> None:
        found = self._read()
        if found is None or (found.machine == _machine() and not psutil.pid_exists(found.pid)):
            return
        who = f"process {found.pid} on {found.host}"
        print(f"mars-ray: looking for {LEASE_S:g} s whether {who} still works in {self._of}", file=sys.stderr)
        began_s = time.monotonic()
        while time.monotonic() - began_s < LEASE_S:
            time.sleep(POLL_S)
            now = self._read()
            if now is None:
                return
            if now != found:
                raise OutputError(
                    f"Another process ({who}) is working in {self._of}. Wait for it, or give another output."
                )

    def _read(self) -> _Lease | None:
        try:
            return _Lease(**json.loads(self._place.read_bytes()))
        except FileNotFoundError:
            return None


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()
