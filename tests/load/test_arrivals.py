"""Arrivals are seeded, a trace is read as it was recorded, and a bad one is named."""

import gzip
import math
import random
from datetime import datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.errors import ConfigError, DataError, EmptyDataError
from mars_ray.load.arrivals import Poisson, TraceRow, parse_trace, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
FIRST = "2023-11-16 18:17:03.9799600"


def written(folder: Path, rows: str, header: str = HEADER) -> Path:
    path = folder / "trace.csv.gz"
    path.write_bytes(gzip.compress((header + rows).encode()))
    return path


@given(rate=st.floats(0.01, 1000), seed=st.integers(0, 2**32))
def test_poisson_arrivals_are_those_of_their_seed_and_go_forward(rate: float, seed: int) -> None:
    arrivals = list(islice(Poisson(rate).arrivals_s(random.Random(seed)), 50))
    assert arrivals == list(islice(Poisson(rate).arrivals_s(random.Random(seed)), 50))
    assert arrivals != list(islice(Poisson(rate).arrivals_s(random.Random(seed + 1)), 50))
    assert all(before < after for before, after in pairwise([0.0, *arrivals]))


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential(seed: int) -> None:
    arrivals = list(islice(Poisson(4.0).arrivals_s(random.Random(seed)), 10_000))
    gaps = [after - before for before, after in pairwise([0.0, *arrivals])]
    # The mean of n exponential gaps has a standard error of 1 / (rate * sqrt(n)); five of them are one in two million.
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, abs=5 / (4 * math.sqrt(len(gaps))))
    assert sum(gap > math.log(2) / 4 for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=5 * 0.5 / 100)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 20_000), st.integers(0, 2000)), min_size=1, max_size=20
    )
)
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, rows: list[tuple[int, int, int]]) -> None:
    began, rows = datetime(2023, 11, 16, 23, 59), sorted(rows)
    lines = [f"{began + timedelta(microseconds=at)!s},{context},{tokens}" for at, context, tokens in rows]
    assert read_trace(written(tmp_path, "\r\n".join(lines))) == [
        TraceRow(cast(Any, pytest.approx((at - rows[0][0]) / 1e6)), context, tokens) for at, context, tokens in rows
    ]


def test_a_trace_in_a_store_is_that_of_a_disk(tmp_path: Path, bucket: UPath) -> None:
    here = written(tmp_path, f"{FIRST},4808,10\r\n")
    (bucket / "trace.csv.gz").write_bytes(here.read_bytes())
    there = parse_trace(f"{bucket}trace.csv.gz")
    assert isinstance(there, UPath)
    assert read_trace(there) == read_trace(here) == [TraceRow(0.0, 4808, 10)]


def test_timestamps_of_seven_digits_and_blank_lines_are_read(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, f"{FIRST},4808,10\r\n\r\n2023-11-16 18:17:04.0319600,3180,8\r\n"))
    assert rows == [TraceRow(0.0, 4808, 10), TraceRow(cast(Any, pytest.approx(0.052)), 3180, 8)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (f"{FIRST},4808", "line 2, has 2 fields"),
        (f"{FIRST},4808,10\n{FIRST},x,10", "line 3: 'x' is not a token count"),
        (f"{FIRST},-4,10", "line 2: '-4' is not a token count"),
        (f"{FIRST},4.5,10", "'4.5'"),
        (f"{FIRST},٣,10", "'٣'"),
        (f"{FIRST},4,99999999999", "'99999999999'"),
        ("yesterday,4,10", "line 2: 'yesterday' is not a time"),
        (f"{FIRST},4,10\n2023-11-16 18:17:02,4,10", "line 3, goes back in time to '2023-11-16 18:17:02'"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_value(tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(DataError, match=r"trace\.csv\.gz, ") as raised:
        read_trace(written(tmp_path, rows))
    assert said in str(raised.value)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no file .*none.csv.gz"):
        read_trace(tmp_path / "none.csv.gz")
    with pytest.raises(DataError, match=r"line 1, is 'a,b'; it must be TIMESTAMP,ContextTokens,GeneratedTokens"):
        read_trace(written(tmp_path, "", header="a,b\n"))
    with pytest.raises(EmptyDataError, match="has no requests"):
        read_trace(written(tmp_path, ""))
    with pytest.raises(DataError, match="line 1, is ''"):
        read_trace(written(tmp_path, "", header=""))


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"no gzip", lambda raw: gzip.compress(b"\xff\xfe")]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object) -> None:
    path = written(tmp_path, f"{FIRST},4,10\r\n" * 100)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"trace\.csv\.gz cannot be read"):
        read_trace(path)


def test_a_rate_is_told_from_a_file() -> None:
    assert parse_trace("poisson:2.5") == Poisson(2.5)
    assert parse_trace("some/trace.csv.gz") == Path("some/trace.csv.gz")


@pytest.mark.parametrize(
    "text",
    ["poisson", "poisson:", "poisson:x", "poisson:0", "poisson:-1", "poisson:inf", "poisson:nan", "trace.csv", ""],
)
def test_what_is_neither_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=f"trace is '{text}'"):
        parse_trace(text)
