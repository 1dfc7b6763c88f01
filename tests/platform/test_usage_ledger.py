"""Every record counts once, wherever a process is killed, and however often the record is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.errors import UnavailableError
from mars_ray.platform.usage import ledger_files
from mars_ray.platform.usage.ledger import DELETE_S, FRESH_S, REMEMBERED_S, UsageLedger
from mars_ray.platform.usage.usage_rows import UsageCounts, UsageGroup, UsageRecord, UsageSums, add_up
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import create_file
from tests.factories.clock import Clock

FOREVER = ("0000-01-01", "9999-12-31")


class Killed(BaseException):
    """The process ends here."""


def record(id: str, tokens: int = 1, day: str = "2026-11-25", key: str = "ada") -> UsageRecord:
    counts = UsageCounts(prompt_tokens=tokens, accepted={"0.90": tokens}, price_billionths=tokens * 7)
    return UsageRecord(id, UsageGroup(day, "acme", key, "bundled"), counts)


def expected(records: dict[str, UsageRecord]) -> UsageSums:
    sums: UsageSums = {}
    add_up(sums, ((record.group, record.counts) for record in records.values()))
    return sums


@contextmanager
def creating(create: Callable[[AnyPath, bytes], bool]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_files, "create_file", create)
        yield


days = st.sampled_from(["2026-10-31", "2026-11-01", "2026-11-25"])
batches = st.lists(
    st.tuples(
        st.integers(0, 1),  # which ledger
        st.lists(st.tuples(st.integers(0, 30), days), min_size=1, max_size=4),
        st.sampled_from(["", "", "", "killed before", "killed after", "away before", "away after"]),
        st.integers(1, 4),  # which file of the append
        st.floats(0, 200),
    ),
    max_size=30,
)


@given(batches)
def test_each_record_counts_once_through_kills_lost_replies_and_a_second_ledger(
    given: list[tuple[int, list[tuple[int, str]], str, int, float]],
) -> None:
    with TemporaryDirectory() as folder:
        clock = Clock(0.0)
        ledgers = [UsageLedger(Path(folder) / "usage", clock, segments=3) for _ in range(2)]
        confirmed: dict[str, UsageRecord] = {}
        for which, ids, fault, at, seconds in given:
            clock.now_s += seconds
            # One id always names one record.
            records = [record(f"{number}{day}", number, day) for number, day in ids]
            files = 0

            def create(path: AnyPath, content: bytes, fault: str = fault, at: int = at) -> bool:
                nonlocal files
                files += 1
                if fault and files == at and fault.endswith("before"):
                    raise Killed if fault.startswith("killed") else OSError(28, "no space")
                created = create_file(path, content)
                if fault and files == at:
                    raise Killed if fault.startswith("killed") else OSError(5, "lost")
                return created

            for _ in range(2):  # a gateway sends again until the meter confirms
                with creating(create):
                    try:
                        ledgers[which].append(records)
                        break
                    except Killed:
                        ledgers[which] = UsageLedger(Path(folder) / "usage", clock, segments=3)
                    except UnavailableError:
                        pass
            confirmed |= {record.id: record for record in records}
        assert ledgers[0].view().rows(*FOREVER).keys() <= expected(confirmed).keys()
        assert UsageLedger(Path(folder) / "usage").view().rows(*FOREVER) == expected(confirmed)


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    return tmp_path / "usage" if request.param == "disk" else UPath(f"memory://{uuid4().hex}/usage")


def test_sums_survive_many_snapshots_on_a_disk_and_in_a_store(folder: AnyPath) -> None:
    clock = Clock(0.0)
    ledger = UsageLedger(folder, clock, segments=4)
    records = {str(number): record(str(number), number, f"2026-11-{1 + number % 3:02}") for number in range(50)}
    for each in records.values():
        clock.now_s += 60
        ledger.append([each])
        ledger.append([each])
    assert ledger.view().rows(*FOREVER) == expected(records)
    assert UsageLedger(folder).view().rows(*FOREVER) == expected(records)
    one_day = UsageLedger(folder).view().rows("2026-11-02", "2026-11-02")
    assert {group.day for group in one_day} == {"2026-11-02"}
    left = ledger_files.LedgerFiles(folder).names("log")
    assert len(left) < 4 * (DELETE_S / 240 + 3), "replaced segments are deleted"


def test_an_id_is_remembered_across_snapshots_and_restarts_and_forgotten_after_its_time(tmp_path: Path) -> None:
    clock = Clock(0.0)
    ledger = UsageLedger(tmp_path, clock, segments=2)
    ledger.append([record("first")])
    for number in range(4):
        ledger.append([record(str(number))])
    ledger = UsageLedger(tmp_path, clock, segments=2)
    ledger.append([record("first")])
    assert sum(counts.requests for counts in ledger.view().rows(*FOREVER).values()) == 5
    clock.now_s += REMEMBERED_S + 1
    for number in range(4, 8):
        ledger.append([record(str(number))])
    held = ledger_files.LedgerFiles(tmp_path).newest_snapshot().ids
    assert len(held) <= 3, "ids take bounded memory"


def test_a_ledger_that_slept_finds_the_snapshots_of_another_before_it_appends(tmp_path: Path) -> None:
    clock = Clock(0.0)
    asleep, awake = (UsageLedger(tmp_path, clock, segments=2) for _ in range(2))
    asleep.append([record("a")])
    for number in range(9):
        clock.now_s += FRESH_S
        awake.append([record(str(number))])
    assert not (tmp_path / "log" / ledger_files.numbered(2)).exists(), "the next number of the sleeping ledger is free"
    asleep.append([record("b")])
    assert sum(counts.requests for counts in UsageLedger(tmp_path).view().rows(*FOREVER).values()) == 11


def test_two_ledgers_that_sum_up_the_same_segments_delete_no_file_of_the_newest_snapshot(tmp_path: Path) -> None:
    clock = Clock(0.0)
    ledgers = [UsageLedger(tmp_path, clock, segments=3) for _ in range(2)]
    ledgers[1].open()
    for number in range(6):
        ledgers[0].append([record(str(number))])
    for number in range(5, 40):
        clock.now_s += 100
        for ledger in reversed(ledgers):
            ledger.append([record(str(number))])
    assert sum(counts.requests for counts in UsageLedger(tmp_path, clock).view().rows(*FOREVER).values()) == 40
    for ledger in ledgers:
        assert sum(counts.requests for counts in ledger.view().rows(*FOREVER).values()) == 40


def test_spending_is_known_by_day_and_month_for_keys_and_accounts_also_after_a_restart(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path, segments=2)
    for number, day in enumerate(["2026-10-31", "2026-11-01", "2026-11-01", "2026-11-02"]):
        ledger.append([record(str(number), 10, day, key="ab"[number % 2])])
    again = UsageLedger(tmp_path)
    again.open()
    for known in (ledger, again):
        assert known.spent("2026-11", "account:acme") == (30, 210)
        assert known.spent("2026-11-01", "account:acme") == (20, 140)
        assert known.spent("2026-11-01", "key:b") == (10, 70)
        assert known.spent("2026-10-31", "key:b") == (0, 0)


@pytest.mark.parametrize("place", ["log", "snapshots", "days"])
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, place: str) -> None:
    ledger = UsageLedger(tmp_path, segments=2)
    for number in range(3):
        ledger.append([record(str(number))])
    names = ledger_files.LedgerFiles(tmp_path).names(place)
    (tmp_path / place / names[-1]).write_text("{")
    with pytest.raises(UnavailableError) as damaged:
        UsageLedger(tmp_path).view().rows(*FOREVER)
    assert names[-1] in str(damaged.value) and "\n" not in str(damaged.value)


def test_a_missing_segment_is_told_and_not_skipped(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path)
    for number in range(3):
        ledger.append([record(str(number))])
    (tmp_path / "log" / ledger_files.numbered(2)).unlink()
    with pytest.raises(UnavailableError, match="are missing"):
        UsageLedger(tmp_path).open()


def test_a_folder_that_cannot_be_written_is_one_line_and_works_again_later(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file where the folder should be")
    ledger = UsageLedger(tmp_path / "usage")
    with pytest.raises(UnavailableError, match="Repair the storage"):
        ledger.append([record("a")])
    (tmp_path / "usage").unlink()
    ledger.append([record("a")])
    assert sum(counts.requests for counts in ledger.view().rows(*FOREVER).values()) == 1
