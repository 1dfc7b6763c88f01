"""A block whose worker dies is tried again, then row by row; a row that kills a worker alone is given up."""

import asyncio

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.run.isolation import DEATHS, WorkerDiedError, answer_block
from mars_ray.batch.run.worker import InterruptAfter

ROWS = st.lists(st.sampled_from(["good", "kills"]), min_size=1, max_size=9)


def became(kinds: list[str], chance_deaths: int = 0) -> tuple[list[str], list[tuple[int, bool]]]:
    """What became of each row, and the blocks that were sent: rows of each, and whether alone."""
    sent: list[tuple[int, bool]] = []
    left = chance_deaths

    async def send(rows: pa.Table, alone: bool) -> pa.Table:
        nonlocal left
        sent.append((rows.num_rows, alone))
        left -= 1
        if left >= 0 or "kills" in rows["kind"].to_pylist():
            raise WorkerDiedError
        return rows.append_column("end", [["answered"] * rows.num_rows])

    async def give_up(rows: pa.Table) -> pa.Table:
        return rows.append_column("end", [["given up"] * rows.num_rows])

    tables = asyncio.run(answer_block(pa.table({"kind": kinds}), send, give_up))
    answered = pa.concat_tables(tables)
    assert answered["kind"].to_pylist() == kinds
    return answered["end"].to_pylist(), sent


@given(kinds=ROWS)
def test_rows_that_kill_workers_are_given_up_and_the_others_answered(kinds: list[str]) -> None:
    ends, sent = became(kinds)
    assert ends == ["given up" if kind == "kills" else "answered" for kind in kinds]
    assert sum(rows > 1 or not alone for rows, alone in sent) < DEATHS


@given(kinds=ROWS.map(lambda kinds: ["good"] * len(kinds)), deaths=st.integers(0, DEATHS - 1))
def test_a_block_whose_workers_died_of_something_else_is_answered(kinds: list[str], deaths: int) -> None:
    ends, sent = became(kinds, deaths)
    assert ends == ["answered"] * len(kinds)
    assert len(sent) <= DEATHS - 1 + len(kinds)


def forever() -> None:
    while True:
        pass


def test_a_function_that_never_ends_is_interrupted_and_the_next_runs() -> None:
    async def test() -> None:
        limit = InterruptAfter(0.05)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await limit.run(forever)
            assert await limit.run(lambda: "next") == "next"

    asyncio.run(test())


def test_an_error_of_a_function_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(InterruptAfter(60).run(lambda: 1 // 0))
