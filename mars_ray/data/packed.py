"""Packed rows on disk: one parquet file and a report beside it.

Every row is padded to the same length and stored as fixed-size lists, so that a reader gets [rows, length] arrays
without walking lists. `packed.json` appears last: a folder that has it is complete.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mars_ray.data.packing import Row
from mars_ray.errors import DataError, EmptyDataError
from mars_ray.method.streams import PADDING, PackedRows

ROWS_PER_GROUP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What became of the records; `packed.json`."""

    records: int
    bad_records: int
    dropped_overlong: int
    truncated: int
    examples: int
    tokens: int
    response_tokens: int
    rows: int
    length: int
    fill: float
    """Share of the slots that hold a token."""
    seconds: float
    tokens_per_s: float


class PackedWriter:
    """Writes rows as they come."""

    def __init__(self, folder: Path, length: int) -> None:
        self._path, self._length = folder / "rows.parquet", length
        self._schema = pa.schema(
            {
                "tokens": pa.list_(pa.int32(), length),
                "response": pa.list_(pa.bool_(), length),
                "example": pa.list_(pa.int16(), length),
            }
        )
        self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")
        self._waiting: list[Row] = []
        self.rows = 0

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows; they reach the disk in groups."""
        for row in rows:
            self._waiting.append(row)
            self.rows += 1
            if len(self._waiting) == ROWS_PER_GROUP:
                self._flush()

    def close(self, report: PackReport) -> None:
        """Write what is left, then the report that marks the folder complete."""
        self._flush()
        self._writer.close()
        self._path.with_name("packed.json").write_text(json.dumps(asdict(report), indent=2) + "\n")

    def _flush(self) -> None:
        columns = {
            "tokens": [row.tokens + [0] * (self._length - len(row.tokens)) for row in self._waiting],
            "response": [row.response + [False] * (self._length - len(row.tokens)) for row in self._waiting],
            "example": [row.example + [PADDING] * (self._length - len(row.tokens)) for row in self._waiting],
        }
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._waiting = []


def read_report(folder: Path) -> PackReport | None:
    """Return the report of a complete folder, None where there is none yet."""
    path = folder / "packed.json"
    return PackReport(**json.loads(path.read_text())) if path.is_file() else None


class PackedData:
    """Random access to packed rows. Raises `DataError` for a folder that is none, `EmptyDataError` for no rows."""

    def __init__(self, folder: Path) -> None:
        report = read_report(folder)
        if report is None:
            raise DataError(f"{folder} holds no packed data (no packed.json); make it with `mars-ray prepare`.")
        self.report = report
        table = pq.read_table(folder / "rows.parquet", memory_map=True)
        if not len(table):
            raise EmptyDataError(f"{folder} holds no packed row.")
        self._tokens, self._response, self._example = (
            np.asarray(table[name].combine_chunks().flatten()).reshape(len(table), -1) for name in table.column_names
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, numbers: Sequence[int]) -> PackedRows:
        """Return the rows with these numbers, in this order."""
        tokens, response, example = (
            torch.from_numpy(a[numbers]) for a in (self._tokens, self._response, self._example)
        )
        example = example.long()
        slot_RT = torch.arange(example.shape[1]).expand_as(example)
        starts_RT = torch.ones_like(response)
        starts_RT[:, 1:] = example[:, 1:] != example[:, :-1]
        start_RT = torch.where(starts_RT, slot_RT, 0).cummax(dim=1).values
        return PackedRows(
            tokens_RT=tokens.long(), response_RT=response, example_RT=example, position_RT=slot_RT - start_RT
        )
