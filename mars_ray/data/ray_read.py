"""Ray shell: read records into a Ray dataset as a stream, in order and in one task."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import ReadTask
from ray.exceptions import RayError

from mars_ray.data.record_file import read_records
from mars_ray.errors import MarsRayError
from mars_ray.storage.location import AnyPath

CHUNK_RECORDS = 1024


def read_raw(path: AnyPath, rows_per_block: int) -> ray.data.Dataset:
    """Read JSONL (plain, gz or zst) or parquet as a binary column `raw` with the JSON text of each record.

    Blank lines are left out. Text that is not JSON stays in the column, so that the parser of the records can report
    it. An unreadable file raises an error in a worker, so call `record_file.check_source` first.
    """
    absolute = path.absolute()
    stream = read_stream(partial(_tables, absolute), [absolute], here=isinstance(path, Path))
    # Without the repartition, the single block of the task would not be split. After a map, Ray would fuse the
    # repartition with the maps on both sides, and one task would do all of the work; after a read it does not.
    return stream.repartition(target_num_rows_per_block=rows_per_block)


def read_stream(tables: Callable[[], Iterator[pa.Table]], paths: Sequence[AnyPath], *, here: bool) -> ray.data.Dataset:
    """Return a dataset of the tables that one task yields.

    `paths` are the files that the tables come from. If `here` is true, the task runs on this machine.
    """
    # The task requests no CPU, because this machine may be a head without CPUs, or all CPUs may be busy.
    node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if here else None
    return ray.data.read_datasource(_Stream(tables, paths), override_num_blocks=1, num_cpus=0, label_selector=node)


def our_error(error: RayError) -> MarsRayError | None:
    """Return the `MarsRayError` that made a worker fail, or None if it failed with another error."""
    cause: BaseException | None = error
    # The error that Ray raises is also a `MarsRayError`, but its message is the worker's stack trace.
    while isinstance(cause, RayError) or not (cause is None or isinstance(cause, MarsRayError)):
        cause = getattr(cause, "cause", None) or cause.__cause__
    # Ray writes advice on retries below the message.
    return None if cause is None else type(cause)(str(cause).partition("\n")[0])


class _Stream(Datasource):  # type: ignore[misc]  # Ray is untyped to us
    """Tables that one task yields. Ray's own text reader would hold a whole file in memory, and split lines at
    U+0085."""

    def __init__(self, tables: Callable[[], Iterator[pa.Table]], paths: Sequence[AnyPath]) -> None:
        super().__init__()
        self._tables = tables
        self._names = [str(path) for path in paths]

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002  # a stream has one reader
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=self._names, exec_stats=None)
        return [ReadTask(self._tables, unknown, per_task_row_limit=per_task_row_limit)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None


def _tables(path: AnyPath) -> Iterator[pa.Table]:
    for records in read_records(path, CHUNK_RECORDS):
        yield pa.table({"raw": pa.array(records, pa.binary())})
