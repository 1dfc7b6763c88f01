"""Choose the files that a job answers.

In:    the inputs of a job, and its output.
Out:   each file once, however many paths lead to it: in the order of the inputs, then by path.
Never: a file of the job's own output, or of another job's output unless an input names its `rows`.

Files are told apart by device and inode, or by their key in the store. If several paths lead to a file, its path is one
without links if possible, then the shortest, then the first by name. So its path does not depend on the order of the
inputs.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mars_ray.batch.output.folder import is_job_output
from mars_ray.batch.rows.plain_format import READ_COLUMNS
from mars_ray.data.file_patterns import Match, find_matches
from mars_ray.data.input_file import InputFile, partitions_of
from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, locate

PATHS_SHOWN = 3
"""Maximum number of paths that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """The files of a job, and notes about what was left out."""

    files: tuple[InputFile, ...]
    notes: tuple[str, ...] = ()

    def without_partitions(self) -> "JobInput":
        """Return the input of an OpenAI batch, whose rows get no columns from names of folders."""
        columns = {name for file in self.files for name in file.partitions}
        if not columns:
            return self
        note = f"{_folders_named(columns)} add no column, because rows of OpenAI batch files have no other columns"
        return JobInput(files=tuple(replace(file, partitions={}) for file in self.files), notes=(*self.notes, note))


def find_input(names: Sequence[str], output: AnyPath) -> JobInput:
    """Return the files that the inputs `names` stand for, without outputs of jobs.

    Raises `DataError` for an input without files or within `output`, and `ConfigError` if a store is unreachable.
    """
    selection = _Selection(output)
    for number, name in enumerate(names):
        selection.add(number, name)
    return JobInput(files=selection.files(), notes=tuple(selection.notes()))


@dataclass(slots=True)
class _Candidate:
    path: AnyPath
    number: int
    """Number of the first input that leads to the file."""


class _Selection:
    """The files of the inputs so far, and what was left out."""

    def __init__(self, output: AnyPath) -> None:
        self._real: Callable[[Path], Path] = cache(lambda path: Path(os.path.realpath(path)))
        self._output_above: Callable[[AnyPath, AnyPath], AnyPath | None] = cache(self._find_output_above)
        self._is_job_output: Callable[[AnyPath], bool] = cache(is_job_output)
        self._own = frozenset(self._forms(_canonical(output)))
        self._own_path = output
        self._own_answers = {_identity(file) for file in output.glob("rows/*")} if isinstance(output, Path) else set()
        self._candidates: dict[Hashable, _Candidate] = {}
        self._outputs: dict[AnyPath, set[AnyPath]] = defaultdict(set)
        """Files left out, by the output that they belong to."""
        self._repeats: dict[AnyPath, None] = {}
        """Paths of files and folders that another path leads to, too."""
        self._reserved: set[str] = set()
        """Names of columns that rows must not get from the name of a folder."""
        self._ignored_links: dict[AnyPath, None] = {}

    def add(self, number: int, name: str) -> None:
        """Add the files of an input. Raises `DataError` if there is none."""
        matches = find_matches(name)
        outputs: dict[AnyPath, set[AnyPath]] = defaultdict(set)
        count = 0
        for match in matches.files:
            if (output := self._output_of(match) or self._linked_output_of(match.path)) is None:
                self._take(number, match.path)
                count += 1
            else:
                outputs[output].add(match.path)
        if not count:
            raise DataError(f"{name} holds nothing to answer: {self._outputs_note(outputs)}.")
        for output, files in outputs.items():
            self._outputs[output] |= files
        self._repeats |= dict.fromkeys(matches.repeated_links)
        self._ignored_links |= dict.fromkeys(matches.ignored_links)

    def files(self) -> tuple[InputFile, ...]:
        """Return the files in the order of the inputs, then by path."""
        candidates = sorted(self._candidates.values(), key=lambda candidate: (candidate.number, candidate.path.parts))
        return tuple(self._input_file(candidate.path) for candidate in candidates)

    def _input_file(self, path: AnyPath) -> InputFile:
        *_, real = self._forms(path)
        is_answers = path.parent.name == "rows" and self._is_job_output(path.parent.parent)
        partitions = partitions_of(path) or partitions_of(real)
        self._reserved |= partitions.keys() & READ_COLUMNS
        own = {name: value for name, value in partitions.items() if name not in READ_COLUMNS}
        return InputFile(path, own, is_answers)

    def notes(self) -> Iterator[str]:
        """Yield a sentence on each kind of files that were left out."""
        if self._outputs:
            yield self._outputs_note(self._outputs)
        if self._repeats:
            yield f"found more than once and read once: {_listed(self._repeats)}"
        if self._ignored_links:
            yield f"left out {_listed(self._ignored_links)}: only patterns such as 'data/**' follow links to folders"
        if self._reserved:
            named = _folders_named(self._reserved)
            yield f"{named} add no column, because these names are reserved for the options of a row"

    def _take(self, number: int, file: AnyPath) -> None:
        path = self._absolute(file)
        key = _identity(path)
        candidate = self._candidates.setdefault(key, _Candidate(path, number))
        if candidate.path is path:
            return
        self._repeats[max(path, candidate.path, key=self._rank)] = None
        candidate.path = min(path, candidate.path, key=self._rank)

    def _output_of(self, match: Match) -> AnyPath | None:
        """Return the output of a job that the file belongs to, unless an input names a path within the output."""
        forms = zip(self._forms(match.path), self._forms(match.named), strict=True)
        for path, named in forms:
            if (output := self._output_above(path.parent, named)) is not None:
                return output
        return None

    def _linked_output_of(self, file: AnyPath) -> AnyPath | None:
        """Return the job's own output if the file is a hard link to one of its answers."""
        return self._own_path if _identity(file) in self._own_answers else None

    def _find_output_above(self, folder: AnyPath, named: AnyPath) -> AnyPath | None:
        folders: tuple[AnyPath, ...] = (folder, *folder.parents)
        for output in folders:
            if self._is_own(output) or (output not in named.parents and self._is_job_output(output)):
                return output
        return None

    def _is_own(self, folder: AnyPath) -> bool:
        return folder in self._own or (isinstance(folder, Path) and self._real(folder) in self._own)

    def _outputs_note(self, outputs: dict[AnyPath, set[AnyPath]]) -> str:
        count = sum(map(len, outputs.values()))
        left_out = f"left out {count:,} {'file' if count == 1 else 'files'} below {_listed(outputs)}"
        if len(outputs) > 1:
            return f"{left_out}: they are outputs of jobs"
        if any(map(self._is_own, outputs)):
            return f"{left_out}: it is the output of this job"
        return f"{left_out}: it is the output of a job (to answer its rows, give {_listed(outputs)}/rows as an input)"

    def _absolute(self, path: AnyPath) -> AnyPath:
        """Return the path without `..`, which would hide the names of folders."""
        if isinstance(path, Path) and ".." in path.parts:
            return self._real(path.parent) / path.name
        return path.absolute()

    def _rank(self, path: AnyPath) -> tuple[bool, int, str]:
        """Return the sort key of a path among those that lead to the same file."""
        *_, real = self._forms(path)
        return path != real, len(path.parts), str(path)

    def _forms(self, path: AnyPath) -> tuple[AnyPath, ...]:
        """Return a path in the forms by which its folders may be recognised: as it is named, and without links."""
        if not isinstance(path, Path):
            return (path,)
        path = path.absolute()
        # Resolving the folder of many files once is faster than resolving each file.
        real = self._real(path) if path.is_symlink() or path.name == ".." else self._real(path.parent) / path.name
        return (real if ".." in path.parts else path, real)


def _canonical(path: AnyPath) -> AnyPath:
    """Return a path with the URL that `find_matches` gives, which is the same for `s3://` and `s3a://`."""
    return path if isinstance(path, Path) else locate(path.fs.unstrip_protocol(path.path.rstrip("/")))


def _identity(path: AnyPath) -> Hashable:
    """Return the device and inode of a local file, or its path in a store."""
    if not isinstance(path, Path):
        return path
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return status.st_dev, status.st_ino


def _folders_named(columns: Iterable[str]) -> str:
    return f"folders named {', '.join(f'{name}=...' for name in sorted(columns))}"


def _listed(paths: Iterable[AnyPath]) -> str:
    """Return the first paths as text, and the number of the others."""
    names = sorted(map(_shown, paths))
    others = len(names) - PATHS_SHOWN
    return ", ".join(names[:PATHS_SHOWN]) + (f" and {others:,} more" if others > 0 else "")


def _shown(path: AnyPath) -> str:
    """Return a path as text, relative to the working folder if it is below."""
    if isinstance(path, Path) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path)
