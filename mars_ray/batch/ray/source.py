"""Ray shell: read the rows that still need an answer, with their ids, into a Ray dataset."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import ray.data

from mars_ray.batch.output.ledger import undone
from mars_ray.batch.rows.row_ids import RowId, RowIdAssigner
from mars_ray.batch.rows.row_tables import FAILURE, READ_RECORDS, ROW_SCHEMA, to_row_table
from mars_ray.data.input_file import InputFile
from mars_ray.data.ray_read import read_stream
from mars_ray.errors import MarsRayError
from mars_ray.ray_private import cut_without_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """The rows of a job's input that still need an answer."""

    files: tuple[InputFile, ...]
    ledger: Path
    """Path of the job's ledger. Rows that the ledger lists as done are left out."""
    own_id: Callable[[bytes], str | None]
    """Function that returns the id given in a row, or None if the row has none."""
    limit: int | None = None
    """Number of rows to read from the beginning of the input; None reads all rows."""

    def raws(self) -> Iterator[bytes]:
        """Yield the JSON text of each row."""
        raws = (raw for file in self.files for chunk in file.read(READ_RECORDS) for raw in chunk)
        return islice(raws, self.limit)

    def tables(self) -> Iterator[pa.Table]:
        """Yield tables of the rows to answer. If the rest of the input cannot be read, the last table is a failure."""
        try:
            with RowIdAssigner(self.own_id) as row_ids:
                raws = self.raws()
                while chunk := list(islice(raws, READ_RECORDS)):
                    yield self._not_done(row_ids.assign(chunk), chunk)
        except MarsRayError as error:
            yield pa.Table.from_pylist([{FAILURE: str(error)}], schema=ROW_SCHEMA)

    def _not_done(self, row_ids: Sequence[RowId], raws: Sequence[bytes]) -> pa.Table:
        keys = undone(self.ledger, [row_id.key for row_id in row_ids])
        rows = [(row_id, raw) for row_id, raw in zip(row_ids, raws, strict=True) if row_id.key in keys]
        return to_row_table([row_id for row_id, _ in rows], [raw for _, raw in rows])


def read_undone_rows(rows: InputRows, rows_per_block: int) -> ray.data.Dataset:
    """Return a dataset of the rows to answer. A single task reads the rows on this machine, where the input files
    are."""
    # The id of a row depends on all earlier rows, so a single task reads the input. Reading and splitting request no
    # CPU, because the workers have taken all CPUs.
    return cut_without_cpu(read_stream(rows.tables, [file.path for file in rows.files], rows_per_block, here=True))
