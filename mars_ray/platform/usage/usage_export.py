"""Write reports of usage as CSV or parquet."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.errors import ConfigError
from mars_ray.platform.usage.usage_report import COLUMNS
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in COLUMNS),
        ("requests", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("answered_tokens", pa.int64()),
        ("accepted_tokens", pa.int64()),
        ("accepted_by_threshold", pa.map_(pa.string(), pa.int64())),
        ("price", pa.float64()),
    ]
)
"""Columns of a report. Columns of `COLUMNS` that the report does not group by are left out."""


def write_report(rows: Sequence[dict[str, Any]], by: Sequence[str], path: AnyPath) -> None:
    """Write a report as .csv or .parquet. Raises `ConfigError` for another suffix, and `RunError`."""
    fields = [field for field in SCHEMA if field.name in by or field.name not in COLUMNS]
    match path.suffix:
        case ".csv":
            write_file(path, [_csv(rows, [field.name for field in fields]).encode()])
        case ".parquet":
            buffer = pa.BufferOutputStream()
            entries = [row | {"accepted_by_threshold": list(row["accepted_by_threshold"].items())} for row in rows]
            pq.write_table(pa.Table.from_pylist(entries, pa.schema(fields)), buffer)
            write_file(path, [memoryview(buffer.getvalue())])
        case suffix:
            raise ConfigError(f"{path} ends with {suffix!r}; name a file that ends with .csv or .parquet.")


def _csv(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {"accepted_by_threshold": json.dumps(row["accepted_by_threshold"])})
    return text.getvalue()
