"""A file of records -> a Ray dataset with one JSON text per record, in order (shell)."""

from collections.abc import Iterator
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
    """Read JSONL (plain, gz, zst) or parquet as a binary column `raw`: the JSON text of a record, without blank lines.

    A record that is not JSON stays in the column: whoever parses it says so, and the other records go on. A file that
    cannot be read fails in a worker, so look with `record_file.check_source` first.
    """
    # A read followed by a repartition is what Ray keeps as tasks of their own. After a map, it would fuse the
    # repartition with the maps on both of its sides, and one task would do the work of all.
    # One block asked for is none that Ray would split first.
    # A file of this machine may be on no other; that may be a head without CPUs, or all of them are busy.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if isinstance(path, Path) else None
    file = ray.data.read_datasource(
        _RecordFile(path.absolute()), override_num_blocks=1, num_cpus=0, label_selector=here
    )
    return file.repartition(target_num_rows_per_block=rows_per_block)


def our_error(error: RayError) -> MarsRayError | None:
    """Return the error of ours that made a worker fail, None when it was another."""
    cause: BaseException | None = error
    # What Ray raises has our class as well as its own, and a stack of the worker for its message.
    while isinstance(cause, RayError) or not (cause is None or isinstance(cause, MarsRayError)):
        cause = getattr(cause, "cause", None) or cause.__cause__
    # Ray writes advice on retries below the message.
    return None if cause is None else type(cause)(str(cause).partition("\n")[0])


class _RecordFile(Datasource):  # type: ignore[misc]  # Ray is untyped to us
    """One file, read by one task as a stream. Ray's own text reader would hold it whole, and split it at U+0085."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__()
        self._path = path

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002  # the stream has one reader, whatever Ray would like
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=[str(self._path)], exec_stats=None)
        return [ReadTask(partial(_tables, self._path), unknown, per_task_row_limit=per_task_row_limit)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None


def _tables(path: AnyPath) -> Iterator[pa.Table]:
    for records in read_records(path, CHUNK_RECORDS):
        yield pa.table({"raw": pa.array(records, pa.binary())})
