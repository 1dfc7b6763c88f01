"""An output in a store: every row once, whoever is killed when, and whatever machine goes on."""

import io
import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count

import pyarrow.parquet as pq
import pytest
from upath import UPath

from mars_ray.batch.output import folder, job_log
from mars_ray.batch.output.folder import LOG, OutputFolder, open_output
from mars_ray.errors import ConfigError, OutputError, RunError
from mars_ray.storage import driver_lease
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import create_object, write_lines, write_new_object
from tests.batch.test_job_page import FULL
from tests.factories.rows import row_result


def ids_in(output: UPath) -> list[str]:
    shards = [pq.read_table(io.BytesIO(path.read_bytes())) for path in sorted(output.glob("rows/part-*"), key=str)]
    return [id for shard in shards for id in shard["id"].to_pylist()]


def errors_of(output: UPath) -> str:
    """Return the text of the errors file that counts."""
    text: str = max(output.glob("errors-*.jsonl"), key=str).read_text()
    return text


@contextmanager
def begun(output: UPath, *, new: bool = False) -> Iterator[OutputFolder]:
    with open_output(output, new=new) as opened:
        opened.ledger.check_settings({"model": "one"})
        opened.begin("parquet", {})
        yield opened


class Killed(BaseException):
    """Where a process would end."""


class Failed(Exception):
    """An error that ends a run in an orderly way."""


def test_a_job_goes_on_with_all_that_stands_in_the_store(bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "ROWS_PER_SHARD", 4)
    for run in range(3):
        with begun(bucket / "out") as output:
            assert output.ledger.done == 5 * run
            for number in range(5 * run, 5 * run + 5):
                assert len(output.take([row_result(number)], run_s=float(number % 5))) == 1
            assert output.take([row_result(0)], run_s=5.0) == []
            output.flush()
            assert (output.history.runs, output.history.seconds) == (run + 1, 4.0 * (run + 1))
    assert sorted(ids_in(bucket / "out"), key=int) == [str(number) for number in range(15)]


@pytest.mark.usefixtures("manual")
def test_a_shard_that_a_kill_kept_from_being_written_is_written_by_the_next_driver(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "ROWS_PER_SHARD", 4)

    def die(*_: object) -> None:
        raise Killed

    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch, begun(bucket / "out") as output:
        patch.setattr(folder, "write_new_object", die)
        output.take([row_result(number) for number in range(6)], run_s=0.0)
    assert ids_in(bucket / "out") == []
    with begun(bucket / "out") as output:
        assert ids_in(bucket / "out") == ["0", "1", "2", "3"]
        assert output.ledger.done == 6
        output.flush()
    assert ids_in(bucket / "out") == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.usefixtures("impatient", "manual")
def test_what_did_not_reach_the_log_is_done_again(bucket: UPath) -> None:
    with pytest.raises(RunError, match="Another driver"), begun(bucket / "out") as first:
        first.take([row_result(0)], run_s=0.0)
        first._log.commit()  # type: ignore[union-attr]
        first.take([row_result(1)], run_s=0.0)
        with begun(bucket / "out") as second:
            assert second.ledger.done == 1


@pytest.mark.usefixtures("manual")
def test_what_was_taken_is_done_although_an_error_ends_the_run_before_the_next_commit(bucket: UPath) -> None:
    with pytest.raises(Failed), begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
        raise Failed
    with begun(bucket / "out") as output:
        assert output.ledger.done == 1


@pytest.mark.usefixtures("manual")
def test_a_ctrl_c_between_ledger_and_log_leaves_what_the_log_says(bucket: UPath) -> None:
    with begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
        output.flush()
        add = output._log.add  # type: ignore[union-attr]
        output._log.add = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            output.take([row_result(1)], run_s=0.0)
        output._log.add = add  # type: ignore
        output.flush()
    with begun(bucket / "out") as output:
        assert output.ledger.done == 1
        output.take([row_result(1)], run_s=0.0)
        output.flush()
    assert ids_in(bucket / "out") == ["0", "1"]


def test_errors_are_there_and_may_be_done_again(bucket: UPath) -> None:
    with begun(bucket / "out") as output:
        output.take([row_result(0), row_result(1, error=True)], run_s=0.0)
        output.flush()
    assert json.loads(errors_of(bucket / "out")) == {"id": "1"}
    for again in (True, False):
        with begun(bucket / "out") as output:
            assert output.ledger.done == 2
            if again:
                output.forget_errors()
                output.take([row_result(1)], run_s=0.0)
            output.flush()
    assert errors_of(bucket / "out") == ""
    assert ids_in(bucket / "out") == ["0", "1"]


@pytest.mark.usefixtures("impatient", "manual")
def test_a_driver_that_was_given_up_before_it_wrote_its_errors_does_not_hide_newer_ones(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OutputFolder, "_write_numbered_errors", write)
            with begun(bucket / "out") as second:
                second.forget_errors()
                second.take([row_result(0), row_result(1, error=True)], run_s=0.0)
                second.flush()

    def write_late(output: OutputFolder, number: int) -> None:
        overtaken()
        write(output, number)

    write = OutputFolder._write_numbered_errors
    with begun(bucket / "out") as first:
        first.take([row_result(0, error=True)], run_s=0.0)
        monkeypatch.setattr(OutputFolder, "_write_numbered_errors", write_late)
        first.flush()
    assert json.loads(errors_of(bucket / "out")) == {"id": "1"}


def test_a_second_driver_is_refused_while_the_first_lives(bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lease, "RENEW_S", 0.1)
    monkeypatch.setattr(driver_lease, "POLL_S", 0.1)
    monkeypatch.setattr(job_log, "COMMIT_S", 0.1)
    refused = pytest.raises(OutputError, match=r"process \d+ on .* is working in s3://")
    with begun(bucket / "out"), refused, begun(bucket / "out"):
        pass


@pytest.mark.usefixtures("impatient", "manual")
def test_an_outage_of_the_store_longer_than_a_lease_does_not_cost_the_first_driver_its_job(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = bucket.fs
    read = fs.cat_file
    reads = count(1)

    def read_through_an_outage(name: str) -> bytes:
        content: bytes = read(name)
        if next(reads) == 2:  # the second driver waits for the first one, which renews its lease after the outage
            time.sleep(driver_lease.LEASE_S)
            lease = json.loads(content)
            fs.pipe_file(name, json.dumps(lease | {"renewed": lease["renewed"] + 1}).encode())
        return content

    refused = pytest.raises(OutputError, match=r"process \d+ on .* is working in s3://")
    with begun(bucket / "out"):
        monkeypatch.setattr(fs, "cat_file", read_through_an_outage)
        with refused, begun(bucket / "out"):
            pass


@pytest.mark.usefixtures("impatient", "manual")
def test_a_driver_that_was_given_up_writes_nothing_any_more(bucket: UPath) -> None:
    with begun(bucket / "out") as first:
        first.take([row_result(0)], run_s=0.0)
        first._log.commit()  # type: ignore[union-attr]
        with begun(bucket / "out") as second:
            assert second.ledger.done == 1
            with pytest.raises(RunError, match="Another driver has taken over the job in s3://"):
                first.flush()
            with pytest.raises(RunError, match="Another driver"):
                first.take([row_result(1)], run_s=0.0)
            second.take([row_result(1)], run_s=0.0)
            second.flush()
    assert ids_in(bucket / "out") == ["0", "1"]


@pytest.mark.usefixtures("impatient", "manual")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_driver_whose_job_was_put_aside_writes_nothing_into_the_new_one(bucket: UPath, rows: int) -> None:
    with begun(bucket / "out") as first:
        for number in range(2):
            first.take([row_result(number)], run_s=0.0)
            first._log.commit()  # type: ignore[union-attr]
        with begun(bucket / "out", new=True) as second:
            for number in range(10, 10 + rows):
                second.take([row_result(number)], run_s=0.0)
                second._log.commit()  # type: ignore[union-attr]
            with pytest.raises(RunError, match="Another driver"):
                first.flush()
            second.flush()
    assert ids_in(bucket / "out") == [str(number) for number in range(10, 10 + rows)]


@pytest.mark.usefixtures("impatient", "manual")
def test_a_shard_that_a_driver_writes_after_its_job_was_put_aside_replaces_none_of_the_new_one(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "ROWS_PER_SHARD", 2)

    def write_late(path: UPath, content: bytes) -> bool:
        monkeypatch.setattr(folder, "write_new_object", write_new_object)
        with begun(bucket / "out", new=True) as second:
            second.take([row_result(10)], run_s=0.0)
            written = write_new_object(path, content)
            second.take([row_result(11)], run_s=0.0)
            second.flush()
        return written

    with pytest.raises(RunError, match="Another driver has taken over the job"), begun(bucket / "out") as first:
        monkeypatch.setattr(folder, "write_new_object", write_late)
        first.take([row_result(0), row_result(1)], run_s=0.0)
    assert ids_in(bucket / "out") == ["10", "11"]


@pytest.mark.usefixtures("impatient", "manual")
@pytest.mark.parametrize("ended", [False, True])
def test_a_late_shard_with_a_number_that_the_new_job_does_not_reach_is_removed(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(folder, "ROWS_PER_SHARD", 2)

    def write_late(path: UPath, content: bytes) -> bool:
        monkeypatch.setattr(folder, "write_new_object", write_new_object)
        with begun(bucket / "out", new=True) as second:
            second.take([row_result(10)], run_s=0.0)
            if not ended:
                write_new_object(path, content)
            second.flush()
        if not ended:
            raise Killed  # so that the first driver cannot remove the shard
        return write_new_object(path, content)

    with suppress(Killed, RunError), begun(bucket / "out") as first:
        first.take([row_result(0), row_result(1)], run_s=0.0)
        monkeypatch.setattr(folder, "write_new_object", write_late)
        first.take([row_result(2), row_result(3)], run_s=0.0)
    assert ids_in(bucket / "out") == ["10"]


def test_files_of_the_user_in_the_folder_stay(bucket: UPath) -> None:
    with begun(bucket / "out") as output:
        kept = [bucket / "out" / "rows" / "part-merged.parquet", bucket / "out" / "errors-fixed.jsonl"]
        for path in kept:
            path.write_text("mine")
        output.take([row_result(0)], run_s=0.0)
        output.flush()
    assert [path.read_text() for path in kept] == ["mine", "mine"]


@pytest.mark.usefixtures("impatient", "manual")
def test_a_driver_whose_job_was_put_aside_while_it_wrote_a_shard_leaves_the_report_of_the_new_one(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(path: UPath, content: bytes) -> bool:
        monkeypatch.setattr(folder, "write_new_object", write_new_object)
        with begun(bucket / "out", new=True) as second:
            second.take([row_result(10)], run_s=0.0)
            second.flush()
            second.report(FULL)
        return write_new_object(path, content)

    with begun(bucket / "out") as first:
        first.take([row_result(0)], run_s=0.0)
        monkeypatch.setattr(folder, "write_new_object", write_late)
        with pytest.raises(RunError, match="Another driver has taken over the job"):
            first.flush()
        first.report(replace(FULL, rows=54321))
    assert "54321" not in (bucket / "out" / "report.json").read_text()


@pytest.mark.usefixtures("impatient", "manual")
def test_the_errors_of_a_job_that_was_put_aside_do_not_hide_those_of_the_new_one(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(path: AnyPath, lines: Iterable[str]) -> None:
        monkeypatch.setattr(folder, "write_lines", write_lines)
        with begun(bucket / "out", new=True) as second:
            second.take([row_result(10, error=True)], run_s=0.0)
            second.flush()
        write_lines(path, lines)

    with begun(bucket / "out") as first:
        for number in range(3):
            first.take([row_result(number, error=True)], run_s=0.0)
            first._log.commit()  # type: ignore[union-attr]
        monkeypatch.setattr(folder, "write_lines", write_late)
        with pytest.raises(RunError, match="Another driver has taken over the job"):
            first.flush()
    assert json.loads(errors_of(bucket / "out")) == {"id": "10"}


@pytest.mark.usefixtures("impatient", "manual")
def test_a_driver_that_lost_its_job_before_the_first_row_removes_nothing_of_the_next(bucket: UPath) -> None:
    def work() -> None:
        with begun(bucket / "out"), begun(bucket / "out") as second:
            second.take([row_result(0)], run_s=0.0)
            second.flush()

    with pytest.raises(RunError, match="Another driver"):
        work()
    assert ids_in(bucket / "out") == ["0"]


def test_what_failed_before_is_kept_by_a_run_that_answers_nothing(bucket: UPath) -> None:
    with begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
        output.flush()
    with begun(bucket / "out") as output:
        output.ledger.connection.execute("DELETE FROM lately")
        output.ledger._lately = set()
    assert ids_in(bucket / "out") == ["0"]


@pytest.mark.usefixtures("manual")
def test_a_commit_waits_for_results_that_are_on_their_way(bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_write, go_on = threading.Event(), threading.Event()

    def slow(path: UPath, content: bytes) -> bool:
        begun_write.set()
        go_on.wait()
        return create_object(path, content)

    with begun(bucket / "out") as output, ThreadPoolExecutor(2) as threads:
        log = output._log
        assert log
        monkeypatch.setattr(job_log, "create_object", slow)
        output.take([row_result(0)], run_s=0.0)
        keeping = threads.submit(log.commit)
        begun_write.wait()
        committing = threads.submit(log.commit)
        assert not wait([committing], timeout=0.2).done
        go_on.set()
        assert (keeping.result(), committing.result()) == (None, None)


@pytest.mark.usefixtures("impatient", "manual")
def test_of_two_drivers_that_begin_at_once_one_does(bucket: UPath) -> None:
    with open_output(bucket / "out", new=False) as first, open_output(bucket / "out", new=False) as second:
        second.begin("parquet", {})
        with pytest.raises(RunError, match="Another driver"):
            first.begin("parquet", {})


def test_an_answer_that_was_lost_does_not_fence_its_own_driver(bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "create_object", lambda *given: create_object(*given) and create_object(*given))
    with begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
        output.flush()
    assert ids_in(bucket / "out") == ["0"]


def test_an_earlier_job_is_put_aside(bucket: UPath) -> None:
    for number in range(2):
        with begun(bucket / "out", new=True) as output:
            assert output.ledger.done == 0
            output.take([row_result(number)], run_s=0.0)
            output.flush()
    assert (ids_in(bucket / "out"), ids_in(bucket / "out.before-1")) == (["1"], ["0"])


def test_other_settings_and_foreign_folders_are_refused_and_nothing_is_left_of_a_job_without_a_row(
    bucket: UPath,
) -> None:
    with begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
    refused = r'the job in s3://.*/out began with other settings: model was "one", now it is '
    with open_output(bucket / "out", new=False) as output:
        for settings, now in (({"model": "two"}, '"two"'), ({}, "null")):
            with pytest.raises(ConfigError, match=refused + now):
                output.ledger.check_settings(settings)
    (bucket / "other" / "file").write_text("mine")
    for new in (False, True):
        with (
            pytest.raises(OutputError, match="has files that do not belong to a job"),
            open_output(bucket / "other", new=new),
        ):
            pass
    with begun(bucket / "empty") as output:
        output.flush()
        output.report(FULL)
    assert not bucket.fs.find((bucket / "empty").path)


def test_a_log_with_a_gap_is_refused(bucket: UPath) -> None:
    with begun(bucket / "out") as output:
        output.take([row_result(0)], run_s=0.0)
        output.flush()
    next((bucket / "out" / ".job" / LOG).glob("*1.parquet")).unlink()
    with pytest.raises(OutputError, match=r"some objects in .* are missing"), open_output(bucket / "out", new=False):
        pass
