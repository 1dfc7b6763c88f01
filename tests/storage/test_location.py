"""Places by path and URL, in an S3 store that nobody here wrote."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from upath import UPath

from mars_ray.data.file_patterns import find_matches
from mars_ray.data.record_file import check_source, read_records
from mars_ray.errors import ConfigError, DataError, RunError
from mars_ray.storage import location, whole_file
from mars_ray.storage.location import check_reachable, locate, locate_url
from mars_ray.storage.whole_file import create_object, replace_file, write_file
from tests.store_server import free_port, store_server


def test_a_path_and_a_file_url_are_paths_of_this_machine(tmp_path: Path) -> None:
    assert locate(f"file://{tmp_path}/a") == locate(f"{tmp_path}/a") == tmp_path / "a"


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere://bucket/a cannot be used: Unsupported filesystem"):
        locate("nowhere://bucket/a")


def test_an_input_in_a_store_is_a_file_a_folder_or_a_pattern(bucket: UPath) -> None:
    for name in ("b.jsonl", "a.parquet", "notes.txt", "deep/d.jsonl.gz", "deep/_temporary/e.parquet"):
        (bucket / "data" / name).write_bytes(b"{}")
    for name, files in (
        ("data/b.jsonl", ["b.jsonl"]),
        ("data", ["a.parquet", "b.jsonl", "deep/d.jsonl.gz"]),
        ("data/**/*.gz", ["deep/d.jsonl.gz"]),
    ):
        assert [str(match.path) for match in find_matches(f"{bucket}{name}").files] == [
            f"{bucket}data/{file}" for file in files
        ]
    with pytest.raises(DataError, match=r"no file or folder .*none"):
        find_matches(f"{bucket}none")


def test_records_of_a_store_are_those_of_a_disk(bucket: UPath) -> None:
    lines = [b'{"prompt": "%d"}' % number for number in range(2000)]
    for name, content in (("a.jsonl", b"\n".join(lines)), ("a.jsonl.gz", gzip.compress(b"\n".join(lines)))):
        write_file(bucket / name, [content])
        check_source(bucket / name)
        assert [raw for chunk in read_records(bucket / name, 300) for raw in chunk] == lines


def test_half_a_download_in_a_store_is_found_before_any_work(bucket: UPath) -> None:
    (bucket / "half.jsonl.gz").write_bytes(gzip.compress(bytes(range(256)) * 1000)[:-300])
    with pytest.raises(DataError, match=r"half\.jsonl\.gz cannot be read"):
        check_source(bucket / "half.jsonl.gz")


def test_of_many_who_create_an_object_at_once_one_succeeds(bucket: UPath) -> None:
    place = bucket / "once"
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda number: create_object(place, b"%d" % number), range(8)))
    assert sorted(written) == [False] * 7 + [True]
    assert place.read_bytes() == b"%d" % written.index(True)


CONFLICT = (409, b"<Error><Code>ConditionalRequestConflict</Code><Message>Try again.</Message></Error>")
EXISTS = (412, b"<Error><Code>PreconditionFailed</Code><Message>It exists.</Message></Error>")
EXISTS_WITHOUT_BODY = (412, b"")
CREATED = (200, b"")


@contextmanager
def store_with(*responses: tuple[int, bytes]) -> Iterator[int]:
    """Run a store that gives these responses to writes, one after another, and yield its port."""
    left = iter(responses)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients may wait for a 100 before they send the body

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body = next(left)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("responses", "created"),
    [((EXISTS,), False), ((EXISTS_WITHOUT_BODY,), False), ((CONFLICT, CREATED), True), ((CONFLICT, EXISTS), False)],
    ids=["412", "412 without a body", "409 and 200", "409 and 412"],
)
def test_the_status_that_a_store_answers_says_whether_an_object_was_created(
    monkeypatch: pytest.MonkeyPatch, responses: tuple[tuple[int, bytes], ...], created: bool
) -> None:
    with store_with(*responses) as port:
        monkeypatch.setitem(location.S3_OPTIONS, "endpoint_url", f"http://127.0.0.1:{port}")
        assert create_object(locate_url("s3://bucket/a"), b"x") == created


def test_a_conflict_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "CONFLICT_PAUSE_S", 0.0)
    with store_with(*[CONFLICT] * whole_file.CONFLICTS) as port:
        monkeypatch.setitem(location.S3_OPTIONS, "endpoint_url", f"http://127.0.0.1:{port}")
        with pytest.raises(OSError, match="Try again"):
            create_object(locate_url("s3://bucket/a"), b"x")


def test_a_file_that_two_processes_replace_at_once_has_the_whole_content_of_the_later_one(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"the "
        replace_file(tmp_path / "file", [b"earlier"])
        yield b"later"

    replace_file(tmp_path / "file", parts())
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"the later")]


def test_what_cannot_be_written_is_an_error_with_the_place(bucket: UPath) -> None:
    with pytest.raises(RunError, match=r"Cannot write to s3://no-such-bucket/a: .*does not exist"):
        write_file(locate_url("s3://no-such-bucket/a/b"), [b"x"])


def test_a_store_that_is_out_of_reach_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "ANSWER_S", 0.5)
    monkeypatch.setitem(location.S3_OPTIONS, "endpoint_url", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"s3://bucket/a cannot be reached"):
        check_reachable(locate("s3://bucket/a"))


def test_a_store_that_is_asked_too_much_or_dies_slows_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setitem(location.S3_OPTIONS, "endpoint_url", f"http://127.0.0.1:{port}")
    options = ("--recording", str(tmp_path / "writes"), "--slow-down", "0.2")
    with store_server(port, *options):
        bucket = locate_url("s3://bucket/")
        bucket.fs.mkdir("bucket")
        assert all(create_object(bucket / str(number), b"%d" % number) for number in range(8))
    with store_server(port, *options):
        assert [(bucket / str(number)).read_bytes() for number in range(8)] == [b"%d" % n for n in range(8)]
        assert not create_object(bucket / "7", b"other")
