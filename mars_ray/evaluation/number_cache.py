"""Numbers that took long to find, kept in a file so that a run that goes on need not find them again.

However it is killed, only what was written last may be lost: a line that is not complete is left out.
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
    """Return one key for all parts together."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class NumberCache:
    """The numbers in one file, which an object of a store is written anew."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._found: dict[str, int] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                with suppress(ValueError):
                    key, number = json.loads(line)
                    self._found[key] = number

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> int:
        return self._found[key]

    def add(self, numbers: Iterable[tuple[str, int]]) -> None:
        """Keep more of them. Raises `RunError` where they cannot be written."""
        lines = []
        for key, number in numbers:
            self._found[key] = number
            lines.append(json.dumps([key, number]))
        if not lines:
            return
        if not isinstance(self._path, Path):
            every = (json.dumps([key, number]).encode() + b"\n" for key, number in self._found.items())
            write_file(self._path, every)
            return
        writing = store_errors(self._path, RunError, "Cannot write", "Make room; the same command goes on.")
        with writing, self._path.open("a", encoding="utf-8") as file:
            # It begins with a line end: what an earlier run left half written ends there.
            file.write("\n" + "\n".join(lines) + "\n")
