"""A small trace in a file."""

import gzip
from pathlib import Path

import pytest

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.0,{40 + second},{20 + second}\n" for second in range(0, 40, 2)
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode()))
    return str(path)
