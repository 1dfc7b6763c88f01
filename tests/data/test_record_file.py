import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data import record_file
from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import parse_record
from mars_ray.errors import BadRecordError, DataError

ZSTD_SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00four"
"""A frame that a reader passes over (RFC 8878, section 3.1.2); pzstd writes such ones between the others."""
RECORDS = [{"prompt": f"count to {n}", "response": "one two three " * n} for n in range(1, 40)]


def lines(records: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def records_in(path: Path, chunk: int = 1000) -> list[Any]:
    return [json.loads(record) for records in read_records(path, chunk) for record in records]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


def test_jsonl_gz_zst_and_parquet_hold_the_same_records(tmp_path: Path) -> None:
    start, end = lines(RECORDS[:20]), lines(RECORDS[20:])
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet", row_group_size=7)
    for path in (
        tmp_path / "a.parquet",
        written(tmp_path / "a.jsonl", start + end),
        written(tmp_path / "a.jsonl.gz", gzip.compress(start) + gzip.compress(end)),
        written(tmp_path / "a.json.zst", zstd(start) + ZSTD_SKIPPED + zstd(end)),
    ):
        check_source(path)
        assert records_in(path) == RECORDS


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just("ą\u2028\u2029\x85\x0b\x0c\x1c\r")))
def test_only_a_line_feed_ends_a_record(texts: list[str], tmp_path: Path) -> None:
    records = [{"prompt": text, "response": "b"} for text in texts]
    assert records_in(written(tmp_path / "a.jsonl", lines(records))) == records


@pytest.mark.parametrize(
    "content",
    [b'{"a": 1}\r\n{"a": 2}\r\n', b'\n {"a": 1}\n\n\t\n{"a": 2}', b'{"a": 1}\r \n{"a":\r 2}\n\n'],
    ids=["CRLF", "blank lines", "carriage returns"],
)
def test_blank_lines_and_carriage_returns_are_no_records(content: bytes, tmp_path: Path) -> None:
    assert records_in(written(tmp_path / "a.jsonl", content)) == [{"a": 1}, {"a": 2}]


def test_a_line_that_is_not_utf8_comes_out_and_fails_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", lines(RECORDS[:1]) + b'{"prompt": "\xe9"}\n' + lines(RECORDS[1:2]))
    check_source(path)
    (first, second, third), *_ = read_records(path, 10)
    assert parse_record(first).messages[0]["content"] == "count to 1"
    with pytest.raises(BadRecordError):
        parse_record(second)
    assert parse_record(third).messages[0]["content"] == "count to 2"


def test_records_come_in_chunks_of_the_size_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", lines(RECORDS))
    assert [len(chunk) for chunk in read_records(path, 16)] == [16, 16, 7]


def test_nested_messages_of_parquet_parse_as_those_of_jsonl(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "id": "c"}]
    pq.write_table(pa.table({"messages": [messages], "when": [None], "n": [1.5]}), tmp_path / "a.parquet")
    ((raw,),) = read_records(tmp_path / "a.parquet", 10)
    assert parse_record(raw) == parse_record(b'{"prompt": "a", "response": "b"}')


def test_text_that_parquet_keeps_as_bytes_is_text_when_it_is_utf8(tmp_path: Path) -> None:
    columns = {"prompt": pa.array(["é".encode(), b"\xff"], pa.binary()), "response": ["a", "b"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    ((good, bad),) = read_records(tmp_path / "a.parquet", 10)
    assert parse_record(good).messages[0]["content"] == "é"
    with pytest.raises(BadRecordError, match="prompt holds"):
        parse_record(bad)


def test_a_column_that_no_record_needs_may_hold_anything(tmp_path: Path) -> None:
    day = pa.array([0], pa.timestamp("us"))
    table = pa.table({"prompt": ["a"], "response": ["b"], "day": day, "map": pa.array([[("k", b"v")]], MAP)})
    pq.write_table(table, tmp_path / "a.parquet")
    ((raw,),) = read_records(tmp_path / "a.parquet", 10)
    assert json.loads(raw)["day"] == "1970-01-01 00:00:00"


MAP = pa.map_(pa.string(), pa.binary())


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    text = [os.urandom(300).hex() for _ in range(100)]
    pq.write_table(pa.table({"prompt": text, "response": text}), sink, compression="zstd")
    return bytes(sink.getvalue())


MEGABYTES = gzip.compress(lines(RECORDS * 300))
DAMAGED = {
    "half.jsonl.gz": MEGABYTES[:-40],
    "no_trailer.jsonl.gz": MEGABYTES[:-8],
    "sum.jsonl.gz": MEGABYTES[:-8] + bytes(8),
    "middle.jsonl.gz": MEGABYTES[:10] + b"\xff" * 99 + MEGABYTES[109:],
    "plain.jsonl.gz": lines(RECORDS),
    "half.jsonl.zst": zstd(lines(RECORDS * 300))[:-40],
    "no_end.jsonl.zst": zstd(lines(RECORDS)) + zstd(lines(RECORDS))[:-1],
    "plain.jsonl.zst": lines(RECORDS),
    "text.parquet": lines(RECORDS),
    "empty.parquet": b"",
    "half.parquet": parquet_bytes()[:-40],
    "header.parquet": b"PAR1" + bytes(36) + parquet_bytes()[40:],
    "page.parquet": parquet_bytes()[:20000] + bytes(2000) + parquet_bytes()[22000:],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_found_before_any_work_and_named_in_one_line(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, DAMAGED[name])
    for read in (lambda: check_source(path), lambda: list(read_records(path, 8))):
        with pytest.raises(DataError, match=r"^/.*cannot be read: .+") as caught:
            read()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_path_that_is_no_file_of_records_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", b"a,b")
    (tmp_path / "folder.jsonl").mkdir()
    for name, reason in {
        "none.jsonl": "no file",
        "a.csv": "neither JSONL nor parquet",
        "folder.jsonl": "is a folder",
    }.items():
        with pytest.raises(DataError, match=reason):
            check_source(tmp_path / name)


def test_one_endless_line_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "RECORD_BYTES_MAX", 100)
    path = written(tmp_path / "a.jsonl", b'{"a": 1}\n[' + b"1," * 100)
    with pytest.raises(DataError, match="not have one record per line"):
        list(read_records(path, 8))
