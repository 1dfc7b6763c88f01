"""Read the JSON texts of a file of records in order, a chunk at a time: JSONL (plain, gz or zst) or parquet.

Blank lines are left out. What is not JSON comes out as it is: whoever parses it says so. A line ends at a line feed and
nowhere else: other characters that Unicode calls line ends may stand in JSON strings.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, check_reachable

PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
KINDS = (PARQUET, ".jsonl", ".ndjson", *(f"{kind}{by}" for kind in (".jsonl", ".ndjson", ".json") for by in COMPRESSED))
"""Suffixes of files of records."""
GIVE = "Give a .parquet file or JSONL: .jsonl, .jsonl.gz or .jsonl.zst."

READ_BYTES = 1 << 20
RECORD_BYTES_MAX = 64 << 20
"""A longer line is no record but a file of another kind, and would be read into memory whole."""


def check_source(path: AnyPath) -> None:
    """Raise `DataError` when `path` is missing, of another kind, or damaged, `ConfigError` when its store is away.

    What is compressed is read to its end, many times faster than it is tokenised: half a download is found now and
    not after hours of work.
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
    """Yield the records in chunks, the last of which may be shorter. Raises `DataError` where the file is damaged."""
    records = _parquet_records(path, chunk_records) if path.suffix == PARQUET else _lines(path)
    with _damage_named(path):
        while chunk := list(islice(records, chunk_records)):
            yield chunk


def _open_lines(path: AnyPath) -> BufferedReader:
    # Arrow reads on where one compressed stream follows another.
    return BufferedReader(pa.input_stream(path.open("rb"), compression=COMPRESSED.get(path.suffix)), READ_BYTES)


def _lines(path: AnyPath) -> Iterator[bytes]:
    with _open_lines(path) as file:
        while line := file.readline(RECORD_BYTES_MAX + 1):
            if len(line) > RECORD_BYTES_MAX:
                raise DataError(f"{path} has a line of over {RECORD_BYTES_MAX >> 20} MiB: it is not one record a line.")
            if stripped := line.strip():
                yield stripped


def _parquet_records(path: AnyPath, batch_records: int) -> Iterator[bytes]:
    with path.open("rb") as stored, pq.ParquetFile(stored) as file:
        for batch in file.iter_batches(batch_size=batch_records):
            for row in batch.to_pylist():
                yield json.dumps(row, default=_as_text).encode()


def _as_text(value: object) -> str:
    # Some writers leave text unmarked, as bytes. What is not UTF-8 becomes lone surrogates, which records refuse.
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


@contextmanager
def _damage_named(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    # Arrow raises ValueError and OverflowError for a value that Python has no form for, and stores errors of their own.
    except Exception as error:
        raise DataError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
