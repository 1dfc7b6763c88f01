"""Find the files of records that an input stands for: a file, a folder, or a pattern such as `data/**/*.jsonl`, on
this machine or in a store.

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
from mars_ray.storage.location import AnyPath, check_reachable, is_url, locate, locate_url, store_errors

HIDDEN = (".", "_")


def find_sources(given: str) -> tuple[AnyPath, ...]:
    """Return the files that `given` stands for, at least one.

    Raises `DataError`, and `ConfigError` for a store that is out of reach.
    """
    files = _stored(given) if is_url(given) else _here(str(locate(given)))
    asked = [part for part in Path(given).parts if part.startswith(HIDDEN)]
    found = sorted(file for file in files if file.name.endswith(KINDS) and not _hidden(file, asked))
    if not found:
        raise DataError(f"{given} holds no file whose name ends with {', '.join(KINDS)}. {GIVE}")
    return tuple(found)


def _here(given: str) -> set[AnyPath]:
    # A name that looks like a pattern and is there is a name. Path.glob takes no absolute patterns.
    roots = [given] if Path(given).exists() else glob(given, recursive=True)  # noqa: PTH207
    if not roots:
        raise _nothing(given)
    return {file for root in map(Path, roots) for file in ([root] if root.is_file() else _below(root))}


def _stored(given: str) -> set[AnyPath]:
    place = locate_url(given)
    check_reachable(place)
    with store_errors(place, DataError, "Cannot list", GIVE):
        fs = place.fs
        roots = [place.path] if fs.exists(place.path) else fs.glob(place.path)
        if not roots:
            raise _nothing(given)
        return {locate(fs.unstrip_protocol(name)) for root in roots for name in fs.find(root)}


def _nothing(given: str) -> DataError:
    return DataError(f"There is no file and no folder {given}, and nothing of that pattern. {GIVE}")


def _below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, onerror=_refuse):
        yield from (Path(parent, name) for name in names)


def _hidden(file: AnyPath, asked: list[str]) -> bool:
    return any(
        part.startswith(HIDDEN) and not any(part == name or fnmatchcase(part, name) for name in asked)
        for part in file.parts
    )


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
