"""The runner of batches without an endpoint: each row once whatever stops it, deadlines, a storage that is away."""

import asyncio
import json
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from upath import UPath

from mars_ray.batch.output import job_log
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.control.cluster_load import Backlog
from mars_ray.control.demand import TOKENS_AT_FIRST
from mars_ray.errors import OutputError, RequestError, RunError, StoredNotFoundError, UnavailableError
from mars_ray.platform.batches import batch_run, row_calls, runner, storage_paths
from mars_ray.platform.batches.batch_output import UsageSum
from mars_ray.platform.batches.batch_run import BatchCounts, BatchRun, BatchTools
from mars_ray.platform.batches.batch_store import BatchStore, StoredBatch
from mars_ray.platform.batches.file_store import KEPT_S, FileStore
from mars_ray.platform.batches.input_file import BatchRow
from mars_ray.platform.batches.protocol import BatchRequest, BatchUrl, StorageLimits
from mars_ray.platform.batches.row_calls import RouteAnswer, RowCalls
from mars_ray.platform.batches.runner import BatchRunner
from mars_ray.platform.batches.storage_paths import BatchFolders, open_blocks, owner_name, result_id
from mars_ray.storage import driver_lease
from tests.factories.clock import Clock

URL: Literal["/v1/completions"] = "/v1/completions"
OWNER = "ada"


class Access:
    """Keys that are all valid."""

    async def has_access(self, batch: StoredBatch) -> bool:
        return True

    def model_of(self, name: str | None) -> str:
        return {None: "main", "alias": "small"}.get(name, str(name))


class Routes(Access):
    """Routes that answer each prompt with itself, after `before` has run."""

    def __init__(self, before: Callable[[str], Awaitable[int | None]]) -> None:
        self.calls = Counter[str]()
        self._before = before

    async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
        assert batch.request.endpoint == URL
        self.calls[body["prompt"]] += 1
        status = await self._before(body["prompt"]) or 200
        if status in (429, 503):
            return RouteAnswer(status, {"error": {"code": "overloaded"}}, "id", 1)
        return RouteAnswer(status, {"text": body["prompt"], "usage": usage_of(int(body["prompt"]))}, "id")


def run_until(looking: BatchRunner, met: Callable[[], bool]) -> None:
    """Run a runner until `met` returns true."""

    async def work() -> None:
        working = asyncio.create_task(looking.run())
        while not met():
            assert not working.done()
            await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(work())


async def at_once(_: str) -> None:
    return None


class Place:
    """A storage, and the stores in it, by a Unix clock that stands."""

    def __init__(self, root: Path | UPath) -> None:
        self.unix = Clock(1_800_000_000.0)
        self.clock = Clock()
        limits = StorageLimits()
        folders = BatchFolders(root)
        self.root = root
        self.files = FileStore(folders, limits, self.unix)
        self.batches = BatchStore(folders, self.files, limits, self.unix)

    def tools(self, routes: Routes) -> BatchTools:
        return BatchTools(
            files=self.files,
            batches=self.batches,
            calls=RowCalls(routes, in_flight=8),
            max_rows=1000,
            max_body_bytes=10_000,
            unix_clock=self.unix,
            clock=self.clock,
            poll_s=0.01,
        )

    def begin(self, rows: int, window: str = "1h", owner: str = OWNER, key: str = "key", **body: str) -> str:
        upload = self.files.new_upload(owner)
        for number in range(rows):
            line = {"custom_id": str(number), "method": "POST", "url": URL, "body": {"prompt": str(number)} | body}
            upload.write(json.dumps(line).encode() + b"\n")
        file = upload.finish("rows.jsonl", "batch")
        request = BatchRequest(input_file_id=file.id, endpoint=URL, completion_window=window)
        return self.batches.create(owner, key, request).id

    def run(self, routes: Routes) -> None:
        """Drive the only unfinished batch to its end."""
        [batch] = self.batches.unfinished()
        asyncio.run(BatchRun(batch, self.tools(routes)).run())

    def lines(self, file: str | None) -> dict[str, Any]:
        content = b"".join(self.files.content(OWNER, file or ""))
        lines = [json.loads(line) for line in content.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines), "no row twice"
        return found


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(job_log, "COMMIT_S", 0.02)
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.3)
    monkeypatch.setattr(driver_lease, "POLL_S", 0.05)
    monkeypatch.setattr(driver_lease, "RENEW_S", 1000.0)
    monkeypatch.setattr(row_calls, "PAUSE_S", 0.0)
    if request.param == "s3":  # for tests that need uploads of which nothing shows before their end
        return Place(request.getfixturevalue("bucket") / "batches")
    return Place(tmp_path / "batches" if request.param == "folder" else UPath(f"memory://{uuid.uuid4().hex}/batches"))


def usage_of(number: int, url: str = URL) -> dict[str, Any]:
    """Return the usage of a row's answer, as the row's route names it."""
    if url == "/v1/responses":
        return {
            "input_tokens": number,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": number + 3,
        }
    return {
        "prompt_tokens": number,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens": 3,
        "completion_tokens_details": {"reasoning_tokens": 2} if url != URL else None,
        "total_tokens": number + 3,
    }


class Stopped(BaseException):
    """The place where a process would end."""


def test_a_driver_that_is_stopped_again_and_again_answers_each_row_and_stores_it_once(place: Place) -> None:
    id = place.begin(60)
    for stop in range(4):

        async def stopping(prompt: str, stop: int = stop) -> None:
            await asyncio.sleep(0.005)
            if int(prompt) >= 12 * (stop + 1):
                raise Stopped

        with pytest.raises(Stopped):
            place.run(Routes(stopping))
    last = Routes(at_once)
    place.run(last)
    batch = place.batches.get(OWNER, id)
    assert batch.status == "completed" and batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.request_counts.total) == (60, 0, 60)
    assert sorted(place.lines(batch.output_file_id), key=int) == [str(number) for number in range(60)]
    assert sum(last.calls.values()) < 60, "rows that were done do not run again"
    assert batch.usage and (batch.usage.input_tokens, batch.usage.output_tokens) == (sum(range(60)), 180)
    assert batch.usage.input_tokens_details.cached_tokens == 60
    assert place.batches.unfinished() == []


def test_a_row_that_finds_no_room_waits_and_one_that_fails_again_and_again_gets_an_error(place: Place) -> None:
    id = place.begin(3)
    statuses = {"0": iter([429, 503, 503, 200]), "1": iter([500, 500, 500]), "2": iter([500, 200])}

    async def busy(prompt: str) -> int:
        return next(statuses[prompt])

    place.run(Routes(busy))
    batch = place.batches.get(OWNER, id)
    assert sorted(place.lines(batch.output_file_id)) == ["0", "2"]
    assert batch.usage and batch.usage.total_tokens == 0 + 2 + 2 * 3, "a row with an error counts nothing"
    assert place.lines(batch.error_file_id)["1"]["response"]["status_code"] == 500


@pytest.mark.parametrize(
    ("status", "code"), [(429, "insufficient_quota"), (429, "rate_limit_exceeded"), (503, "prices_missing")]
)
def test_a_batch_that_its_own_limit_refuses_pauses_alone(tmp_path: Path, status: int, code: str) -> None:
    place = Place(tmp_path / "batches")
    place.begin(30)
    place.begin(30)
    poor, rich = place.batches.unfinished()
    sent = Counter[str]()

    class Limits(Access):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            sent[batch.id] += 1
            await asyncio.sleep(0)
            if batch.id == poor.id:
                return RouteAnswer(status, {"error": {"code": code}}, "id", 3600.0)
            return RouteAnswer(200, {"usage": {"completion_tokens": 3}}, "id")

    tools = replace(place.tools(Routes(at_once)), calls=RowCalls(Limits(), in_flight=8))

    async def work() -> None:
        runs = [BatchRun(poor, tools), BatchRun(rich, tools)]
        waiting = asyncio.create_task(runs[0].run())
        while not tools.calls.is_paused(poor):
            assert not waiting.done()
            await asyncio.sleep(0.01)
        await runs[1].run()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(work())
    assert place.batches.get(OWNER, rich.id).status == "completed"
    assert sent[poor.id] <= 8, "no more rows than there were turns when the first was refused"
    assert not tools.calls.is_paused(rich)


def test_a_paused_batch_is_no_backlog_and_goes_on_after_its_pause(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    id = place.begin(5)
    refusals = iter([RouteAnswer(429, {"error": {"code": "rate_limit_exceeded"}}, "id", 0.1)] * 3)
    backlogs = dict[bool, float]()

    class Limits(Routes):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            return next(refusals, None) or await super().call(batch, body, id)

    tools = place.tools(Limits(at_once))

    async def report(left: Mapping[str, Backlog]) -> None:
        for batch in place.batches.unfinished():
            backlogs[tools.calls.is_paused(batch)] = sum(backlog.tokens for backlog in left.values())

    run_until(BatchRunner(tools, report), lambda: place.batches.get(OWNER, id).status == "completed")
    assert backlogs[True] == 0


def test_work_that_is_left_counts_for_the_model_that_answers_it(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    for rows, body in ((3, {}), (2, {"model": "small"}), (4, {"model": "alias"})):
        place.begin(rows, **body)
    found = dict[str, float]()

    async def never(_: str) -> None:
        await asyncio.Event().wait()

    async def report(left: Mapping[str, Backlog]) -> None:
        found.update((model, backlog.tokens / TOKENS_AT_FIRST) for model, backlog in left.items())

    run_until(BatchRunner(place.tools(Routes(never)), report), lambda: sum(found.values()) == 9)
    assert found == {"main": 3, "small": 6}


def test_an_owner_with_many_batches_stops_neither_another_owner_nor_the_end_of_its_own(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    many = [place.begin(1) for _ in range(40)]
    other = place.begin(1, "2h", "bob")

    class Waiting(Routes):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            if batch.owner == OWNER:
                await asyncio.Event().wait()
            return await super().call(batch, body, id)

    place.batches.cancel(OWNER, many[-1])
    run_until(
        BatchRunner(place.tools(Waiting(at_once))),
        lambda: (
            place.batches.get("bob", other).status == "completed"
            and place.batches.get(OWNER, many[-1]).status == "cancelled"
        ),
    )


def test_a_model_without_an_engine_holds_up_no_rows_of_another(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    place.begin(20, "1h", model="small")
    id = place.begin(20, "2h")

    class Scaled(Routes):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            if "model" in body:
                await asyncio.Event().wait()
            return await super().call(batch, body, id)

    run_until(BatchRunner(place.tools(Scaled(at_once))), lambda: place.batches.get(OWNER, id).status == "completed")


def test_batches_that_pause_for_their_own_limits_keep_no_place_of_others(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    poor = {place.begin(1, "1h") for _ in range(runner.BATCHES_OF_OWNER)}
    rich = place.begin(1, "2h", key="other")

    class Limits(Routes):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            if batch.id in poor:
                return RouteAnswer(429, {"error": {"code": "insufficient_quota"}}, "id")
            return await super().call(batch, body, id)

    run_until(BatchRunner(place.tools(Limits(at_once))), lambda: place.batches.get(OWNER, rich).status == "completed")


@pytest.mark.parametrize("code", ["model_not_ready", "adapter_unavailable"])
def test_batches_whose_model_is_not_ready_hold_up_no_other_batch_of_their_key(tmp_path: Path, code: str) -> None:
    place = Place(tmp_path / "batches")
    for _ in range(runner.BATCHES_OF_OWNER):
        place.begin(1, "1h", model="small")
    id = place.begin(1, "2h")

    class NotReady(Routes):
        async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
            if "model" in body:
                return RouteAnswer(503, {"error": {"code": code}}, "id", 10)
            return await super().call(batch, body, id)

    run_until(BatchRunner(place.tools(NotReady(at_once))), lambda: place.batches.get(OWNER, id).status == "completed")


def test_batches_begin_in_turn_for_each_owner_and_by_deadline_for_one(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    late, soon, soonest = (place.begin(1, window) for window in ("3h", "2h", "1h"))
    other = place.begin(1, "4h", "bob")
    looking = BatchRunner(place.tools(Routes(at_once)))
    chosen = [batch.id for batch in looking._next_batches(place.batches.unfinished())]
    assert chosen == [soonest, other, soon, late]


@pytest.mark.parametrize("url", get_args(BatchUrl))
def test_the_usage_of_rows_is_read_whatever_their_route(url: str) -> None:
    bodies: list[dict[str, Any]] = [{"usage": usage_of(number, url), "text": "a\u2028b"} for number in range(5)]
    bodies.append({"usage": None})
    lines = [json.dumps({"response": {"body": body}}).encode() + b"\n" for body in bodies]
    usage = UsageSum()
    assert list(usage.read(lines)) == lines
    found = usage.usage()
    assert (found.input_tokens, found.output_tokens, found.total_tokens) == (10, 15, 25)
    assert found.input_tokens_details.cached_tokens == 5
    assert found.output_tokens_details.reasoning_tokens == (0 if url == URL else 10)


def test_the_runner_publishes_figures_of_all_batches(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIGURES_S", 0.01)
    done, failed = place.begin(3), place.begin(2)
    running = place.begin(7, "2h")
    place.files.delete(OWNER, place.batches.get(OWNER, failed).input_file_id)

    async def some(prompt: str) -> None:
        if int(prompt) > 2:
            await asyncio.Event().wait()

    unfinished = place.batches.unfinished

    def slow() -> list[StoredBatch]:
        """Drivers go on while a storage answers, and the figures are still those of one moment."""
        found = unfinished()
        time.sleep(0.05)
        return found

    monkeypatch.setattr(place.batches, "unfinished", slow)

    def published() -> bool:
        figures = place.batches.figures(place.unix.now_s)
        return figures is not None and (figures.rows["completed"], sum(figures.ended.values())) == (6, 2)

    run_until(BatchRunner(place.tools(Routes(some))), published)
    figures = place.batches.figures(place.unix.now_s)
    assert figures and figures.ended == {"completed": 1, "failed": 1}
    assert (figures.unfinished, figures.rows_left, figures.rows["failed"]) == ({"in_progress": 1}, 4, 0)
    assert figures.deadline_unix_s == place.batches.get(OWNER, running).expires_at
    assert figures.file_bytes == place.files.bytes_of_all() > 0
    assert place.batches.get(OWNER, done).status == "completed"

    another = BatchRunner(place.tools(Routes(at_once)))
    waiting = another._all_figures({}, BatchCounts())
    assert (waiting.unfinished, waiting.rows_left) == ({"waiting": 1}, 4)


def test_a_storage_that_is_away_does_not_keep_the_work_that_is_left_from_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "batches")
    reports = list[Mapping[str, Backlog]]()
    hanging = threading.Event()
    monkeypatch.setattr(place.batches, "unfinished", lambda: hanging.wait() and [])

    async def report(left: Mapping[str, Backlog]) -> None:
        reports.append(left)
        if len(reports) == 3:
            hanging.set()

    run_until(BatchRunner(place.tools(Routes(at_once)), report), hanging.is_set)


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_whose_input_is_gone_ends_with_the_results_that_are_stored(place: Place, late: bool) -> None:
    id = place.begin(30)

    async def stopping(prompt: str) -> None:
        if int(prompt) >= 5:
            await asyncio.sleep(0.05)
            raise Stopped

    with pytest.raises(Stopped):
        place.run(Routes(stopping))
    place.files.delete(OWNER, place.batches.get(OWNER, id).input_file_id)
    place.unix.now_s += 3601 if late else 0
    place.run(Routes(at_once))
    batch = place.batches.get(OWNER, id)
    assert batch.status == ("expired" if late else "failed")
    assert batch.errors and batch.errors.data and batch.errors.data[0].code == "file_not_found"
    assert batch.request_counts and 0 < batch.request_counts.completed < 30
    assert len(place.lines(batch.output_file_id)) == batch.request_counts.completed
    assert place.batches.unfinished() == []


def test_a_file_that_expires_before_the_batch_would_end_is_refused(place: Place) -> None:
    file = place.files.new_upload(OWNER).finish("rows.jsonl", "batch", 7199)
    request = BatchRequest(input_file_id=file.id, endpoint=URL, completion_window="2h")
    with pytest.raises(RequestError, match="expires in 7199 s, before the completion_window 2h ends"):
        place.batches.create(OWNER, "key", request)


def test_rows_ahead_are_limited_by_their_bytes_and_only_rows_with_a_turn_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "batches")
    place.begin(50)
    [batch] = place.batches.unfinished()
    monkeypatch.setattr(batch_run, "BYTES_AHEAD", 1000)
    held = list[int]()
    most = 0

    class Counted(RowCalls):
        async def answer(self, batch: StoredBatch, row: BatchRow) -> RowResult:
            nonlocal most
            assert all(isinstance(value, bytes | str | None) for value in row)
            held.append(len(row.line))
            most = max(most, sum(held))
            try:
                return await super().answer(batch, row)
            finally:
                held.remove(len(row.line))

    tools = replace(place.tools(Routes(at_once)), calls=Counted(Routes(lambda _: asyncio.sleep(0)), in_flight=8))
    asyncio.run(BatchRun(batch, tools).run())
    assert 900 < most < 1100


def test_at_the_deadline_the_other_rows_are_errors_even_if_the_clock_of_the_machine_was_set_back(place: Place) -> None:
    id = place.begin(20, "30m")

    [stored] = place.batches.unfinished()

    async def slow(prompt: str) -> None:
        if int(prompt) >= 5:
            while place.batches.state(stored).completed < 5:
                await asyncio.sleep(0.01)
            place.unix.now_s -= 1e6
            place.clock.now_s += 1801
            await asyncio.Event().wait()

    place.run(Routes(slow))
    batch = place.batches.get(OWNER, id)
    assert (batch.status, batch.expires_at) == ("expired", batch.created_at + 1800)
    assert sorted(place.lines(batch.output_file_id)) == [str(number) for number in range(5)]
    errors = place.lines(batch.error_file_id)
    assert sorted(errors, key=int) == [str(number) for number in range(5, 20)]
    assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


def test_a_batch_whose_end_was_not_stored_at_its_deadline_is_expired_all_the_same(place: Place) -> None:
    id = place.begin(3)
    place.unix.now_s += 3601
    stray = place.root / "files" / owner_name(OWNER) / result_id(id, "error")
    stray.write_bytes(b"")  # where the folder of the errors file must be
    with pytest.raises(UnavailableError):
        place.run(Routes(at_once))
    stray.unlink()
    place.run(Routes(at_once))
    batch = place.batches.get(OWNER, id)
    assert batch.status == "expired"
    assert {line["error"]["code"] for line in place.lines(batch.error_file_id).values()} == {"batch_expired"}


def test_a_second_driver_of_a_batch_is_kept_out(place: Place) -> None:
    place.begin(1)
    [batch] = place.batches.unfinished()
    tools = place.tools(Routes(at_once))

    async def both() -> None:
        started = asyncio.Event()

        async def waiting(_: str) -> None:
            started.set()
            await asyncio.Event().wait()

        first = asyncio.create_task(BatchRun(batch, place.tools(Routes(waiting))).run())
        await started.wait()
        with pytest.raises(OutputError):
            await BatchRun(batch, tools).run()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    if isinstance(place.root, Path):  # a lease in a store tells processes apart, and this test has only one
        asyncio.run(both())


@pytest.mark.parametrize("place", ["store"], indirect=True)
def test_a_driver_that_wakes_after_another_has_ended_its_batch_leaves_the_state(place: Place) -> None:
    id = place.begin(1)

    async def silent(_: str) -> None:
        await asyncio.to_thread(place.run, Routes(at_once))

    with pytest.raises(RunError, match="taken over"):
        place.run(Routes(silent))
    assert place.batches.get(OWNER, id).status == "completed"
    assert place.batches.unfinished() == []


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_driver_that_wakes_while_it_stores_results_leaves_those_of_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = place.begin(2)
    write = place.files.write

    def write_late(owner: str, file: str, lines: Iterable[bytes], *fields: Any) -> None:
        """Write a file in the middle of which another driver ends the batch."""

        def partial() -> Iterator[bytes]:
            yield b"partial"
            monkeypatch.setattr(place.files, "write", write)
            place.run(Routes(at_once))
            yield from lines

        write(owner, file, partial(), *fields)

    monkeypatch.setattr(place.files, "write", write_late)
    with pytest.raises(RunError, match="taken over"):
        place.run(Routes(at_once))
    batch = place.batches.get(OWNER, id)
    assert batch.status == "completed"
    assert sorted(place.lines(batch.output_file_id)) == ["0", "1"]


def test_batches_wait_for_a_storage_that_is_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.0)
    id = place.begin(4)
    look = place.batches.unfinished
    away = iter(range(3))

    def unfinished() -> Any:
        if next(away, None) is not None:
            raise UnavailableError("the storage is away.")
        return look()

    monkeypatch.setattr(place.batches, "unfinished", unfinished)

    run_until(BatchRunner(place.tools(Routes(at_once))), lambda: place.batches.get(OWNER, id).status == "completed")
    assert [record.message for record in caplog.records if "away" in record.message] == [
        "batches wait: the storage is away."
    ]


def test_expired_files_and_abandoned_uploads_are_removed(place: Place) -> None:
    abandoned = place.files.new_upload(OWNER)
    abandoned.write(b"half")
    abandoned.close()
    kept = place.files.new_upload(OWNER).finish("a", "batch", 3600)
    place.unix.now_s += 3601
    assert place.files.page(OWNER, after=None, limit=10, order="asc").data == []
    place.unix.now_s += 24 * 3600
    place.files.sweep(())
    folder = place.root / "files"
    assert not [path for path in folder.glob("*/*/*") if kept.id in str(path) or abandoned.id in str(path)]


def test_results_that_are_being_written_are_not_swept(place: Place) -> None:
    id = place.begin(1, "168h")
    place.unix.now_s += 7 * 24 * 3600
    looking = BatchRunner(place.tools(Routes(at_once)))

    def chunks() -> Iterator[bytes]:
        looking._sweep(place.batches.unfinished())
        yield b"{}"

    file = result_id(id, "output")
    place.files.write(OWNER, file, chunks(), "results", None)
    assert b"".join(place.files.content(OWNER, file)) == b"{}"


def test_a_clock_that_jumps_forward_for_a_while_removes_no_input_of_an_unfinished_batch(place: Place) -> None:
    id = place.begin(1)
    place.unix.now_s += KEPT_S
    BatchRunner(place.tools(Routes(at_once)))._sweep(place.batches.unfinished())
    place.unix.now_s -= KEPT_S
    place.run(Routes(at_once))
    assert place.batches.get(OWNER, id).status == "completed"


def test_a_reader_gets_no_part_of_a_file_of_results_that_is_written_again(tmp_path: Path) -> None:
    place = Place(tmp_path / "batches")
    file = result_id(place.begin(1), "output")
    place.files.write(OWNER, file, [b"first"], "results", None)

    def chunks() -> Iterator[bytes]:
        yield b"sec"
        with pytest.raises(StoredNotFoundError):
            place.files.content(OWNER, file)
        yield b"ond"

    with place.files.lines(OWNER, file) as download:
        place.files.write(OWNER, file, chunks(), "results", None)
        assert download.read() == b"first"
    assert b"".join(place.files.content(OWNER, file)) == b"second"


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"id": 1}', b'{"later": 1}', b""])
def test_a_damaged_batch_and_stray_names_do_not_stop_other_batches(
    place: Place, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, id = place.begin(1), place.begin(1)
    [path] = place.root.glob(f"jobs/*/{damaged}/batch.json")
    path.write_bytes(content or path.read_bytes().replace(b"ada", b"bob"))
    [file] = place.root.glob(f"files/*/{place.batches.get(OWNER, id).input_file_id}")
    for stray in (path.parent.parent / "stray", place.root / "unfinished" / "stray", file.parent / "stray"):
        stray.write_bytes(b"{")
    [unfinished] = place.root.glob(f"unfinished/*/{id}")
    (unfinished.parent / "stray").write_bytes(b"{")
    run_until(BatchRunner(place.tools(Routes(at_once))), lambda: place.batches.get(OWNER, id).status == "completed")
    assert [batch.id for batch in place.batches.page(OWNER, after=None, limit=9).data] == [id]
    assert len([record for record in caplog.records if damaged in record.message]) == 1


def test_a_damaged_state_and_a_row_that_fails_stop_no_other(place: Place) -> None:
    damaged, id = place.begin(1), place.begin(3)
    [folder] = place.root.glob(f"jobs/*/{damaged}")
    (folder / "state.json").write_text('{"unknown": 1}')

    async def failing(prompt: str) -> None:
        if prompt == "1":
            raise RecursionError

    run_until(BatchRunner(place.tools(Routes(failing))), lambda: place.batches.get(OWNER, id).status == "completed")
    batch = place.batches.get(OWNER, id)
    assert sorted(place.lines(batch.output_file_id)) == ["0", "2"]
    assert place.lines(batch.error_file_id)["1"]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("name", ["state.json", "cancel.json"])
def test_a_damaged_file_of_a_batch_hides_no_other_batch_and_keeps_its_input(
    place: Place, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, id = place.begin(1), place.begin(1)
    input_id = place.batches.get(OWNER, damaged).input_file_id
    [folder] = place.root.glob(f"jobs/*/{damaged}")
    (folder / name).write_text('{"unknown": 1}')
    for _ in range(2):
        assert [batch.id for batch in place.batches.page(OWNER, after=None, limit=9).data] == [id]
    assert len([record for record in caplog.records if damaged in record.message]) == 1
    assert place.batches.uses(OWNER, input_id) == damaged
    assert place.batches.uses(OWNER, place.batches.get(OWNER, id).input_file_id) == id


def test_a_damaged_file_hides_no_other_file(place: Place) -> None:
    damaged, id = (place.batches.get(OWNER, place.begin(1)).input_file_id for _ in range(2))
    [path] = place.root.glob(f"files/*/{damaged}/file.json")
    path.write_text('{"unknown": 1}')
    assert [file.id for file in place.files.page(OWNER, after=None, limit=9, order="asc").data] == [id]


def test_folders_that_are_removed_while_their_size_is_taken_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_bytes(b"12345")
    size = storage_paths._size

    def removing(path: Path) -> int:
        bytes = size(path)
        for other in {"a", "b"} - {path.parent.name}:
            shutil.rmtree(tmp_path / other, ignore_errors=True)
        return bytes

    monkeypatch.setattr(storage_paths, "_size", removing)
    assert storage_paths.bytes_below(tmp_path) == 5


def test_a_store_gets_and_gives_files_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = UPath(f"memory://{uuid.uuid4().hex}")
    opened = list[dict[str, Any]]()

    def open_file(_self: Any, _path: str, **options: Any) -> BytesIO:
        opened.append(options)
        return BytesIO()

    monkeypatch.setattr(type(root.fs), "open", open_file)
    for mode in ("wb", "rb"):
        open_blocks(root / "content", mode)  # type: ignore[arg-type]
    assert [options["block_size"] for options in opened] == [8 << 20] * 2
