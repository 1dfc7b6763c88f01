"""Ray shell: read the rows that still need an answer, with their ids, as blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from mars_ray.batch.output.ledger import undone
from mars_ray.batch.rows.row_ids import RowId, RowIdAssigner
from mars_ray.batch.rows.row_tables import FAILURE, READ_RECORDS, ROW_SCHEMA, to_row_table
from mars_ray.data.input_file import InputFile
from mars_ray.data.ray_read import read_stream
from mars_ray.errors import MarsRayError

READ_BYTES = 4 << 20
"""Maximum size of a table to read. With Ray's default, 128 MiB, workers would wait until most of the input is read."""
NO_PROGRESS_S = 24 * 3600
"""Seconds without a table after which Ray stops. The reader waits while the engines are busy, and Ray's default, 30
minutes, is too short for a 7B model on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """The rows of a job's input that still need an answer."""

    files: tuple[InputFile, ...]
    ledger: Path
    """Path of the job's ledger. Rows that the ledger lists as done are left out."""
    id_column: str
    """Column with the id that a row may give itself."""
    limit: int | None = None
    """Number of rows to read from the beginning of the input; None reads all rows."""

    def raws(self) -> Iterator[bytes]:
        """Yield the JSON text of each row."""
        raws = (raw for file in self.files for chunk in file.read(READ_RECORDS) for raw in chunk)
        return islice(raws, self.limit)

    def tables(self) -> Iterator[pa.Table]:
        """Yield tables of the rows to answer. If the rest of the input cannot be read, the last table is a failure."""
        try:
            with RowIdAssigner(self.id_column) as row_ids:
                raws = self.raws()
                while chunk := list(islice(raws, READ_RECORDS)):
                    yield self._not_done(row_ids.assign(chunk), chunk)
        except MarsRayError as error:
            yield pa.Table.from_pylist([{FAILURE: str(error)}], schema=ROW_SCHEMA)

    def _not_done(self, row_ids: Sequence[RowId], raws: Sequence[bytes]) -> pa.Table:
        keys = undone(self.ledger, [row_id.key for row_id in row_ids])
        rows = [(row_id, raw) for row_id, raw in zip(row_ids, raws, strict=True) if row_id.key in keys]
        return to_row_table([row_id for row_id, _ in rows], [raw for _, raw in rows])


def blocks_to_answer(rows: InputRows, rows_per_block: int) -> Iterator[pa.Table]:
    """Yield the rows to answer in blocks. A single task reads the rows on this machine, where the input files are."""
    # The id of a row depends on all earlier rows, so a single task reads the input.
    stream = read_stream(rows.tables, [file.path for file in rows.files], here=True)
    stream.context.target_max_block_size = READ_BYTES
    stream.context.enable_progress_bars = False  # `JobProgress` shows the progress instead
    stream.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    stream.context.memory_usage_poll_interval_s = None  # polling costs a thread for each call
    yield from stream.iter_batches(batch_size=rows_per_block, batch_format="pyarrow")
