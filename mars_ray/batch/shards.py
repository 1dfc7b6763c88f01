"""The output folder: parquet shards, an errors file and a report.

In:    tables with the columns of the output, and rejected rows.
Out:   `part-00000.parquet` and on, `errors.jsonl` when there are any, `report.json` last.
Never: shows a half-written shard, writes into a folder that holds something.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.batch.outcomes import OUTPUT_SCHEMA, Rejected
from mars_ray.errors import OutputError, RunError

ROWS_PER_SHARD = 10_000
ERRORS_FILE = "errors.jsonl"
REPORT_FILE = "report.json"


class ShardWriter:
    """Writes one job's output. Makes the folder; raises `OutputError` when it is in use or cannot be written to."""

    def __init__(self, folder: Path, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        self._folder, self._rows_per_shard = folder, rows_per_shard
        self._waiting = OUTPUT_SCHEMA.empty_table()
        self._shards = 0
        self._made: list[Path] = []
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise OutputError(f"{folder} is already in use. Give a new folder or empty this one.")
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass  # being able to make a file is the only sure sign of being allowed to
        except OSError as error:
            raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error

    def write(self, table: pa.Table) -> None:
        """Add rows with the columns of the output; every full shard goes to the disk."""
        self._waiting = pa.concat_tables([self._waiting, table])
        while self._waiting.num_rows >= self._rows_per_shard:
            self._write_shard()

    def reject(self, rejected: list[Rejected]) -> None:
        """Add rows to the errors file."""
        if rejected:
            lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in rejected]
            with _named_failure(self._folder), (self._folder / ERRORS_FILE).open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def flush(self) -> None:
        """Write what waits for a full shard as a smaller one."""
        if self._waiting.num_rows:
            self._write_shard()

    def close(self, report: dict[str, Any]) -> None:
        """Write what is left, and the report: where it stands, the job is done."""
        self.flush()
        _replace(self._folder / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())

    def discard(self) -> None:
        """Remove the folders this writer made, if nothing was written."""
        for path in self._made:
            if any(path.iterdir()):
                return
            path.rmdir()

    def _write_shard(self) -> None:
        buffer = pa.BufferOutputStream()
        pq.write_table(self._waiting.slice(0, self._rows_per_shard), buffer)
        _replace(self._folder / f"part-{self._shards:05d}.parquet", buffer.getvalue())
        # Together and last: interrupted before, the same rows are written to the same name again.
        self._waiting, self._shards = self._waiting.slice(self._rows_per_shard), self._shards + 1


def _replace(path: Path, content: bytes | pa.Buffer) -> None:
    """Write `content` so that `path` is whole or not there, whatever happens meanwhile."""
    partial = path.with_name(f".{path.name}.partial")
    with _named_failure(path.parent):
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextmanager
def _named_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"Cannot write to {folder} any more: {error.strerror}.") from error
