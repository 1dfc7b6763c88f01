"""A row that kills the worker that parses it does not go round for ever."""

import asyncio
import os

import pyarrow as pa
import pytest
import ray

from mars_ray.batch.ray.decoder_pool import DecoderPool
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.row_tables import RowResult, from_row_table, from_table, to_row_table, to_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Fragile:
    """A decoder that dies of a row."""

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        pass

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        row_ids, raws = from_row_table(rows)
        if b"kills" in raws:
            os._exit(1)
        return to_table([RowResult(key=each.key, records=("answered",)) for each in row_ids])

    async def give_up(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        return to_table([RowResult(key=each.key, error="given up") for each in from_row_table(rows)[0]])


def test_a_row_that_kills_workers_is_given_up_and_no_other() -> None:
    async def test() -> list[RowResult]:
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Fragile)
        pool = DecoderPool([actor.remote(), actor.remote()])
        blocks = []
        for block in range(3):
            keys = [f"{block}{row}".encode() for row in range(4)]
            raws = [b"kills" if key == b"12" else b"good" for key in keys]
            blocks.append(to_row_table([RowId(key=key, id=str(key), repeated=False) for key in keys], raws))
        tables = await asyncio.gather(*(pool.answer(block, b"") for block in blocks))
        return [result for table in tables for result in from_table(table)]

    results = asyncio.run(asyncio.wait_for(test(), 120))
    assert [each.key for each in results if each.error == "given up"] == [b"12"]
    assert sum(each.records == ("answered",) for each in results) == len(results) - 1 == 11
