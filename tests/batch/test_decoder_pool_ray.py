"""Blocks on their way to decoders: no answer waits for the input, and a row that kills workers is given up."""

import asyncio
import os
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
import ray

from mars_ray.batch.ray.decoder_pool import DecoderPool, answered_blocks
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.row_tables import RowResult, from_row_table, from_table, to_row_table, to_table
from mars_ray.errors import RunError

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


def block(key: bytes) -> pa.Table:
    return to_row_table([RowId(key=key, id=str(key), repeated=False)], [b"good"])


def test_an_answer_does_not_wait_for_a_block_that_is_slow_to_read() -> None:
    answered = threading.Event()

    def blocks() -> Iterator[pa.Table]:
        yield block(b"first")
        assert answered.wait(60)
        yield block(b"second")

    actor = ray.remote(num_cpus=0, max_restarts=-1)(Fragile)
    answers = answered_blocks(blocks(), [actor.remote()], b"", at_once=4)
    assert from_table(next(answers))[0].key == b"first"
    answered.set()
    assert [from_table(table)[0].key for table in answers] == [b"second"]


def test_an_error_of_the_input_ends_the_answers() -> None:
    def blocks() -> Iterator[pa.Table]:
        yield block(b"first")
        raise RunError("the input is damaged")

    actor = ray.remote(num_cpus=0, max_restarts=-1)(Fragile)
    with pytest.raises(RunError, match="the input is damaged"):
        list(answered_blocks(blocks(), [actor.remote()], b"", at_once=4))


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
