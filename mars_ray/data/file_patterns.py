"""Find the record files that the name of an input stands for: a file, a folder or a pattern, on this machine or in a
store.

Names that begin with a dot or an underscore are left out, as in Spark and similar tools, unless the input itself
contains such a name. Links to folders are followed only in patterns. `**` enters each folder once, by the path without
a link if there is one, so a loop of links ends.
"""

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import chain
from pathlib import Path

from mars_ray.data.record_file import GIVE, KINDS
from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, check_reachable, is_url, locate, locate_url, store_errors

HIDDEN = (".", "_")
ANY_DEPTH = "**"


@dataclass(frozen=True, slots=True)
class Match:
    """A file that an input stands for."""

    path: AnyPath
    named: AnyPath
    """The file itself or a folder above it: the lowest that the input names without a wildcard."""


@dataclass(slots=True)
class Matches:
    """The files that an input stands for, and the linked folders that were left out."""

    files: list[Match] = field(default_factory=list)
    repeated_links: list[AnyPath] = field(default_factory=list)
    """Links to folders that the same pattern had already entered."""
    ignored_links: list[AnyPath] = field(default_factory=list)
    """Links to folders that were not followed."""


def find_matches(name: str) -> Matches:
    """Return the input files that match `name`, at least one.

    Raises `DataError` if there is no file or a folder cannot be read, and `ConfigError` if the store is unreachable.
    """
    try:
        matches = _stored(name) if is_url(name) else _Search(str(locate(name))).matches()
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
    matches.files = [match for match in matches.files if match.path.name.endswith(KINDS)]
    if not matches.files:
        raise DataError(f"{name} holds no file whose name ends with {', '.join(KINDS)}. {GIVE}")
    return matches


def _stored(url: str) -> Matches:
    path = locate_url(url)
    check_reachable(path)
    with store_errors(path, DataError, "Cannot list", GIVE):
        fs = path.fs
        if fs.exists(path.path):
            depth = len(path.path.rstrip("/").split("/"))
            files = fs.find(path.path)
        else:
            depth = _named_depth(path.path.split("/"))
            roots = fs.glob(path.path, detail=True)
            if not roots:
                raise _nothing(url)
            below = (fs.find(root) if info["type"] == "directory" else [root] for root, info in roots.items())
            files = sorted(set(chain.from_iterable(below)))
        named = _named_hidden(path.parts)
        matches = Matches()
        for file in files:
            stored = locate(fs.unstrip_protocol(file))
            if all(_visible(part, named) for part in stored.parts):
                folder = "/".join(file.split("/")[:depth])
                matches.files.append(Match(stored, locate(fs.unstrip_protocol(folder))))
        return matches


class _Search:
    """Search on this machine for the files of the input `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._named = _named_hidden(Path(name).parts)
        self._matches = Matches()

    def matches(self) -> Matches:
        """Return the files, which may be of any kind. Raises `DataError` if nothing has the name."""
        path = Path(self._name)
        # If a path of this name exists, the name is not a pattern.
        is_pattern = not path.exists()
        roots = self._expand(path) if is_pattern else [path]
        if not roots:
            raise _nothing(self._name)
        depth = _named_depth(path.parts) if is_pattern else len(path.parts)
        files = sorted(self._files(roots))
        self._matches.files = [Match(file, Path(*file.parts[:depth])) for file in files]
        return self._matches

    def _expand(self, pattern: Path) -> list[Path]:
        """Return the files and folders that match. `glob` would follow a loop of links up to 40 times."""
        paths = [Path(pattern.anchor)]
        for part in pattern.parts[bool(pattern.anchor) :]:
            if part == ANY_DEPTH:
                paths = self._folders_below(paths)
            elif has_magic(part):
                paths = [
                    Path(entry) for path in paths for entry in self._entries(path) if fnmatchcase(entry.name, part)
                ]
            else:
                paths = [path / part for path in paths if os.path.lexists(path / part)]
        return paths

    def _folders_below(self, roots: Iterable[Path]) -> list[Path]:
        """Return the folders among `roots` and all folders below them, each once."""
        entered: dict[tuple[int, int], Path] = {}
        folders = deque(roots)
        links = deque[Path]()
        while folders or links:
            is_link = not folders
            folder = links.popleft() if is_link else folders.popleft()
            if not folder.is_dir():
                continue
            if entered.setdefault(_inode(folder), folder) is not folder:
                self._matches.repeated_links += [folder] if is_link else []
                continue
            for entry in self._entries(folder):
                (links if entry.is_symlink() else folders).append(Path(entry))
        return list(entered.values())

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return the visible entries of a folder, by name."""
        try:
            with os.scandir(folder) as entries:
                return sorted((entry for entry in entries if _visible(entry.name, self._named)), key=lambda e: e.name)
        except NotADirectoryError:
            return []

    def _files(self, roots: Iterable[Path]) -> set[Path]:
        """Return the files among `roots` and all files below them."""
        files: set[Path] = set()
        walked: set[Path] = set()
        links: set[Path] = set()
        for root in roots:
            if root.is_file():
                files.add(root)
                continue
            for parent, folder_names, names in os.walk(root, onerror=_refuse):
                folder = Path(parent)
                if folder in walked:
                    folder_names.clear()
                    continue
                walked.add(folder)
                folder_names[:] = [name for name in folder_names if _visible(name, self._named)]
                links.update(path for name in folder_names if (path := folder / name).is_symlink())
                files.update(folder / name for name in names if _visible(name, self._named))
        self._matches.ignored_links += sorted(links - walked - set(self._matches.repeated_links))
        return files


def _named_hidden(parts: Iterable[str]) -> list[str]:
    """Return the parts of an input that name hidden files or folders."""
    return [part for part in parts if part.startswith(HIDDEN)]


def _visible(name: str, named: Iterable[str]) -> bool:
    return not name.startswith(HIDDEN) or any(name == part or fnmatchcase(name, part) for part in named)


def _named_depth(parts: list[str] | tuple[str, ...]) -> int:
    """Return the number of parts up to the last one without a wildcard, before the first `**`."""
    end = parts.index(ANY_DEPTH) if ANY_DEPTH in parts else len(parts)
    return max((number for number, part in enumerate(parts[:end], 1) if not has_magic(part)), default=0)


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _nothing(name: str) -> DataError:
    return DataError(f"There is no file or folder {name}, and no file matches it as a pattern. {GIVE}")


def _refuse(error: OSError) -> None:
    raise error
