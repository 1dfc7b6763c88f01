"""Many readers in front of one engine thread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from engine_samples import MakeEngine, request, run
from mars_ray.engine.async_engine import AsyncEngine
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.errors import QueueFullError, RequestError, SlowReaderError, StepError

FIXED = DecodeParams(threshold=0.9, block=8)


@asynccontextmanager
async def serving(make_engine: MakeEngine, **options: int) -> AsyncIterator[AsyncEngine]:
    buffered = options.pop("buffered_tokens", 2048)
    front = AsyncEngine(make_engine(**options), buffered_tokens=buffered)
    try:
        yield front
    finally:
        await front.close()


async def read(front: AsyncEngine, asked: Request) -> list[Chunk]:
    return [chunk async for chunk in front.generate(asked)]


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_many_readers_get_what_the_engine_alone_says(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    requests = [request(n, p, FIXED, max_tokens=24) for n, p in enumerate(prompts[::25])]
    expected = run(make_engine(), requests)

    async def test() -> None:
        async with serving(make_engine, rows=4) as front:
            streams = await asyncio.gather(*(read(front, each) for each in requests))
        for each, chunks in zip(requests, streams, strict=True):
            assert [token for chunk in chunks for token in chunk.tokens] == expected[each.id].tokens
            assert "".join(chunk.text for chunk in chunks) == expected[each.id].text
            assert [chunk.finished is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

    in_loop(test)


def test_a_stream_of_n_sequences_ends_with_the_last_of_them(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine) as front:
            chunks = await read(front, request("a", prompts[0], n=3, temperature=1.0, max_tokens=16))
        assert sorted(chunk.index for chunk in chunks if chunk.finished) == [0, 1, 2]

    in_loop(test)


def test_a_reader_that_leaves_cancels_its_request(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    async def test() -> None:
        async with serving(make_engine, rows=1) as front:
            async with aclosing(front.generate(request("a", prompts[0], max_tokens=1500, ignore_eos=True))) as stream:
                async for _ in stream:
                    break
            # The only row is free again long before 1500 tokens are made.
            chunks = await read(front, request("b", prompts[1], max_tokens=4))
            assert chunks[-1].finished
            assert await front.call(lambda engine: engine.running) == 0

    in_loop(test)


def test_a_task_cancelled_before_its_first_chunk_leaves_nothing_behind(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine) as front:
            task = asyncio.create_task(read(front, request("a", prompts[0], max_tokens=1500, ignore_eos=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while await front.call(lambda engine: engine.busy):
                await asyncio.sleep(0)

    in_loop(test)


def test_a_reader_that_stops_reading_is_cancelled_and_holds_no_one_up(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine, buffered_tokens=64) as front:
            slow = front.generate(request("slow", prompts[0], max_tokens=1500, ignore_eos=True))
            await anext(slow)
            assert (await read(front, request("quick", prompts[1], max_tokens=40)))[-1].finished
            while await front.call(lambda engine: engine.busy):
                await asyncio.sleep(0)
            with pytest.raises(SlowReaderError, match="more than 64 tokens behind"):
                async for _ in slow:
                    pass

    in_loop(test)


def test_refusals_reach_the_caller_and_nobody_else(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    async def test() -> None:
        async with serving(make_engine, queue=1) as front:
            stream = front.generate(request("a", prompts[0], max_tokens=400, ignore_eos=True))
            await anext(stream)
            with pytest.raises(RequestError, match="already here"):
                await read(front, request("a", prompts[1]))
            with pytest.raises(RequestError, match="empty"):
                await read(front, request("b", ()))
            with pytest.raises(QueueFullError):
                await asyncio.gather(*(read(front, request(f"c{n}", prompts[n], n=1)) for n in range(40)))
            assert [chunk async for chunk in stream][-1].finished

    in_loop(test)


def test_closing_ends_open_streams_and_refuses_new_ones(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        front = AsyncEngine(make_engine())
        stream = front.generate(request("a", prompts[0], max_tokens=1500, ignore_eos=True))
        await anext(stream)
        await front.close()
        with pytest.raises(StepError, match="closed before the request ended"):
            async for _ in stream:
                pass
        with pytest.raises(StepError, match="takes no more requests"):
            await read(front, request("b", prompts[0]))

    in_loop(test)


def test_a_step_that_fails_as_a_whole_ends_all_streams_and_the_next_request_is_served(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with serving(make_engine) as front:
            streams = [front.generate(request(n, prompts[n], max_tokens=1500, ignore_eos=True)) for n in range(2)]
            for stream in streams:
                await anext(stream)
            broken = await front.call(lambda engine: engine._blocks)
            await front.call(lambda engine: setattr(engine, "_blocks", None))
            for stream in streams:
                with pytest.raises(StepError, match="decoding failed"):
                    async for _ in stream:
                        pass
            await front.call(lambda engine: setattr(engine, "_blocks", broken))
            assert (await read(front, request("next", prompts[2], max_tokens=4)))[-1].finished

    in_loop(test)
