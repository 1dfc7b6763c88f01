"""Numbers of sequences that the engines of the benchmark cannot decode at once."""

import pytest

from benchmarks.neighbours import bench
from mars_ray.errors import ConfigError


@pytest.mark.parametrize("rows", [0, 17])
def test_rows_that_an_engine_never_decodes_at_once_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"rows is {rows}; it must be in 1..16"):
        bench("bundled", rows, seconds=1, rounds=1)
