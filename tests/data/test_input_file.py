"""The names of the folders above a file are columns of its rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.data.input_file import InputFile, partitions_of

COLUMNS = st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=5))
VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=3)


@pytest.mark.parametrize(
    ("path", "columns"),
    [
        ("/d/lang=en/p.parquet", {"lang": "en"}),
        ("/d/year=2026/month=01/p.jsonl", {"year": "2026", "month": "01"}),
        ("/d/city=S%C3%A3o%20Paulo%2FBR/p.jsonl", {"city": "São Paulo/BR"}),
        ("/d/q=a=b/p.jsonl", {"q": "a=b"}),
        ("/d/lang=__HIVE_DEFAULT_PARTITION__/p.jsonl", {"lang": None}),
        ("/d/lang=/p.jsonl", {"lang": ""}),
        ("/d/=en/p.jsonl", {}),
        ("/run=5/d/p.jsonl", {}),
        ("/d/p=1.jsonl", {}),
        ("/d/bytes=\udcff/p.jsonl", {"bytes": "�"}),
    ],
)
def test_folders_named_key_and_value_directly_above_a_file_are_columns(path: str, columns: dict[str, Any]) -> None:
    assert partitions_of(Path(path)) == columns
    assert list(partitions_of(Path(path))) == list(columns)


def test_folders_of_a_store_are_columns_too() -> None:
    assert partitions_of(UPath("memory://b/d/lang=en/year=1/p.jsonl")) == {"lang": "en", "year": "1"}


@given(COLUMNS, st.dictionaries(st.text(max_size=3), VALUES), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_a_row_has_the_columns_of_its_file_and_its_own_win(
    tmp_path: Path, columns: dict[str, str | None], row: dict[str, Any], mark: bytes
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(mark + json.dumps(row).encode())
    [[raw]] = InputFile(path, columns).read(10)
    assert json.loads(raw.decode("utf-8-sig")) == columns | row


@given(st.binary(max_size=8) | st.sampled_from([b"{", b'{"a"', b"[1]", b"{,}", b"{} {}", b"{}}", b"null", b'"{"']))
def test_a_row_that_is_no_object_stays_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text)
    plain, merged = (
        [raw for chunk in InputFile(path, columns).read(10) for raw in chunk] for columns in ({}, {"lang": "en"})
    )
    assert [is_object(raw) for raw in merged] == [is_object(raw) for raw in plain]


def test_rows_of_parquet_have_the_columns_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x", "y"]}), tmp_path / "p.parquet")
    [[raw], [_]] = InputFile(tmp_path / "p.parquet", {"lang": None}).read(1)
    assert json.loads(raw) == {"lang": None, "prompt": "x"}


def is_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw.decode("utf-8-sig")), dict)
    except ValueError:
        return False
