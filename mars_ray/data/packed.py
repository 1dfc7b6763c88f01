"""Packed rows on disk: one parquet file, and a report next to it.

Every row is padded to the same length and stored as fixed-size lists, so that a reader gets [rows, length] arrays
without a loop over rows. `packed.json` is written last: a folder that contains it is complete.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import TypeAdapter

from mars_ray.data.dropped_records import DropReason, dropped_summary
from mars_ray.data.packing import PackedRow
from mars_ray.data.source_version import SourceVersion
from mars_ray.errors import DataError, EmptyDataError, OutputError, first_line
from mars_ray.method.streams import PADDING, PackedRows
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import replace_file

ROWS_FILE = "rows.parquet"
REPORT_FILE = "packed.json"
ROWS_PER_GROUP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """Counts of packed and dropped records: the content of `packed.json`."""

    source: SourceVersion
    records: int
    dropped: int
    """Number of records that gave no example."""
    drop_reasons: tuple[DropReason, ...]
    """The commonest reasons, most frequent first."""
    truncated: int
    """Number of examples that were cut to `length` tokens."""
    examples: int
    tokens: int
    response_tokens: int
    rows: int
    length: int
    fill: float
    """Share of the slots that hold a token instead of padding."""
    seconds: float
    tokens_per_s: float

    def losses(self, source: str) -> str:
        """Return a line about the records of `source` that were dropped or truncated; empty if all are whole."""
        if not self.dropped and not self.truncated:
            return ""
        cut = f"; {self.truncated:,} truncated to {self.length:,} tokens" if self.truncated else ""
        return dropped_summary(source, self.records, self.dropped, self.drop_reasons) + cut


class PackedWriter:
    """Context manager that writes rows as they arrive. Raises `OutputError` if the folder is not writable.

    Rows of an earlier attempt are overwritten, and its report is removed first, so that a report always fits the rows.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self._folder = folder
        self._length = length
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REPORT_FILE).unlink(missing_ok=True)
            self._writer = pq.ParquetWriter(folder / ROWS_FILE, _schema(length), compression="zstd")
        self._waiting: list[PackedRow] = []
        self.rows = 0

    def __enter__(self) -> "PackedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # only needed after an error; `close` closes the writer otherwise
            self._writer.close()

    def write(self, rows: Iterable[PackedRow]) -> None:
        """Add rows, which are written to disk in groups."""
        for row in rows:
            self._waiting.append(row)
            self.rows += 1
            if len(self._waiting) == ROWS_PER_GROUP:
                self._flush()

    def close(self, report: PackReport) -> None:
        """Write the remaining rows, and then the report, which marks the folder as complete."""
        self._flush()
        with _writing(self._folder):
            self._writer.close()
            replace_file(self._folder / REPORT_FILE, [json.dumps(asdict(report), indent=2).encode() + b"\n"])

    def _flush(self) -> None:
        shape = (len(self._waiting), self._length)
        tokens, response, example = arrays = _empty(shape)
        tokens[:] = 0
        response[:] = False
        example[:] = PADDING
        for r, row in enumerate(self._waiting):
            start = 0
            for e, encoded in enumerate(row.examples):
                end = start + len(encoded.tokens)
                tokens[r, start:end] = encoded.tokens
                response[r, start:end] = encoded.response
                example[r, start:end] = e
                start = end
        columns = [pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), self._length) for array in arrays]
        with _writing(self._folder):
            self._writer.write_table(pa.table(columns, schema=_schema(self._length)))
        self._waiting = []


def _schema(length: int) -> pa.Schema:
    number = pa.int16() if length <= 1 << 15 else pa.int32()  # a row has no more examples than tokens
    kinds = {"tokens": pa.int32(), "response": pa.bool_(), "example": number}
    return pa.schema({name: pa.list_(kind, length) for name, kind in kinds.items()})


def _empty(shape: tuple[int, int]) -> list[np.ndarray]:
    """Return an uninitialised array [rows, length] for each column."""
    return [np.empty(shape, dtype=kind.value_type.to_pandas_dtype()) for kind in _schema(shape[1]).types]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}. Free space there or choose another output.") from error


def read_report(folder: AnyPath) -> PackReport | None:
    """Return the report of a complete folder, or None if there is none yet. Raises `DataError` for a damaged report."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    try:
        return TypeAdapter(PackReport).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a report of this version ({first_line(error)}); remove {folder} and prepare again."
        ) from error


class PackedData:
    """Random access to packed rows. Raises `DataError` if the folder holds no packed data, and `EmptyDataError` if it
    holds no rows.

    All rows are held in memory, in 4 + 1 + 2 bytes per slot: a billion tokens take 7 GB in each worker of a node.
    """

    def __init__(self, folder: Path) -> None:
        report = read_report(folder)
        if report is None:
            raise DataError(f"{folder} holds no packed data (no {REPORT_FILE}); make it with `mars-ray prepare`.")
        if not report.rows:
            raise EmptyDataError(f"{folder} holds no packed row.")
        self.report = report
        try:
            self._tokens, self._response, self._example = _load(folder / ROWS_FILE, report)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{folder} is damaged ({first_line(error)}); remove it and prepare again.") from error

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, numbers: Sequence[int]) -> PackedRows:
        """Return the rows with these numbers, in this order."""
        tokens, response, example = (
            torch.from_numpy(array[numbers]) for array in (self._tokens, self._response, self._example)
        )
        return PackedRows.of(tokens.long(), response, example.long())


def _load(path: Path, report: PackReport) -> list[np.ndarray]:
    """Read the tokens, response marks and example numbers as arrays [rows, length], copying at most one group of rows
    at a time."""
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows != report.rows:
            raise ValueError(f"{path.name} has {file.metadata.num_rows} rows, {REPORT_FILE} says {report.rows}")
        if not file.schema_arrow.equals(_schema(report.length)):
            raise ValueError(f"{path.name} has other columns than rows of {report.length} tokens")
        arrays = _empty((report.rows, report.length))
        start = 0
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            for array, column in zip(arrays, batch.columns, strict=True):
                values = column.flatten().to_numpy(zero_copy_only=False)
                array[start : start + len(batch)] = values.reshape(len(batch), report.length)
            start += len(batch)
        return arrays
