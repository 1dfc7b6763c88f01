"""Blocks are small where there are few rows, and few where there are many."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.run.placement import BLOCKS, ROWS_AT_ONCE, calls_per_decoder, rows_per_block


def test_rows_of_a_small_job_are_handed_on_one_by_one() -> None:
    assert [rows_per_block(total, 1) for total in (0, 1, 60, 1024)] == [1, 1, 1, 1]
    assert [rows_per_block(total, 2) for total in (6_000, 100_000, 1_000_000)] == [6, 64, 245]


@given(st.integers(0, 10**8), st.integers(1, 1000))
def test_blocks_are_few_and_a_decoder_never_lacks_rows(total: int, workers: int) -> None:
    rows = rows_per_block(total, workers)
    assert rows >= 1
    assert total / rows <= max(BLOCKS, 4 * workers)
    assert rows * calls_per_decoder(rows) >= ROWS_AT_ONCE
