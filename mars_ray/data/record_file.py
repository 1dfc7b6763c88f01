"""Read the JSON texts of a record file in order: JSONL (plain, gz or zst) or parquet.

Blank lines are left out. Text that is not JSON is passed on unchanged, for the parser of the records to report. A line
ends only at a line feed, because JSON strings may contain other characters that Unicode treats as line ends.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.data.arrow_json import json_rows
from mars_ray.errors import DataError, first_line
from mars_ray.storage.location import AnyPath, check_reachable

PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
KINDS = (PARQUET, ".jsonl", ".ndjson", *(f"{kind}{by}" for kind in (".jsonl", ".ndjson", ".json") for by in COMPRESSED))
"""Suffixes of supported files."""
GIVE = "Give a .parquet file or JSONL: .jsonl, .jsonl.gz or .jsonl.zst."

READ_BYTES = 1 << 20
RECORD_BYTES_MAX = 64 << 20
"""Maximum bytes of a line. A longer line shows that the file is of another kind, and reading it could fill the
memory."""


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
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error
