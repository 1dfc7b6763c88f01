"""Write files that are complete and on the disk when the call returns; no half-written file has their name."""

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.errors import RunError


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table. All raise `RunError` when it cannot be written."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_file(path, [buffer.getvalue()])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text."""
    write_file(path, (line.encode() + b"\n" for line in lines))


def write_file(path: Path, parts: Iterable[bytes | pa.Buffer]) -> None:
    """Write what `parts` are together."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is on the disk too
        finally:
            os.close(folder)
    except OSError as error:
        raise RunError(
            f"Cannot write to {path.parent} any more: {error.strerror}. Make room, then give the same command again."
        ) from error
