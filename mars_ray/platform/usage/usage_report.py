"""Reports of usage: sums by chosen columns, as rows of JSON, as CSV or as parquet."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mars_ray.errors import ConfigError
from mars_ray.platform.usage.usage_rows import BILLIONTHS, UsageCounts, UsageGroup, UsageSums, add_up
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file

COLUMNS = UsageGroup._fields
DAYS = 366
"""Maximum number of days of one report."""

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


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The days of a report, and the columns to group by."""

    start: str
    end: str
    """Last day of the report."""
    by: tuple[str, ...]


def parse_query(start: date | None, end: date | None, by: str, today: date) -> UsageQuery:
    """Return a query; the default is from the first day of the month to today. Raises `ConfigError`."""
    end = end or max(today, start or today)
    start = start or end.replace(day=1)
    if not 0 <= (end - start).days < DAYS:
        raise ConfigError(f"start is {start} and end is {end}; give up to {DAYS} days, the first one first.")
    columns = tuple(dict.fromkeys(filter(None, (name.strip() for name in by.split(",")))))
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ConfigError(f"usage cannot be grouped by {unknown[0]!r:.80}; choose from {', '.join(COLUMNS)}.")
    return UsageQuery(start.isoformat(), end.isoformat(), columns)


def grouped(sums: UsageSums, by: Sequence[str]) -> UsageSums:
    """Return the sums of each group of the columns `by`. The other columns are empty."""
    groups: UsageSums = {}
    for group, counts in sums.items():
        kept = UsageGroup(**{name: getattr(group, name) if name in by else "" for name in COLUMNS})
        add_up(groups, [(kept, counts)])
    return groups


def report_rows(sums: UsageSums, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each group of the columns `by`, in their order."""
    ordered = sorted(grouped(sums, by).items(), key=lambda row: tuple(getattr(row[0], name) for name in by))
    return [{name: getattr(group, name) for name in by} | _counts(counts) for group, counts in ordered]


def _counts(counts: UsageCounts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "answered_tokens": counts.answered_tokens,
        "accepted_tokens": sum(counts.accepted.values()),
        "accepted_by_threshold": dict(sorted(counts.accepted.items())),
        "price": counts.price_billionths / BILLIONTHS,
    }


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
