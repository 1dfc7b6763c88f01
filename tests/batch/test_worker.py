"""Rows through a real engine process, which is killed for some of them."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from mars_ray.batch.rows.row_format import JsonRecord, ParsedRow
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.row_tables import RowResult, from_table, to_table
from mars_ray.batch.run import worker as worker_module
from mars_ray.batch.run.worker import Worker
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError, ModelError, ReplicaLostError, RunError
from tests.factories.engine import engine_spec

POISON = ord("!")
STALL_SECONDS = 4.0


class Letters:
    """Rows that are text, each character a token; they name the tokens they got."""

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        if raw == b"bad":
            raise BadRecordError("it is bad")
        while raw == b"endless":
            pass
        sampling, decode = SamplingParams(max_tokens=8, ignore_eos=True), DecodeParams(threshold=0.5, block=4)
        request = Request(id="any", prompt=tuple(raw), sampling=sampling, decode=decode)
        return ParsedRow(id=id, request=request, prompt_text=raw.decode(), columns={})

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        return [{"id": row.id, "tokens": list(each.tokens)} for each in answers]

    def error_record(self, row_id: RowId, raw: bytes, error: Exception) -> JsonRecord:
        return {"id": row_id.id, "reason": str(error)}


class Mortal(AsyncEngine):
    """An engine whose process is killed by a poisoned row, as by a fault of a kernel; `deaths` counts."""

    deaths = 0
    """Engines that died since the test began."""

    async def generate(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request, stream=stream)) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            if POISON in request.prompt:
                await self.state()  # the request is in the engine now
                assert self.process is not None
                self.process.kill()
                Mortal.deaths += 1
            yield await first
            async for chunk in chunks:
                yield chunk


class Stopping(AsyncEngine):
    """An engine whose process stands still when a poisoned row is in it; `stops` counts, up to `limit` of them."""

    stops = limit = 0

    async def generate(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request, stream=stream)) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            if POISON in request.prompt and Stopping.stops < Stopping.limit:
                Stopping.stops += 1
                await self.state()  # the request is in the engine now
                assert self.process is not None
                os.kill(self.process.pid, signal.SIGSTOP)
            yield await first
            async for chunk in chunks:
                yield chunk


def answered(
    folder: Path, raws: list[bytes], repeated: Sequence[int] = (), engine: type[AsyncEngine] = Mortal
) -> list[RowResult]:
    async def run() -> list[RowResult]:
        Mortal.deaths = Stopping.stops = 0
        spec = engine_spec(folder, max_num_seqs=4)

        async def start() -> AsyncEngine:
            return (await engine.start(spec, stall_seconds=STALL_SECONDS, step_seconds=STALL_SECONDS))[0]

        feeding = asyncio.Event()
        feeding.set()
        worker = Worker("one", start, feeding)
        await worker.start()
        row_ids = [
            RowId(key=number.to_bytes(16, "big"), id=f"row-{number}", repeated=number in repeated)
            for number in range(len(raws))
        ]
        half = len(raws) // 2
        parts = (slice(0, half), slice(half, None))  # two batches at a time
        found = await asyncio.gather(*(worker.answer(Letters(), row_ids[part], raws[part]) for part in parts))
        await worker.close()
        return [*found[0], *found[1]]

    return from_table(to_table(asyncio.run(run())))


def test_every_row_is_answered_in_its_place(model_folder: Path) -> None:
    raws = [f"row {number}".encode() for number in range(40)]
    found = answered(model_folder, raws)
    assert [each.key for each in found] == [number.to_bytes(16, "big") for number in range(40)]
    assert all(len(each.records) == 1 and each.error is None and each.tokens == (8,) for each in found)
    [alone] = answered(model_folder, raws[:1])
    assert alone.records == found[0].records


def test_a_row_that_kills_the_engine_is_given_up_and_its_neighbours_are_not(model_folder: Path) -> None:
    raws = [f"row {number}{'!' if number == 7 else ''}".encode() for number in range(30)]
    found = answered(model_folder, raws)
    failed = [number for number, each in enumerate(found) if each.error is not None]
    assert failed == [7]
    assert "the engine died 3 times with this row" in str(found[7].error)
    assert Mortal.deaths == 3
    assert all(each.tokens == (8,) for number, each in enumerate(found) if number != 7)


@pytest.mark.parametrize("poisoned", [pytest.param((7,), marks=pytest.mark.slow), (0, 1, 2, 3)])
def test_rows_of_an_engine_that_stalls_are_answered_once_by_the_next_one(
    model_folder: Path, poisoned: tuple[int, ...]
) -> None:
    Stopping.limit = 1
    raws = [f"row {number}{'!' if number in poisoned else ''}".encode() for number in range(12)]
    found = answered(model_folder, raws, engine=Stopping)
    assert Stopping.stops == 1
    assert [each.key for each in found] == [number.to_bytes(16, "big") for number in range(12)]
    assert all(each.tokens == (8,) and len(each.records) == 1 for each in found)


@pytest.mark.slow
def test_a_row_that_stalls_every_engine_is_given_up_after_the_second_one(model_folder: Path) -> None:
    Stopping.limit = 9
    found = answered(model_folder, [f"row {number}{'!' if number == 7 else ''}".encode() for number in range(12)],
                     engine=Stopping)  # fmt: skip
    assert [number for number, each in enumerate(found) if each.error is not None] == [7]
    assert "the engine" in str(found[7].error)


def test_a_row_that_cannot_be_read_and_an_id_that_came_before_are_refused(model_folder: Path) -> None:
    found = answered(model_folder, [b"good", b"bad", b"again"], repeated=[2])
    assert found[0].error is None
    assert found[1].error == '{"id": "row-1", "reason": "it is bad"}'
    assert "an earlier row has the same id 'row-2'" in str(found[2].error)
    assert found[2].reason == "an earlier row has the same id 'row-2'; give each row its own"


def test_a_row_whose_template_never_ends_is_given_up_and_the_others_are_answered(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PARSE_SECONDS", 0.5)
    found = answered(model_folder, [b"good", b"endless", b"fine"])
    assert [each.error is None for each in found] == [True, False, True]
    assert "the chat template did not render it" in str(found[1].error)


def test_without_any_engine_the_work_stops_and_says_why(model_folder: Path) -> None:
    async def run() -> None:
        starts = 0

        async def start() -> AsyncEngine:
            nonlocal starts
            starts += 1
            if starts > 1:
                raise ModelError("the folder is gone")
            spec = engine_spec(model_folder)
            return (await Mortal.start(spec))[0]

        feeding = asyncio.Event()
        feeding.set()
        worker = Worker("one", start, feeding)
        await worker.start()
        try:
            await worker.answer(Letters(), [RowId(key=b"k", id="a", repeated=False)], [b"!"])
        except RunError as error:
            assert str(error) == "no engine can be started: the folder is gone"
        else:
            raise AssertionError

    asyncio.run(run())


def test_an_engine_that_dies_while_it_starts_is_started_again(model_folder: Path) -> None:
    async def run() -> None:
        starts = 0

        async def start() -> AsyncEngine:
            nonlocal starts
            starts += 1
            if starts < 3:
                raise ReplicaLostError("the engine died while it started.")
            spec = engine_spec(model_folder)
            return (await Mortal.start(spec))[0]

        feeding = asyncio.Event()
        feeding.set()
        worker = Worker("one", start, feeding)
        await worker.start()
        assert [
            each.tokens for each in await worker.answer(Letters(), [RowId(key=b"k", id="a", repeated=False)], [b"x"])
        ] == [(8,)]
        await worker.close()

    asyncio.run(run())


def test_no_row_begins_while_the_worker_is_not_to_feed(model_folder: Path) -> None:
    async def run() -> None:
        spec = engine_spec(model_folder)
        engine, _ = await AsyncEngine.start(spec)

        async def start() -> AsyncEngine:
            return engine

        feeding = asyncio.Event()
        feeding.set()
        worker = Worker("one", start, feeding)
        await worker.start()
        feeding.clear()
        answers = asyncio.create_task(worker.answer(Letters(), [RowId(key=b"k", id="a", repeated=False)], [b"x"]))
        for _ in range(3):
            state = await engine.state()
        assert state.classes[0].arrived == 0
        feeding.set()
        assert [each.tokens for each in await answers] == [(8,)]
        await worker.close()

    asyncio.run(run())
