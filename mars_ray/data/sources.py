"""Find the files of records that an input stands for: a file, a folder, or a pattern such as `data/**/*.jsonl`.

Their order is fixed: the same input is the same rows in the same order. Names that begin with a dot or an underscore
are left out, as everywhere where Spark and its kin write, unless the user's own words begin so. Links to folders are
followed in patterns only.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path

from mars_ray.data.record_file import GIVE, KINDS
from mars_ray.errors import DataError

HIDDEN = (".", "_")


def find_sources(given: str) -> tuple[Path, ...]:
    """Return the files that `given` stands for, at least one. Raises `DataError`."""
    # A name that looks like a pattern and is there is a name. Path.glob takes no absolute patterns.
    roots = [given] if Path(given).exists() else glob(given, recursive=True)  # noqa: PTH207
    if not roots:
        raise DataError(f"There is no file and no folder {given}, and nothing of that pattern. {GIVE}")
    files = {file for root in map(Path, roots) for file in ([root] if root.is_file() else _below(root))}
    asked = [part for part in Path(given).parts if part.startswith(HIDDEN)]
    found = sorted(file for file in files if file.name.endswith(KINDS) and not _hidden(file, asked))
    if not found:
        raise DataError(f"{given} holds no file whose name ends with {', '.join(KINDS)}. {GIVE}")
    return tuple(found)


def _below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, onerror=_refuse):
        yield from (Path(parent, name) for name in names)


def _hidden(file: Path, asked: list[str]) -> bool:
    return any(
        part.startswith(HIDDEN) and not any(part == name or fnmatchcase(part, name) for name in asked)
        for part in file.parts
    )


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
