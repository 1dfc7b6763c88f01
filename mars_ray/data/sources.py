"""Find the record files that an input names. An input is a file, a folder, or a pattern such as `data/**/*.jsonl`, on
this machine or in an object store.

The files are sorted, so the same input always gives the same rows in the same order. Names that begin with a dot or an
underscore are left out, as in Spark and similar tools, unless the input itself contains such a name. Links to folders
are followed only in patterns.
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


def find_sources(name: str) -> tuple[AnyPath, ...]:
    """Return the files that the input `name` stands for, which are at least one.

    Raises `DataError` if there is no file, and `ConfigError` if the store is unreachable.
    """
    files = _stored(name) if is_url(name) else _here(str(locate(name)))
    named = [part for part in Path(name).parts if part.startswith(HIDDEN)]
    sources = sorted(file for file in files if file.name.endswith(KINDS) and not _hidden(file, named))
    if not sources:
        raise DataError(f"{name} holds no file whose name ends with {', '.join(KINDS)}. {GIVE}")
    return tuple(sources)


def _here(name: str) -> set[AnyPath]:
    # If a path of this name exists, the name is not a pattern. Path.glob does not accept absolute patterns.
    roots = [name] if Path(name).exists() else glob(name, recursive=True)  # noqa: PTH207
    if not roots:
        raise _nothing(name)
    return {file for root in map(Path, roots) for file in ([root] if root.is_file() else _below(root))}


def _stored(url: str) -> set[AnyPath]:
    path = locate_url(url)
    check_reachable(path)
    with store_errors(path, DataError, "Cannot list", GIVE):
        fs = path.fs
        roots = [path.path] if fs.exists(path.path) else fs.glob(path.path)
        if not roots:
            raise _nothing(url)
        return {locate(fs.unstrip_protocol(file)) for root in roots for file in fs.find(root)}


def _nothing(name: str) -> DataError:
    return DataError(f"There is no file or folder {name}, and no file matches it as a pattern. {GIVE}")


def _below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, onerror=_refuse):
        yield from (Path(parent, name) for name in names)


def _hidden(file: AnyPath, named: list[str]) -> bool:
    return any(
        part.startswith(HIDDEN) and not any(part == name or fnmatchcase(part, name) for name in named)
        for part in file.parts
    )


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
