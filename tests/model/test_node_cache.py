"""Models that come from elsewhere: fetched once by a machine, whole, and within bounds."""

import multiprocessing
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from upath import UPath

from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import resolve_model, short_name
from mars_ray.model.sources import node_cache
from mars_ray.model.sources.node_cache import RemoteFile, fetched, file_digest

BUNDLED = resolve_model("bundled")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mars-ray" / "fetched"


class Elsewhere:
    """Files of which every piece that is read is counted, until the connection breaks."""

    def __init__(self, content: dict[str, bytes], reads: int = 1000) -> None:
        self.content, self.reads, self.seen = content, reads, Counter[tuple[str, int]]()

    def files(self) -> list[RemoteFile]:
        return [RemoteFile(name=n, size=len(c), digest=f"version:{c!r}") for n, c in self.content.items()]

    def read(self, name: str, start: int, end: int) -> bytes:
        if self.seen.total() == self.reads:
            raise ConnectionError
        self.seen[name, start] += 1
        return self.content[name][start:end]


def test_a_model_is_fetched_once_and_a_new_one_of_the_same_name_again() -> None:
    first, second = Elsewhere({"a": b"1" * 10, "b": b""}), Elsewhere({"a": b"2" * 10, "b": b""})
    folders = [fetched("m", each.files(), each.read) for each in (first, first, second)]
    assert [(folder.name, (folder / "a").read_bytes()) for folder in folders] == [
        ("m", b"1" * 10),
        ("m", b"1" * 10),
        ("m", b"2" * 10),
    ]
    assert first.seen.total() == second.seen.total() == 1


def test_a_fetch_that_broke_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "PIECE_BYTES", 2)
    there = Elsewhere({"a": b"abcd", "b": b"efghij"}, reads=3)
    with pytest.raises(ConnectionError):
        fetched("m", there.files(), there.read)
    there.reads = 1000
    folder = fetched("m", there.files(), there.read)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == there.content
    assert set(there.seen.values()) == {1}


def test_a_piece_that_does_not_come_in_time_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "PIECE_S", 0.1)
    came = threading.Event()
    with pytest.raises(ModelError, match=r"a of m cannot be fetched: 4 bytes took over 0\.1 s"):
        fetched("m", [RemoteFile(name="a", size=4, digest="version:1")], lambda *_: b"good" if came.wait() else b"")
    came.set()


def test_a_file_that_is_not_what_was_said_is_refused_and_not_kept(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").write_bytes(b"good")
    file = RemoteFile(name="a", size=4, digest=file_digest(tmp_path / "a"))
    with pytest.raises(ModelError, match="a of m arrived with another size or digest"):
        fetched("m", [file], lambda *_: b"evil")
    assert not list(cache.glob("*/m/a"))
    assert (fetched("m", [file], lambda *_: b"good") / "a").read_bytes() == b"good"


def _fetch_one(number: int) -> None:
    there = Elsewhere({"a": b"%d" % number})
    fetched("m", there.files(), there.read)


def test_the_one_longest_unused_makes_room_and_one_in_use_never(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Elsewhere({"a": b"0"})
    mine = fetched("m", own.files(), own.read)
    for number in (1, 2):  # in processes that end
        process = multiprocessing.get_context("spawn").Process(target=_fetch_one, args=[number])
        process.start()
        process.join()
    usage = shutil.disk_usage(cache)._replace(free=3)  # so that three bytes may be taken
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    new = Elsewhere({"a": b"3"})
    fetched("m", new.files(), new.read)
    assert mine.exists()
    assert sorted(path.read_bytes() for path in cache.glob("*/m/a")) == [b"0", b"2", b"3"]
    with pytest.raises(ModelError, match="does not fit"):
        fetched("m", [RemoteFile(name="a", size=100, digest="")], new.read)


def test_a_model_whose_removal_broke_off_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_fetch_one, args=[1])
    process.start()
    process.join()
    usage = shutil.disk_usage(cache)._replace(free=3)  # so that two bytes may be taken

    def break_off(folder: Path, **_: object) -> None:
        for path in folder.rglob("a"):
            path.unlink()
            raise InterruptedError

    old, new = Elsewhere({"a": b"1"}), Elsewhere({"a": b"22"})
    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        patched.setattr(shutil, "rmtree", break_off)
        fetched("m", new.files(), new.read)
    assert (fetched("m", old.files(), old.read) / "a").read_bytes() == b"1"


def test_a_model_in_a_store_is_the_one_that_was_put_there(bucket: UPath) -> None:
    for path in BUNDLED.iterdir():
        (bucket / "models" / "one" / path.name).write_bytes(path.read_bytes())
    (bucket / "models" / "one" / "pytorch_model.bin").write_bytes(b"pickle")
    url = f"{bucket}models/one"
    folder = resolve_model(url)
    assert folder_digest(folder) == folder_digest(BUNDLED)
    assert (folder.name, short_name(url)) == ("one", "one")
    assert not (folder / "pytorch_model.bin").exists()
    assert resolve_model(url + "/") == folder


def test_no_model_in_a_store_is_an_error_in_one_line(bucket: UPath) -> None:
    with pytest.raises(ModelError, match="none holds no model"):
        resolve_model(f"{bucket}none")
    with pytest.raises(ConfigError, match="nothing://a/b cannot be used"):
        resolve_model("nothing://a/b")
