"""A file of records -> a Ray dataset with one JSON text per record, in order (shell)."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import ray.data

from mars_ray.errors import DataError

JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".json.gz")
LINES_PER_TABLE = 1024


def check_source(path: Path) -> None:
    """Open `path` once, without Ray. Raises `DataError` when it is missing, unreadable or of an unknown kind."""
    if not path.is_file():
        raise DataError(f"There is no file {path}. Give a .jsonl, .jsonl.gz or .parquet file.")
    try:
        if path.name.endswith(JSONL):
            with _open_lines(path) as file:
                file.read(1)
        elif path.suffix == ".parquet":
            pq.read_metadata(path)
        else:
            raise DataError(f"{path} is neither JSONL nor parquet. Give a .jsonl, .jsonl.gz or .parquet file.")
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_raw(path: Path, rows_per_block: int) -> ray.data.Dataset:
    """Read JSONL (plain or gz) or parquet as a binary column `raw`: the JSON text of one record, blank lines left out.

    A record that is not JSON stays in the column: whoever parses it says so, and the other records go on.
    Raises `DataError` like `check_source`.
    """
    check_source(path)
    if path.suffix == ".parquet":
        rows = ray.data.read_parquet(str(path)).map_batches(_to_json, batch_format="pyarrow")
    else:
        # Ray's own text reader holds the whole file in memory and also ends a line where Unicode would, inside a
        # record.
        paths = ray.data.from_arrow(pa.table({"path": [str(path)]}))
        rows = paths.map_batches(_read_lines, batch_format="pyarrow")
    return rows.repartition(target_num_rows_per_block=rows_per_block)


def _open_lines(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _read_lines(paths: pa.Table) -> Iterator[pa.Table]:
    for path in paths["path"].to_pylist():
        try:
            with _open_lines(Path(path)) as file:
                lines = (line.strip() for line in file)
                records = (line for line in lines if line)
                while some := list(islice(records, LINES_PER_TABLE)):
                    yield _raw_table(some)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read to its end: {error}") from error


def _raw_table(records: Sequence[bytes]) -> pa.Table:
    return pa.table({"raw": pa.array(records, pa.binary())})


def _to_json(batch: pa.Table) -> pa.Table:
    return _raw_table([json.dumps(row, default=str).encode() for row in batch.to_pylist()])
