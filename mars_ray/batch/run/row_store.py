"""The rows of a job that have no answer yet, in one file next to the job's ledger.

In:    the input files.
Out:   the number of rows and the kinds of their values; the unanswered rows, with their ids.
Never: reads the input or decodes a row twice, except the first rows, which the plan checks.

All input is read before any row is answered, because all shards have one schema and a damaged file should be found
early. The file is compressed, and removed at the end of the job.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pyarrow as pa

from mars_ray.batch.output.ledger import undone
from mars_ray.batch.rows.columns import Survey
from mars_ray.batch.rows.row_ids import RowIdAssigner
from mars_ray.batch.rows.row_tables import ROW_SCHEMA, to_row_table
from mars_ray.data.input_file import InputFile
from mars_ray.errors import RunError
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import store_errors
from mars_ray.storage.whole_file import WRITE_ADVICE

READ_RECORDS = 1024
"""Maximum number of rows in one table."""


class RowStore:
    """The unanswered rows of the job whose ledger is the file `ledger`. The rows are removed after the `with` block."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self.rows = 0
        """Number of stored rows."""
        self.path = ledger.absolute().with_name("rows.arrow")

    def fill(self, files: Sequence[InputFile], *, id_column: str, limit: int | None) -> Survey:
        """Read the input, or its first `limit` rows, and store the rows that the ledger does not list as done.

        `id_column` is the column with the id that a row may give itself. Raises `DataError` for a damaged file or too
        many columns, and `RunError` for a full disk.
        """
        survey = Survey()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (
            store_errors(self.path, RunError, "Cannot write", WRITE_ADVICE),
            pa.OSFile(str(self.path), "wb") as sink,
            pa.ipc.new_stream(sink, ROW_SCHEMA, options=options) as writer,
            RowIdAssigner(id_column) as assigner,
            ProgressLine("read the input", total=None) as progress,
        ):
            for raws in _chunks(files, limit):
                row_ids = [assigner.assign(raw, survey.add(raw)) for raw in raws]
                keys = undone(self._ledger, [row_id.key for row_id in row_ids])
                rows = [(row_id, raw) for row_id, raw in zip(row_ids, raws, strict=True) if row_id.key in keys]
                if rows:
                    writer.write_table(to_row_table(*zip(*rows, strict=True)))
                    self.rows += len(rows)
                progress.update(survey.rows, {})
        return survey

    def tables(self) -> Iterator[pa.Table]:
        """Yield the stored rows in tables. Any process on this machine may read them."""
        with pa.OSFile(str(self.path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def _chunks(files: Sequence[InputFile], limit: int | None) -> Iterator[list[bytes]]:
    """Yield the first `limit` rows of the input in chunks. All files are read, so that damaged ones are found."""
    read = 0
    for file in files:
        for chunk in file.read(READ_RECORDS):
            yield chunk if limit is None else chunk[: max(0, limit - read)]
            read += len(chunk)
