"""Cache expensive numbers in a file, so that a resumed run need not compute them again.

If the process is killed, at most the last write is lost, because incomplete lines are ignored.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath, store_errors
from mars_ray.storage.whole_file import write_file


def cache_key(*parts: object) -> str:
    """Return a hash of the parts, which must be JSON values."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class NumberCache:
    """Numbers, each with a key, in one file. In an object store, each call of `add` rewrites the whole object."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._numbers: dict[str, int] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                with suppress(ValueError):
                    key, number = json.loads(line)
                    self._numbers[key] = number

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    def __getitem__(self, key: str) -> int:
        return self._numbers[key]

    def add(self, numbers: Iterable[tuple[str, int]]) -> None:
        """Add numbers and write them to the file. Raises `RunError` if this fails."""
        lines = []
        for key, number in numbers:
            self._numbers[key] = number
            lines.append(json.dumps([key, number]))
        if not lines:
            return
        if not isinstance(self._path, Path):
            all_lines = (json.dumps([key, number]).encode() + b"\n" for key, number in self._numbers.items())
            write_file(self._path, all_lines)
            return
        writing = store_errors(self._path, RunError, "Cannot write", "Free some space; the same command resumes.")
        with writing, self._path.open("a", encoding="utf-8") as file:
            # The leading newline ends a line that an earlier run may have left half-written.
            file.write("\n" + "\n".join(lines) + "\n")
