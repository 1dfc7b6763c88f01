"""The usage of all requests, each counted once, on a disk or in a store.

In:    records of requests, possibly more than once.
Out:   sums by day, account, key and model, also after any process was killed at any point.
Never: counts an id twice within `REMEMBERED_S`, or loses a record once `append` has returned.

Records are appended as numbered files that only one process can create, as in a job's log in a store. Every
`SEGMENTS` files, a snapshot replaces them by sums. Two ledgers on one folder see each other's records when they append.
A store without conditional writes may lose records of two ledgers that append within milliseconds of each other.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from mars_ray.errors import UnavailableError
from mars_ray.platform.usage.ledger_files import LedgerFiles, Snapshot, digest, number_in
from mars_ray.platform.usage.usage_rows import UsageCounts, UsageGroup, UsageRecord, UsageSums, add_up, month_of
from mars_ray.storage.location import AnyPath, store_errors

log = logging.getLogger(__name__)

SEGMENTS = 256
"""Number of segments that a snapshot replaces."""
REMEMBERED_S = 3600.0
"""Seconds during which a record that is sent again is recognised by its id."""
REMEMBERED_IDS = 1_000_000
"""Maximum number of ids that are remembered; older ones are forgotten first."""
FRESH_S = 240.0
"""Seconds after which a ledger looks for newer snapshots before it appends or is read."""
DELETE_S = 600.0
"""Seconds until replaced files are deleted. A ledger that looked within `FRESH_S` still finds them."""
BUDGET_DAYS = 100
"""Number of newest days whose sums are kept in memory for budgets."""


@dataclass(slots=True)
class _Ids:
    """Digests of the ids in one file."""

    digests: list[bytes]
    since_s: float
    name: str


@dataclass(slots=True)
class _State:
    """The content of the folder as far as this ledger has read it."""

    snapshot: Snapshot
    number: int
    """Number of the last segment."""
    pending: UsageSums = field(default_factory=dict)
    """Sums of the segments since the snapshot."""
    recent: list[bytes] = field(default_factory=list)
    """Digests of the ids in these segments."""
    remembered: deque[_Ids] = field(default_factory=deque)
    ids: set[bytes] = field(default_factory=set)
    spent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Tokens and billionths of money by period (a day or month) and holder."""

    def add(self, records: Iterable[UsageRecord]) -> None:
        """Add the records of the next segment."""
        self.number += 1
        for record in records:
            self.recent.append(digest(record.id))
            self.ids.add(self.recent[-1])
            add_up(self.pending, [(record.group, record.counts)])
            self.spend(record.group, record.counts)

    def spend(self, group: UsageGroup, counts: UsageCounts) -> None:
        """Add counts to what their key and account have spent."""
        for holder in (f"key:{group.key}", f"account:{group.account}"):
            for period in (group.day, month_of(group.day)):
                tokens, money = self.spent.get((period, holder), (0, 0))
                self.spent[period, holder] = (tokens + counts.tokens, money + counts.price_billionths)


@dataclass(frozen=True, slots=True)
class LedgerView:
    """A copy of the state of a ledger. A ledger deletes the files of a view no sooner than `DELETE_S` later."""

    files: LedgerFiles
    days: Mapping[str, str]
    """Name of the file with the sums of each day."""
    pending: UsageSums
    """Sums that are in no file of a day yet."""

    def rows(self, first: str, last: str, account: str | None = None) -> UsageSums:
        """Return the sums of the days from `first` to `last`, such as 2026-11-25, of one account or of all.

        Raises `UnavailableError`.
        """
        with store_errors(self.files.folder, UnavailableError, "the usage cannot be read in", "Repair the storage."):
            parts = self.files.days([name for day, name in self.days.items() if first <= day <= last])
            parts.append({group: counts for group, counts in self.pending.items() if first <= group.day <= last})
            sums: UsageSums = {}
            for part in parts:
                add_up(sums, (row for row in part.items() if account in (None, row[0].account)))
            return sums


class UsageLedger:
    """The ledger in `folder`. Use it in one thread at a time, except for `spent` and `remembers`.

    All other methods raise `UnavailableError` while the folder cannot be read or written, and may be called again.
    """

    def __init__(self, folder: AnyPath, clock: Callable[[], float] = time.monotonic, segments: int = SEGMENTS) -> None:
        self._files = LedgerFiles(folder)
        self._clock = clock
        self._segments = segments
        self._state: _State | None = None
        self._has_folders = False
        self._looked_s = 0.0
        self._replaced: deque[tuple[float, list[AnyPath]]] = deque()

    @property
    def opened(self) -> bool:
        """Whether the ledger has been read, so that `spent` is known."""
        return self._state is not None

    def open(self) -> None:
        """Read the ledger, unless it has been read."""
        if self._state is None:
            with self._errors("read"):
                self._refresh()

    def append(self, records: Sequence[UsageRecord]) -> None:
        """Add the records whose ids are unknown. They are durable when this returns."""
        with self._errors("written"):
            if not self._has_folders:
                self._files.make_folders()
                self._has_folders = True
            self._refresh()
            while new := self._unknown(records):
                state = self._current()
                if self._files.create_segment(state.number + 1, new):
                    state.add(new)
                else:  # another ledger has appended, or a write that seemed to fail did not
                    self._catch_up()
        state = self._current()
        if state.number - state.snapshot.number >= self._segments:
            try:
                self._replace_segments()
            except Exception as error:  # the records are durable, so try again after the next ones
                log.warning("the usage in %s could not be summed up: %s", self._files.folder, error)

    def view(self) -> LedgerView:
        """Return a copy of the present state, which another thread may read while this ledger appends."""
        with self._errors("read"):
            self._refresh()
        state = self._current()
        return LedgerView(self._files, state.snapshot.days, dict(state.pending))

    def spent(self, period: str, holder: str) -> tuple[int, int]:
        """Return the tokens and the billionths of money that a holder has spent in a day or month."""
        return (0, 0) if self._state is None else self._state.spent.get((period, holder), (0, 0))

    def remembers(self, id: str) -> bool:
        """Return whether a record with this id is known to be counted."""
        return self._state is not None and digest(id) in self._state.ids

    def _current(self) -> _State:
        assert self._state is not None
        return self._state

    def _unknown(self, records: Sequence[UsageRecord]) -> list[UsageRecord]:
        known = self._current().ids
        return [
            record for record in {record.id: record for record in records}.values() if digest(record.id) not in known
        ]

    def _refresh(self) -> None:
        """Read the ledger if it was not read, or if another ledger has replaced what this one knows."""
        if self._state is None:
            self._read()
        elif self._clock() - self._looked_s > FRESH_S:
            self._read_newer()

    def _read_newer(self) -> bool:
        """Read the ledger if there is a newer snapshot, and return whether there was one."""
        now_s = self._clock()
        newer = self._files.newest_snapshot().number > self._current().snapshot.number
        if newer:
            self._read()
        self._looked_s = now_s
        return newer

    def _catch_up(self) -> None:
        state = self._current()
        try:
            state.add(self._files.segment(state.number + 1))
        except FileNotFoundError:  # it was replaced and deleted
            self._read()

    def _read(self) -> None:
        """Read the newest snapshot and the segments after it."""
        snapshot = self._files.newest_snapshot()
        state = _State(snapshot, snapshot.number)
        now_s = self._clock()
        for name in snapshot.ids:
            ids = _Ids(self._files.ids(name), now_s, name)
            state.remembered.append(ids)
            state.ids.update(ids.digests)
        self._add_spent(state)
        numbers = [
            number for name in self._files.names("log") if snapshot.number < (number := number_in(name)) < 10**12
        ]
        if numbers != list(range(snapshot.number + 1, snapshot.number + 1 + len(numbers))):
            raise UnavailableError(f"segments of {self._files.folder} are missing. Restore them from a backup.")
        for records in self._files.segments(numbers):
            state.add(records)
        self._state = state
        self._looked_s = now_s
        self._replaced.append((now_s, self._files.replaced_by(snapshot)))

    def _add_spent(self, state: _State) -> None:
        days = state.snapshot.days
        for sums in self._files.days([days[day] for day in sorted(days)[-BUDGET_DAYS:]]):
            for group, counts in sums.items():
                state.spend(group, counts)

    def _replace_segments(self) -> None:
        """Write a snapshot of the current state, and delete what older ones have replaced."""
        if self._read_newer():
            return
        state = self._current()
        number = state.number
        days = dict(state.snapshot.days)
        for day in {group.day for group in state.pending}:
            [sums] = self._files.days([days[day]]) if day in days else [{}]
            add_up(sums, ((group, counts) for group, counts in state.pending.items() if group.day == day))
            days[day] = self._files.create_day(day, number, sums)
        now_s = self._clock()
        remembered = deque(state.remembered)
        remembered.append(
            _Ids(state.recent, now_s, self._files.create_ids(state.snapshot.number, number, state.recent))
        )
        forgotten: set[bytes] = set()
        held = sum(len(ids.digests) for ids in remembered)
        while len(remembered) > 1 and (now_s - remembered[0].since_s > REMEMBERED_S or held > REMEMBERED_IDS):
            oldest = remembered.popleft()
            held -= len(oldest.digests)
            forgotten.update(oldest.digests)
        snapshot = Snapshot(number, days, tuple(ids.name for ids in remembered))
        if not self._files.create_snapshot(snapshot):  # another ledger was faster
            self._read()
            return
        state.snapshot, state.remembered, state.pending, state.recent = snapshot, remembered, {}, []
        state.ids -= forgotten
        self._forget_old_days(state)
        replaced = self._files.replaced_by(snapshot)
        self._replaced.append((now_s, replaced))
        while now_s - self._replaced[0][0] > DELETE_S:
            # Another ledger may have made this snapshot of an older one, so that it needs some of the files.
            self._files.delete(set(self._replaced.popleft()[1]).intersection(replaced))

    def _forget_old_days(self, state: _State) -> None:
        if len({period for period, _ in state.spent}) > 2 * BUDGET_DAYS:
            fresh = _State(state.snapshot, state.number)
            self._add_spent(fresh)
            state.spent = fresh.spent

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return store_errors(
            self._files.folder, UnavailableError, f"the usage cannot be {verb} in", "Repair the storage."
        )
