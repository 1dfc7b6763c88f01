"""A document that several writers change by compare-and-swap loses no change, wherever it is."""

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.errors import DataError, OutputError
from mars_ray.storage.document import KEPT_VERSIONS, Content, Document, FileDocument, VersionedDocument

PLACES: dict[str, Callable[[Path], Document]] = {
    "file": lambda folder: FileDocument(folder / "keys.yaml"),
    "folder": lambda folder: VersionedDocument(folder / "keys"),
}


@pytest.fixture(params=["file", "folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Document]:
    """Opens the document again, as another process does."""
    if request.param == "store":
        bucket: UPath = request.getfixturevalue("bucket")
        return lambda: VersionedDocument(bucket / "accounts" / "keys")
    return lambda: PLACES[request.param](tmp_path)


def test_a_document_begins_without_a_version_and_is_read_as_it_was_written_last(place: Callable[[], Document]) -> None:
    one, two = place(), place()
    assert one.version() is None and one.read() == Content(None, b"")
    assert one.swap(None, b"a")
    first = two.read()
    assert first.data == b"a" and first.version == one.version() != None  # noqa: E711
    assert two.swap(first.version, b"b")
    assert one.read().data == b"b" and one.version() != first.version


def test_of_two_changes_from_one_version_the_second_fails(place: Callable[[], Document]) -> None:
    one, two = place(), place()
    assert one.swap(None, b"a")
    assert not two.swap(None, b"b")
    version = one.version()
    assert two.swap(version, b"c")
    assert not one.swap(version, b"d")
    assert one.read().data == b"c"


def test_writers_in_parallel_lose_no_change(place: Callable[[], Document]) -> None:
    begin = threading.Barrier(4)

    def write(writer: int) -> None:
        document = place()
        begin.wait()
        for number in range(5):
            while True:
                version, data = document.read()
                if document.swap(version, data + f"{writer}-{number}\n".encode()):
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    lines = place().read().data.decode().split()
    assert sorted(lines) == sorted(f"{writer}-{number}" for writer in range(4) for number in range(5))


@given(st.sampled_from(sorted(PLACES)), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_however_readers_and_writers_take_turns_the_document_is_the_last_confirmed_change(
    kind: str, steps: list[tuple[int, bool]]
) -> None:
    """Each of three writers reads at one of its steps and writes, from what it has read, at another."""
    with TemporaryDirectory() as folder:
        writers = [PLACES[kind](Path(folder)) for _ in range(3)]
        seen: list[Content] = [writer.read() for writer in writers]
        confirmed = b""
        for number, (writer, writes) in enumerate(steps):
            if writes:
                data = seen[writer].data + bytes([number])
                succeeded = writers[writer].swap(seen[writer].version, data)
                assert succeeded == (seen[writer].data == confirmed)
                confirmed = data if succeeded else confirmed
            else:
                seen[writer] = writers[writer].read()
                assert seen[writer].data == confirmed


def test_a_reply_that_was_lost_counts_as_success(tmp_path: Path) -> None:
    document = VersionedDocument(tmp_path / "keys")
    assert document.swap(None, b"a")
    assert document.swap(None, b"a"), "the client of a store sends the same object again"


def test_old_versions_are_removed_once_they_are_a_day_old(tmp_path: Path) -> None:
    document = VersionedDocument(tmp_path / "keys")
    for number in range(KEPT_VERSIONS + 4):
        document.swap(document.version(), b"%d" % number)
    names = sorted(path.name for path in (tmp_path / "keys").iterdir())
    assert len(names) == KEPT_VERSIONS + 4, "a slow writer could otherwise use the number of a removed version"
    for name in names[:3]:
        os.utime(tmp_path / "keys" / name, (1e9, 1e9))
    assert document.swap(document.version(), b"last")
    left = sorted(path.name for path in (tmp_path / "keys").iterdir())
    assert left == [*names[3:], f"{KEPT_VERSIONS + 5:010}.json"]
    assert document.read().data == b"last"


def test_the_versions_are_for_their_owner_alone_and_nothing_else_is_left(tmp_path: Path) -> None:
    document = VersionedDocument(tmp_path / "keys")
    document.swap(None, b"a")
    assert not document.swap(None, b"b")
    [file] = (tmp_path / "keys").iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)


@pytest.mark.parametrize("kind", sorted(PLACES))
def test_a_write_that_fails_is_an_error_and_changes_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = PLACES[kind](tmp_path)
    document.swap(None, b"a")
    before = sorted(tmp_path.rglob("*"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=r"No space left on device\. Nothing was changed"):
            document.swap(document.version(), b"b")
    assert document.read().data == b"a"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_is_away_is_an_error_in_one_line(s3_store: None) -> None:
    document = VersionedDocument(UPath("s3://no-such-bucket/keys"))
    with pytest.raises(OutputError, match="s3://no-such-bucket/keys") as caught:
        document.swap(None, b"a")
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").mkdir()
    with pytest.raises(DataError, match=r"Cannot read .*keys\.yaml: Is a directory"):
        FileDocument(tmp_path / "keys.yaml").read()
