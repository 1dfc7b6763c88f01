"""Content of shards: the records of answered rows as parquet or JSONL, with one schema for all shards."""

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.batch.rows.columns import ColumnKinds, lines_of, output_schema, table_of, widened
from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath, store_errors

FileFormat = Literal["parquet", "jsonl"]
ADVICE = "Restore the file, or use --new to start a new job."


def new_shard(texts: Sequence[str], kinds: ColumnKinds, format: FileFormat) -> bytes:
    """Return the content of a shard with these records, given as JSON."""
    return _parquet(table_of(texts, kinds)) if format == "parquet" else _jsonl(texts, kinds)


def rewritten_shard(path: AnyPath, kinds: ColumnKinds) -> bytes | None:
    """Return the content of a shard as `new_shard` would make it now that its job has more kinds of values.

    Returns None if the shard is up to date, or if a user has removed it. Raises `RunError` if the shard is damaged.
    """
    with store_errors(path, RunError, "Cannot read", ADVICE):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        new = _rewritten(content, kinds, parquet=path.name.endswith(".parquet"))
    except (OSError, ValueError) as error:  # of Arrow, JSON and UTF-8
        raise RunError(f"{path} is damaged: {str(error).partition(chr(10))[0]}. {ADVICE}") from error
    return None if new == content else new


def _rewritten(content: bytes, kinds: ColumnKinds, *, parquet: bool) -> bytes:
    if not parquet:
        return _jsonl(content.decode().split("\n")[:-1], kinds)
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        table = file.read()
    return content if table.schema.equals(output_schema(kinds)) else _parquet(widened(table, kinds))


def _parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, table.schema) as writer:
        if len(table):  # Hugging Face's datasets cannot read a row group without rows
            writer.write_table(table)
    return bytes(buffer.getvalue())


def _jsonl(texts: Sequence[str], kinds: ColumnKinds) -> bytes:
    return b"".join(line.encode() + b"\n" for line in lines_of(texts, kinds))
