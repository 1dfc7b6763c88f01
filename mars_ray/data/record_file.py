"""Find the record files that an input names, and read their JSON texts in order: JSONL (plain, gz or zst) or parquet.

An input is a file, a folder, or a pattern such as `data/**/*.jsonl`, on this machine or in an object store. Its files
are sorted, so the same input always gives the same rows in the same order. Names that begin with a dot or an underscore
are left out, as in Spark and similar tools, unless the input itself contains such a name. Links to folders are followed
only in patterns.

Blank lines are left out. Text that is not JSON is passed on unchanged, for the parser of the records to report. A line
ends only at a line feed, because JSON strings may contain other characters that Unicode treats as line ends.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import glob
from io import BufferedReader
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.data.arrow_json import json_rows
from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, check_reachable, is_url, locate, locate_url, store_errors

PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
KINDS = (PARQUET, ".jsonl", ".ndjson", *(f"{kind}{by}" for kind in (".jsonl", ".ndjson", ".json") for by in COMPRESSED))
"""Suffixes of supported files."""
GIVE = "Give a .parquet file or JSONL: .jsonl, .jsonl.gz or .jsonl.zst."

READ_BYTES = 1 << 20
RECORD_BYTES_MAX = 64 << 20
"""Maximum bytes of a line. A longer line shows that the file is of another kind, and reading it could fill the
memory."""
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


def check_source(path: AnyPath) -> None:
    """Raise `DataError` if `path` is missing, damaged or unsupported, and `ConfigError` if its store is unreachable.

    Compressed files and parquet are read to the end, which is many times faster than tokenising them. An incomplete
    download is thus found now instead of after hours of work.
    """
    check_reachable(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder. {GIVE}")
    if not path.exists():
        raise DataError(f"There is no file {path}. {GIVE}")
    if not path.name.endswith(KINDS):
        raise DataError(f"{path} is neither JSONL nor parquet. {GIVE}")
    with _damage_named(path):
        if path.suffix == PARQUET:
            with path.open("rb") as stored, pq.ParquetFile(stored) as file:
                for _ in file.iter_batches():
                    pass
        else:
            with _open_lines(path) as lines:
                while lines.read(READ_BYTES) and path.suffix in COMPRESSED:
                    pass


def read_records(path: AnyPath, chunk_records: int) -> Iterator[list[bytes]]:
    """Yield the records in chunks; the last chunk may be shorter. Raises `DataError` if the file is damaged."""
    records = _parquet_records(path, chunk_records) if path.suffix == PARQUET else _lines(path)
    with _damage_named(path):
        while chunk := list(islice(records, chunk_records)):
            yield chunk


def _open_lines(path: AnyPath) -> BufferedReader:
    # Arrow also reads files that consist of several compressed streams.
    return BufferedReader(pa.input_stream(path.open("rb"), compression=COMPRESSED.get(path.suffix)), READ_BYTES)


def _lines(path: AnyPath) -> Iterator[bytes]:
    with _open_lines(path) as file:
        while line := file.readline(RECORD_BYTES_MAX + 1):
            if len(line) > RECORD_BYTES_MAX:
                raise DataError(
                    f"{path} has a line of over {RECORD_BYTES_MAX >> 20} MiB: it does not have one record per line."
                )
            if stripped := line.strip():
                yield stripped


def _parquet_records(path: AnyPath, batch_records: int) -> Iterator[bytes]:
    with path.open("rb") as stored, pq.ParquetFile(stored) as file:
        for batch in file.iter_batches(batch_size=batch_records):
            for row in json_rows(batch):
                yield json.dumps(row).encode()


@contextmanager
def _damage_named(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    # Arrow and object stores raise errors of their own.
    except Exception as error:
        raise DataError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
