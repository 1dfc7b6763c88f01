"""Files of rows -> a Ray dataset of the rows that are not done yet, each with its identity (shell)."""

from collections.abc import Callable, Iterator
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
from mars_ray.batch.rows.identity import Identities
from mars_ray.data.record_file import read_records

READ_RECORDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which rows to read."""

    paths: tuple[Path, ...]
    ledger: Path
    """Of the job: rows that are done by it are left out."""
    given: Callable[[bytes], str | None]
    """The id a row has, if any."""
    salt: str
    """Of ids that are made: what else the answer to a row depends on."""
    limit: int | None = None
    """Of the rows of the input, only so many."""

    def raws(self) -> Iterator[bytes]:
        """Yield the rows as they stand in the files."""
        every = (raw for path in self.paths for chunk in read_records(path, READ_RECORDS) for raw in chunk)
        return islice(every, self.limit)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows to do."""
        raws = self.raws()
        with Identities(self.given, self.salt) as identities:
            while chunk := list(islice(raws, READ_RECORDS)):
                found = identities.identify(chunk)
                left = undone(self.ledger, [each.key for each in found])
                rows = [(each, raw) for each, raw in zip(found, chunk, strict=True) if each.key in left]
                yield pa.table(
                    {
                        "key": pa.array([each.key for each, _ in rows], pa.binary()),
                        "id": pa.array([each.id for each, _ in rows], pa.string()),
                        "repeated": pa.array([each.repeated for each, _ in rows], pa.bool_()),
                        "raw": pa.array([raw for _, raw in rows], pa.binary()),
                    }
                )


def read_rows(rows: Rows, rows_per_block: int) -> ray.data.Dataset:
    """Return the rows to do, read by one task on this machine, where files and ledger are."""
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    # A read followed by a repartition is what Ray keeps as tasks of their own; see `data.ray_read`.
    source = ray.data.read_datasource(_Source(rows), override_num_blocks=1, num_cpus=0.5, label_selector=here)
    return source.repartition(target_num_rows_per_block=rows_per_block)


class _Source(Datasource):  # type: ignore[misc]  # Ray is untyped to us
    """Read as one stream: identities are those of a row among all before it."""

    def __init__(self, rows: Rows) -> None:
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
        return [ReadTask(partial(Rows.tables, self._rows), unknown, per_task_row_limit=per_task_row_limit)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None
