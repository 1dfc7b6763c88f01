"""Write the files of an output, each whole."""

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file


def write_parquet(path: AnyPath, table: pa.Table) -> None:
    """Write a table. All raise `RunError` when it cannot be written."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_file(path, [buffer.getvalue()])


def write_lines(path: AnyPath, lines: Iterable[str]) -> None:
    """Write lines of text."""
    write_file(path, (line.encode() + b"\n" for line in lines))
