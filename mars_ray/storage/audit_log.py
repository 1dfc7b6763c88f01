"""Log of what operators and policies did and why: JSON lines that are only added, in a folder or an object store.

In:    events of several processes on several machines.
Out:   pages of events, the newest first.
Never: fails an action that it records, grows beyond `KEPT_BYTES` for each kind of writer, or rewrites an event.

Each process writes segments of its own, because an object cannot be appended to: a segment is small and is replaced,
with one line more, until it is full or a day old. Old segments are removed by size and not by age, so a clock that
jumps removes nothing. Operators and policies have separate bounds, so a busy policy removes no act of an operator.
"""

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from mars_ray.errors import MarsRayError, RunError
from mars_ray.storage.location import AnyPath, store_errors
from mars_ray.storage.private import private_folder
from mars_ray.storage.whole_file import write_lines

log = logging.getLogger("mars_ray.audit")

Kind = Literal["operators", "policy"]
SEGMENT = re.compile(r"\d{13}-[a-z]+-[0-9a-f]{12}-\d{8,}\.jsonl")
"""Name of a segment. Other files in the folder are left alone."""
SEGMENT_BYTES = 64 * 2**10
SEGMENT_MS = 86_400_000
KEPT_BYTES = 16 * 2**20
UNWRITTEN_BYTES = 4 * SEGMENT_BYTES
"""Bytes of events that are kept in memory while the storage is away; further events are only in the process's log."""
PAGE_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """Something that an operator or a policy did."""

    id: str
    """Unique id. Ids rise with the time of their writer's clock."""
    unix_s: float
    by: str
    """`key:NAME`, `oidc:ACCOUNT`, `command:USER@HOST`, `anonymous` or `policy`."""
    action: str
    """Such as `key.added` or `threshold.lowered`."""
    subject: str
    """Name of the key, the account or the class of service; `*` means all classes."""
    cause: str = ""
    """Reason of the policy, with the load; empty if an operator decided."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Some events, the newest first."""

    events: tuple[AuditEvent, ...]
    has_more: bool


class AuditLog:
    """The log in `folder`; None means that events go to the process's log only. Thread-safe."""

    def __init__(
        self, folder: AnyPath | None, kind: Kind = "operators", clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._kind = kind
        self._clock = clock
        self._writer = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._last_ms = self._number = 0
        self._segment = ""
        self._began_ms = 0
        self._lines: list[str] = []
        self._bytes = 0
        self._written = True

    def record(
        self, by: str, action: str, subject: str, *, cause: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        """Add an event. If the storage fails, the event is written together with the next one."""
        with self._lock:
            event = AuditEvent(
                id=self._next_id(),
                unix_s=round(self._clock(), 3),
                by=by,
                action=action,
                subject=subject,
                cause=cause,
                details=details or {},
            )
            line = json.dumps(asdict(event), default=str)
            log.info(line)
            if self._folder is None:
                return
            self._add(line)
            try:
                with store_errors(self._folder, RunError, "Cannot write to", "It is tried again with the next event."):
                    self._write(self._folder)
            except MarsRayError as error:
                self._written = False
                log.error("an event is not in the audit log yet: %s", " ".join(str(error).split()))
            else:
                self._written = True

    def read(self, after: str | None = None, limit: int = 100) -> AuditPage:
        """Return up to `limit` events of all writers that are older than the event with the id `after`.

        Raises `RunError` if the log cannot be read.
        """
        if self._folder is None:
            return AuditPage((), has_more=False)
        with store_errors(self._folder, RunError, "Cannot read", "Try again later."):
            newest = list(islice(_newest_first(self._folder, after), limit + 1))
        return AuditPage(tuple(newest[:limit]), has_more=len(newest) > limit)

    def _next_id(self) -> str:
        self._last_ms = max(round(self._clock() * 1000), self._last_ms)  # ids rise although the clock may jump back
        self._number += 1
        return f"{self._last_ms:013}-{self._writer}-{self._number:08}"

    def _add(self, line: str) -> None:
        full = self._bytes >= SEGMENT_BYTES or self._last_ms - self._began_ms >= SEGMENT_MS
        if self._written and (full or not self._segment):
            self._began_ms = self._last_ms
            self._segment = f"{self._last_ms:013}-{self._kind}-{self._writer}-{self._number:08}.jsonl"
            self._lines = []
            self._bytes = 0
        if self._bytes < UNWRITTEN_BYTES:
            self._lines.append(line)
            self._bytes += len(line) + 1

    def _write(self, folder: AnyPath) -> None:
        if isinstance(folder, Path):
            private_folder(folder)
        write_lines(folder / self._segment, self._lines)
        if len(self._lines) == 1:
            self._prune(folder)

    def _prune(self, folder: AnyPath) -> None:
        """Remove the oldest segments of this kind beyond `KEPT_BYTES`."""
        left_bytes = KEPT_BYTES
        for name in reversed([name for name in _segments(folder) if name.split("-")[1] == self._kind]):
            path = folder / name
            try:
                left_bytes -= path.stat().st_size
                if left_bytes < 0:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process has removed it


class AuditWriter:
    """Records events one after another in a thread of its own, so that no act waits for a slow storage."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")

    def record(
        self, by: str, action: str, subject: str, *, cause: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        """Add an event soon, see `AuditLog.record`."""
        self._thread.submit(self._log.record, by, action, subject, cause=cause, details=details)

    def close(self) -> None:
        """Wait until all events are recorded."""
        self._thread.shutdown()


def _segments(folder: AnyPath) -> list[str]:
    """Return the names of all segments, the oldest first."""
    if isinstance(folder, Path):
        names = [path.name for path in folder.glob("*.jsonl")]
    else:
        names = [str(path).rpartition("/")[2] for path in folder.fs.find(folder.path)]
    return sorted(filter(SEGMENT.fullmatch, names))


def _newest_first(folder: AnyPath, after: str | None) -> Iterator[AuditEvent]:
    """Yield the events of all segments by falling id, and read no more segments than needed."""
    waiting: list[AuditEvent] = []
    names = _segments(folder)
    while names or waiting:
        # Upper bound of ids in unread segments: a segment holds events for up to a day after its start.
        bound = f"{int(names[-1][:13]) + SEGMENT_MS:013}~" if names else ""
        waiting.sort(key=attrgetter("id"))
        while waiting and waiting[-1].id > bound:
            yield waiting.pop()
        if not names:
            continue
        name = names.pop()
        if after is not None and name[:13] > after[:13]:
            continue
        try:
            content = (folder / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue  # removed meanwhile
        events = filter(None, map(_event, content.splitlines()))
        waiting += [event for event in events if after is None or event.id < after]


def _event(line: str) -> AuditEvent | None:
    """Return the event of a line, or None for a damaged line."""
    try:
        event = AuditEvent(**json.loads(line))
    except (ValueError, TypeError):
        log.error("the audit log has a line that is no event: %.80s", line)
        return None
    return event if isinstance(event.id, str) else None
