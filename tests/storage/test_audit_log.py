"""The audit log keeps every event, within its bounds, and gives them the newest first."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.errors import RunError
from mars_ray.storage import audit_log
from mars_ray.storage.audit_log import AuditEvent, AuditLog, AuditWriter
from tests.factories.clock import Clock


def pages(log: AuditLog, limit: int) -> list[AuditEvent]:
    """All events, read page by page."""
    events: list[AuditEvent] = []
    while True:
        page = log.read(events[-1].id if events else None, limit)
        events += page.events
        assert len(page.events) == limit or not page.has_more
        if not page.has_more:
            return events


def test_an_event_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    AuditLog(tmp_path / "audit", clock=Clock(1.8e9)).record("key:ada", "key.added", "bob", details={"role": "use"})
    [event] = AuditLog(tmp_path / "audit").read().events
    assert (event.unix_s, event.by, event.action, event.subject) == (1.8e9, "key:ada", "key.added", "bob")
    assert (event.details, event.cause) == ({"role": "use"}, "")


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.001, 1.0, 40000.0])), max_size=30),
    st.integers(1, 7),
    st.integers(1, 400),
)
def test_whoever_writes_and_however_it_is_paged_all_events_are_read_once_by_falling_time(
    acts: list[tuple[int, float]], limit: int, segment_bytes: int
) -> None:
    clock = Clock(1.8e9)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as bounds:
        bounds.setattr(audit_log, "SEGMENT_BYTES", segment_bytes)
        writers = [AuditLog(Path(folder), kind, clock) for kind in ("operators", "operators", "policy")]
        for number, (writer, seconds) in enumerate(acts):
            clock.now_s += seconds
            writers[writer].record(f"w{writer}", "act", str(number))
        events = pages(AuditLog(Path(folder)), limit)
    assert sorted(int(event.subject) for event in events) == list(range(len(acts)))
    assert [event.id for event in events] == sorted((event.id for event in events), reverse=True)
    times = [event.unix_s for event in events]
    assert times == sorted(times, reverse=True)


def test_ids_rise_although_the_clock_jumps_back(tmp_path: Path) -> None:
    clock = Clock(1.8e9)
    log = AuditLog(tmp_path, clock=clock)
    for number in range(3):
        log.record("key:ada", "act", str(number))
        clock.now_s -= 5000
    assert [event.subject for event in log.read().events] == ["2", "1", "0"]


def test_the_oldest_segments_of_its_own_kind_go_when_the_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "SEGMENT_BYTES", 500)
    monkeypatch.setattr(audit_log, "KEPT_BYTES", 3000)
    clock = Clock(1.8e9)
    AuditLog(tmp_path, "operators", clock).record("key:ada", "act", "first")
    policy = AuditLog(tmp_path, "policy", clock)
    for number in range(200):
        clock.now_s += 1
        policy.record("policy", "act", str(number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3000 + 2 * 500
    events = policy.read(limit=1000).events
    assert events[-1].subject == "first", "a busy policy removes no act of an operator"
    numbers = [int(event.subject) for event in events[:-1]]
    assert numbers == list(range(199, 199 - len(numbers), -1)) and len(numbers) > 5


def test_events_of_a_time_without_storage_are_written_with_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "audit"
    folder.write_text("in the way")
    log = AuditLog(folder)
    log.record("key:ada", "act", "0")
    log.record("key:ada", "act", "1")
    assert "not in the audit log yet" in caplog.text
    folder.unlink()
    log.record("key:ada", "act", "2")
    assert [event.subject for event in log.read().events] == ["2", "1", "0"]


def test_memory_stays_bounded_while_the_storage_is_away(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    log = AuditLog(tmp_path / "audit")
    for _ in range(600):
        log.record("key:ada", "act", "x" * 1000)
    assert sum(map(len, log._lines)) < audit_log.UNWRITTEN_BYTES + 2000


def test_a_damaged_line_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(tmp_path)
    log.record("key:ada", "act", "0")
    [segment] = tmp_path.iterdir()
    segment.write_text('{"id": 5\n[]\n{}\n' + segment.read_text())
    assert [event.subject for event in log.read().events] == ["0"]
    assert "no event" in caplog.text


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "0000000000001-operators.jsonl").write_text("x")
    log = AuditLog(tmp_path)
    log.record("key:ada", "act", "0")
    assert [event.subject for event in log.read().events] == ["0"]
    assert (tmp_path / "notes.jsonl").exists()


def test_without_a_storage_events_are_in_the_log_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(None)
    with caplog.at_level(logging.INFO, "mars_ray.audit"):
        log.record("key:ada", "key.removed", "bob")
    assert json.loads(caplog.messages[0])["action"] == "key.removed"
    assert log.read().events == ()


def test_a_log_that_cannot_be_read_is_an_error_in_one_line(s3_store: None) -> None:
    with pytest.raises(RunError, match="s3://no-such-bucket/audit") as caught:
        AuditLog(UPath("s3://no-such-bucket/audit")).read()
    assert "\n" not in str(caught.value)


def test_writers_in_a_store_are_read_together(bucket: UPath) -> None:
    open_log: Callable[[], AuditLog] = lambda: AuditLog(bucket / "accounts" / "audit")  # noqa: E731
    assert open_log().read().events == ()
    one, two = open_log(), open_log()
    one.record("key:ada", "act", "0")
    two.record("key:bob", "act", "1")
    one.record("key:ada", "act", "2")
    assert {event.subject for event in open_log().read().events} == {"0", "1", "2"}


def test_a_writer_delays_no_act_and_has_recorded_all_in_order_when_it_is_closed(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hanging() -> float:
        assert go_on.wait(60)
        return 1.8e9

    writer = AuditWriter(AuditLog(tmp_path, clock=hanging))
    for number in range(3):
        writer.record("key:ada", "act", str(number), details={"number": number})
    assert AuditLog(tmp_path).read().events == ()
    go_on.set()
    writer.close()
    events = AuditLog(tmp_path).read().events
    assert [(event.subject, event.details) for event in events] == [(str(n), {"number": n}) for n in (2, 1, 0)]
