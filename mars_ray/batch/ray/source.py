"""Read the rows that are not done yet into a Ray dataset, each with its id (shell)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import ReadTask

from mars_ray.batch.output.ledger import undone
from mars_ray.batch.rows.row_ids import RowId, RowIdAssigner
from mars_ray.batch.rows.row_result import FAILURE
from mars_ray.batch.rows.row_table import READ_RECORDS, ROW_SCHEMA, to_row_table
from mars_ray.data.record_file import read_records
from mars_ray.errors import MarsRayError
from mars_ray.ray_private import cut_without_cpu
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """Which rows of the input to read."""

    paths: tuple[AnyPath, ...]
    ledger: Path
    """The ledger of the job: rows that are done by it are left out."""
    own_id: Callable[[bytes], str | None]
    """Returns the id that a row has, if any."""
    limit: int | None = None
    """Number of rows to read, from the beginning of the input; None reads all."""

    def raws(self) -> Iterator[bytes]:
        """Yield the rows as they stand in the files."""
        every = (raw for path in self.paths for chunk in read_records(path, READ_RECORDS) for raw in chunk)
        return islice(every, self.limit)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows to do, and the reason at the end where the rest cannot be read."""
        try:
            with RowIdAssigner(self.own_id) as row_ids:
                raws = self.raws()
                while chunk := list(islice(raws, READ_RECORDS)):
                    yield self._not_done(row_ids.assign(chunk), chunk)
        except MarsRayError as error:
            yield pa.Table.from_pylist([{FAILURE: str(error)}], schema=ROW_SCHEMA)

    def _not_done(self, row_ids: Sequence[RowId], raws: Sequence[bytes]) -> pa.Table:
        left = undone(self.ledger, [each.key for each in row_ids])
        rows = [(each, raw) for each, raw in zip(row_ids, raws, strict=True) if each.key in left]
        return to_row_table([each for each, _ in rows], [raw for _, raw in rows])


def read_rows(rows: InputRows, rows_per_block: int) -> ray.data.Dataset:
    """Return the rows to do, read by one task on this machine, where files and ledger are."""
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    # What reads and cuts asks for no CPU: workers have taken all there are.
    # A read followed by a repartition is what Ray keeps as tasks of their own; see `data.ray_read`.
    source = ray.data.read_datasource(_Source(rows), override_num_blocks=1, num_cpus=0, label_selector=here)
    return cut_without_cpu(source.repartition(target_num_rows_per_block=rows_per_block))


class _Source(Datasource):  # type: ignore[misc]  # Ray is untyped to us
    """The rows as one stream: the id of a row depends on all rows before it."""

    def __init__(self, rows: InputRows) -> None:
        super().__init__()
        self._rows = rows

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002  # the stream has one reader, whatever Ray would like
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        names = [str(path) for path in self._rows.paths]
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=names, exec_stats=None)
        return [ReadTask(partial(InputRows.tables, self._rows), unknown, per_task_row_limit=per_task_row_limit)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None
