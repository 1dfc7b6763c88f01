"""Why rows that are done stand in a ledger of ours and not in Ray Data's checkpoint: what that does not notice.

When one of these fails, Ray has learnt it; look again at `batch.ledger`.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
from ray.data.checkpoint import CheckpointConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def four_cpus() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield
    ray.shutdown()


def run(place: Path, answer: str) -> None:
    """One start of a job that says `answer` to every row."""
    context = ray.data.DataContext.get_current().copy()  # the process has other tests, whose jobs go by it
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(place / "checkpoint"), delete_checkpoint_on_success=False
    )

    def say(batch: pa.Table) -> pa.Table:
        return batch.append_column("answer", pa.array([answer] * len(batch)))

    with ray.data.DataContext.current(context):
        rows = ray.data.read_parquet(str(place / "in"))
        rows.map_batches(say, batch_format="pyarrow").write_parquet(str(place / "out"))


def answers(place: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in pq.read_table(place / "out").to_pylist():
        found.setdefault(row["id"], []).append(row["answer"])
    return found


def rows(place: Path, name: str, ids: list[str]) -> None:
    (place / "in").mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": ids}), place / "in" / f"{name}.parquet")


def test_it_goes_on_with_another_job_and_mixes_the_answers(four_cpus: None, tmp_path: Path) -> None:
    rows(tmp_path, "a", ["1", "2"])
    run(tmp_path, "threshold 0.95")
    rows(tmp_path, "b", ["3", "4"])
    run(tmp_path, "threshold 0.5")
    assert answers(tmp_path) == {
        "1": ["threshold 0.95"],
        "2": ["threshold 0.95"],
        "3": ["threshold 0.5"],
        "4": ["threshold 0.5"],
    }


def test_it_counts_rows_as_done_whose_output_is_gone(four_cpus: None, tmp_path: Path) -> None:
    rows(tmp_path, "a", ["1", "2"])
    run(tmp_path, "x")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    rows(tmp_path, "b", ["3"])
    run(tmp_path, "x")
    assert answers(tmp_path) == {"3": ["x"]}


def test_two_equal_ids_are_one_row_to_it_once_it_resumes(four_cpus: None, tmp_path: Path) -> None:
    rows(tmp_path, "a", ["1"])
    run(tmp_path, "x")
    rows(tmp_path, "b", ["1", "2"])
    run(tmp_path, "x")
    assert answers(tmp_path) == {"1": ["x"], "2": ["x"]}
