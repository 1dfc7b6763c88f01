"""The output folder: every row once, whatever is killed when."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.output import folder as module
from mars_ray.batch.output import ledger
from mars_ray.batch.output.folder import OutputFolder, open_output
from mars_ray.batch.output.ledger import LEDGER, Ledger, rows_done, undone
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.errors import ConfigError, OutputError, RunError
from tests.factories.rows import row_result


def rows_in(folder: Path) -> list[str]:
    return [row["id"] for path in sorted(folder.glob("rows/part-*")) for row in read(path)]


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return found
    return [json.loads(line) for line in path.read_text().splitlines()]


def errors_in(folder: Path) -> list[str]:
    path = folder / "errors.jsonl"
    return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def shards_of(rows: int) -> Iterator[None]:
    """Shards of so many rows; as many keys wait until they are sorted in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_PER_SHARD", rows)
        patch.setattr(ledger, "LATELY", rows)
        yield


class Killed(Exception):
    """Where a process would end."""


def killed_at(output: OutputFolder, place: str) -> None:
    """Let the next shard be the last thing that happens: before it is written, or before it is noted."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    if place == "before the shard":
        output._shelve = die  # type: ignore[method-assign]
    else:
        output.ledger.shelve = die  # type: ignore[method-assign]


batches = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=12), st.sampled_from(["", "before the shard", "behind the shard"])),
    max_size=12,
)


@given(batches, st.integers(1, 7), st.sampled_from(["parquet", "jsonl"]))
def test_each_row_stands_in_the_output_once_whenever_the_driver_is_killed(
    runs: list[tuple[list[int], str]], per_shard: int, format: str
) -> None:
    with TemporaryDirectory() as place, shards_of(per_shard):
        folder = Path(place) / "out"
        for numbers, death in runs:
            with open_output(folder, new=False) as output:
                output.begin(format, {})  # type: ignore[arg-type]
                if death:
                    killed_at(output, death)
                try:
                    output.take([row_result(number, error=number % 5 == 0) for number in numbers], 1.0)
                except Killed:
                    continue
        with open_output(folder, new=False) as output:
            output.begin(format, {})  # type: ignore[arg-type]
            output.flush()
            every = {number for numbers, _ in runs for number in numbers}
            assert sorted(rows_in(folder)) == sorted(str(number) for number in every if number % 5)
            assert sorted(errors_in(folder)) == sorted(str(number) for number in every if number % 5 == 0)
            assert output.history.tokens == sum(number + 1 for number in every if number % 5)


def test_a_job_takes_what_its_runs_took_each_up_to_its_last_row(tmp_path: Path) -> None:
    for number, ends_s in enumerate([(0.25, 1.5), (0.75,)]):
        with open_output(tmp_path / "out", new=False) as output:
            output.begin("parquet", {})
            for place, run_s in enumerate(ends_s):
                output.take([row_result(2 * number + place)], run_s)
    with open_output(tmp_path / "out", new=False) as output:
        assert output.history.seconds == 2.25


@pytest.mark.parametrize(
    ("name", "lately"), [("out", 1), ("out", 2), ("out", 3), ("out#2", 1), ("a?b", 1), ("o%75t", 1)]
)
def test_what_is_done_can_be_told_while_the_driver_writes(tmp_path: Path, name: str, lately: int) -> None:
    with shards_of(lately), open_output(tmp_path / name, new=False) as output:
        output.take([row_result(1), row_result(2, error=True)], 1.0)
        keys = [number.to_bytes(16, "big") for number in range(4)]
        assert undone(tmp_path / name / LEDGER, keys) == {keys[0], keys[3]}
        assert output.ledger.done == rows_done(tmp_path / name / LEDGER) == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_could_not_be_written_down_can_be_taken_again(tmp_path: Path) -> None:
    with open_output(tmp_path / "out", new=False) as output:
        with pytest.raises(Killed), output.ledger.transaction():
            output.ledger.add([row_result(1)])
            raise Killed
        assert output.take([row_result(1)], 1.0) == [row_result(1)]


def test_nobody_else_may_work_in_the_folder(tmp_path: Path) -> None:
    with (
        open_output(tmp_path / "out", new=False),
        pytest.raises(OutputError, match=r"Another process is working in .*out"),
        open_output(tmp_path / "out", new=False),
    ):
        pass


def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(OutputError, match="has files that do not belong to a job"), open_output(tmp_path, new=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_job_that_did_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with open_output(tmp_path / "a" / "b", new=False):
        pass
    assert not (tmp_path / "a").exists()


def test_a_job_that_did_nothing_leaves_the_output_of_another_below_the_same_folder(tmp_path: Path) -> None:
    with open_output(tmp_path / "runs" / "a", new=False), open_output(tmp_path / "runs" / "b", new=False) as other:
        other.take([row_result(1)], 1.0)
        other.flush()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]
    assert rows_done(tmp_path / "runs" / "b" / LEDGER) == 1


def test_new_puts_an_earlier_job_aside(tmp_path: Path) -> None:
    for _ in range(3):
        with open_output(tmp_path / "out", new=True) as output:
            output.take([row_result(1)], 1.0)
            output.flush()
    for name in ("out", "out.before-1", "out.before-2"):
        assert rows_in(tmp_path / name) == ["1"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with open_output(tmp_path / "out", new=False) as output:
        output.ledger.check_settings({"temperature": 0.0, "template": None})
        output.take([row_result(1)], 1.0)
    with open_output(tmp_path / "out", new=False) as output:
        output.ledger.check_settings({"temperature": 0.0, "template": None})
        with pytest.raises(ConfigError, match=r'template was null, now it is "\{\{ x \}\}"'):
            output.ledger.check_settings({"temperature": 0.0, "template": "{{ x }}"})


def test_rows_with_errors_can_be_done_again(tmp_path: Path) -> None:
    with open_output(tmp_path / "out", new=False) as output:
        output.take([row_result(1), row_result(2, error=True)], 1.0)
        output.flush()
        assert errors_in(tmp_path / "out") == ["2"]
        output.ledger.forget_errors()
        output.take([row_result(2)], 2.0)
        output.flush()
    assert rows_in(tmp_path / "out") == ["1", "2"]
    assert errors_in(tmp_path / "out") == []


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    path.parent.mkdir()
    path.write_bytes(b"no database" * 100)
    with pytest.raises(OutputError, match=r"ledger\.sqlite is not a usable ledger"):
        Ledger(path, of=tmp_path, durable=True)


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.factories.rows import row_result
from mars_ray.batch.output.folder import open_output
from mars_ray.errors import RunError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
with open_output(Path(sys.argv[1]), new=False) as output:
    try:
        for number in range(100_000):
            output.take([row_result(number)], 1.0)
            print(number, flush=True)
    except RunError as error:
        print(error)
"""


def test_where_no_more_can_be_written_what_was_taken_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "out"), str(Path(__file__).parents[2]), str(300_000)],
        capture_output=True,
        text=True,
    )
    *numbers, said = done.stdout.splitlines()
    assert "Cannot write to" in said and "Make room, then give the same command again, without --new." in said, (
        done.stderr
    )
    with open_output(tmp_path / "out", new=False) as output:
        output.flush()
    assert rows_in(tmp_path / "out") == numbers


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Cannot write to"), open_output(tmp_path / "file" / "out", new=False):
        pass


def test_a_shard_that_cannot_be_written_stays_in_the_ledger(tmp_path: Path) -> None:
    with shards_of(1), open_output(tmp_path / "out", new=False) as output:
        output._rows.rmdir()
        with pytest.raises(RunError, match=r"Cannot write to .*rows"):
            output.take([row_result(1)], 1.0)
        output._rows.mkdir()
        output.flush()
    assert rows_in(tmp_path / "out") == ["1"]


def test_errors_are_counted_by_kind_under_one_whole_reason(tmp_path: Path) -> None:
    reasons = ["its id 'a' is taken", "its id 'b' is taken", "the prompt has 12 tokens"]
    results = [
        RowResult(key=number.to_bytes(16, "big"), error="{}", reason=reason) for number, reason in enumerate(reasons)
    ]
    with open_output(tmp_path / "out", new=False) as output:
        output.begin("jsonl", {})
        output.take(results, 0.0)
        assert output.ledger.error_counts() == {"its id 'a' is taken": 2, "the prompt has 12 tokens": 1}
        output.forget_errors()
        assert output.ledger.error_counts() == {}
