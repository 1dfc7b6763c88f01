"""Numbers that took long to find, kept in a file so that a run that goes on need not find them again.

However it is killed, only what was written last may be lost: a line that is not complete is left out.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from mars_ray.errors import RunError


def cache_key(*parts: object) -> str:
    """Return one key for all parts together."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class NumberCache:
    """The numbers in one file."""

    def __init__(self, path: Path) -> None:
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
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # It begins with a line end: what an earlier run left half written ends there.
                file.write("\n" + "\n".join(lines) + "\n")
        except OSError as error:
            raise RunError(
                f"Cannot write {self._path}: {error.strerror}. Make room; the same command goes on."
            ) from error
