"""The files of a usage ledger: numbered segments of records, and snapshots that replace them.

    log/NUMBER.json            records, appended by compare-and-swap
    snapshots/NUMBER.json      names of the files that hold the sums of all segments up to NUMBER
    days/DAY.NUMBER.json       sums of one day
    ids/FIRST.NUMBER.bin       digests of the ids in the segments after FIRST, up to NUMBER

Files are never changed, only created and, long after a snapshot has replaced them, deleted.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mars_ray.errors import UnavailableError
from mars_ray.platform.usage.usage_rows import UsageCounts, UsageGroup, UsageRecord, UsageSums
from mars_ray.storage.location import AnyPath, locate
from mars_ray.storage.whole_file import create_file

FOLDERS = ("log", "snapshots", "days", "ids")
DIGEST_BYTES = 16
AT_ONCE = 16
"""Number of files to read at a time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Names of the files that replace all segments up to `number`."""

    number: int = 0
    days: Mapping[str, str] = field(default_factory=dict)
    """Name of the file with the sums of each day."""
    ids: tuple[str, ...] = ()
    """Files with the digests of the ids that are still remembered, oldest first."""


def usage_folder(storage: str) -> AnyPath:
    """Return the folder of the usage below the storage of an endpoint. Raises `ConfigError`."""
    return locate(storage) / "accounts" / "usage"


def digest(id: str) -> bytes:
    """Return the digest under which the ledger remembers an id."""
    return hashlib.blake2b(id.encode(), digest_size=DIGEST_BYTES).digest()


class LedgerFiles:
    """Reads and creates the files below `folder`. Methods raise the errors of the disk or of the store's client, and
    `UnavailableError` for a damaged file."""

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder

    def make_folders(self) -> None:
        """Create the folders on a disk."""
        if isinstance(self.folder, Path):
            for name in FOLDERS:
                (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files in one of `FOLDERS`."""
        path = self.folder / folder
        if isinstance(path, Path):
            with suppress(FileNotFoundError):
                return sorted(file.name for file in path.iterdir() if not file.name.startswith("."))
            return []
        return sorted(name.rsplit("/", 1)[-1] for name in path.fs.find(path.path))

    def newest_snapshot(self) -> Snapshot:
        """Return the newest snapshot, or an empty one."""
        names = self.names("snapshots")
        if not names:
            return Snapshot()
        path = self.folder / "snapshots" / names[-1]
        try:
            content = json.loads(path.read_bytes())
            return Snapshot(number_in(names[-1]), dict(content["days"]), tuple(content["ids"]))
        except (ValueError, TypeError, KeyError):
            raise _damaged(path) from None

    def create_snapshot(self, snapshot: Snapshot) -> bool:
        """Create the file of a snapshot, and return whether it was created. False means that another one has its
        number."""
        content = {"days": dict(snapshot.days), "ids": list(snapshot.ids)}
        return create_file(self.folder / "snapshots" / numbered(snapshot.number), json.dumps(content).encode())

    def create_segment(self, number: int, records: Sequence[UsageRecord]) -> bool:
        """Append a segment, and return whether it was created. False means that another one has this number."""
        content = json.dumps([record.to_json() for record in records], ensure_ascii=False)
        return create_file(self.folder / "log" / numbered(number), content.encode())

    def segments(self, numbers: Iterable[int]) -> list[list[UsageRecord]]:
        """Return the records of some segments."""
        with ThreadPoolExecutor(AT_ONCE) as readers:
            return list(readers.map(self.segment, numbers))

    def segment(self, number: int) -> list[UsageRecord]:
        """Return the records of a segment. Raises `FileNotFoundError` if it does not exist."""
        path = self.folder / "log" / numbered(number)
        try:
            return [UsageRecord.from_json(value) for value in json.loads(path.read_bytes())]
        except (ValueError, TypeError):
            raise _damaged(path) from None

    def create_day(self, day: str, number: int, sums: UsageSums) -> str:
        """Create the file of a day, unless it exists, and return its name."""
        name = f"{day}.{numbered(number)}"
        rows = [[list(group), asdict(counts)] for group, counts in sums.items()]
        create_file(self.folder / "days" / name, json.dumps(rows, ensure_ascii=False).encode())
        return name

    def days(self, names: Sequence[str]) -> list[UsageSums]:
        """Return the sums in the files of some days."""
        with ThreadPoolExecutor(AT_ONCE) as readers:
            return list(readers.map(self._day, names))

    def _day(self, name: str) -> UsageSums:
        path = self.folder / "days" / name
        try:
            return {UsageGroup(*group): UsageCounts(**counts) for group, counts in json.loads(path.read_bytes())}
        except (ValueError, TypeError):
            raise _damaged(path) from None

    def create_ids(self, first: int, number: int, digests: Iterable[bytes]) -> str:
        """Create the file of the digests of some segments, unless it exists, and return its name."""
        name = f"{first:012}.{number:012}.bin"
        create_file(self.folder / "ids" / name, b"".join(digests))
        return name

    def ids(self, name: str) -> list[bytes]:
        """Return the digests in a file."""
        content = (self.folder / "ids" / name).read_bytes()
        return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]

    def replaced_by(self, snapshot: Snapshot) -> list[AnyPath]:
        """Return the files that nobody needs once `snapshot` exists."""
        kept = {*snapshot.days.values(), *snapshot.ids, numbered(snapshot.number)}
        return [
            self.folder / folder / name
            for folder in FOLDERS
            for name in self.names(folder)
            if number_in(name) <= snapshot.number and (folder == "log" or name not in kept)
        ]

    def delete(self, paths: Iterable[AnyPath]) -> None:
        """Delete files. Files that cannot be deleted stay, because they do no harm."""
        for path in paths:
            with suppress(Exception):
                path.unlink()


def numbered(number: int) -> str:
    """Return the name of a file with a number. Names sort like the numbers."""
    return f"{number:012}.json"


def number_in(name: str) -> int:
    """Return the number in the name of a file; a number beyond all others for a file of someone else."""
    number = name.split(".")[-2] if "." in name else ""
    return int(number) if number.isdecimal() else 10**12


def _damaged(path: AnyPath) -> UnavailableError:
    return UnavailableError(f"{path} is damaged. Restore it from a backup, or move the folder of the usage away.")
