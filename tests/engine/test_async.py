"""Many readers in front of one engine: here it works in a thread at the other end of the socket, or in its process."""

import asyncio
import gc
import os
import signal
import socket
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.errors import (
    EngineHungError,
    ModelError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    SlowReaderError,
    StepError,
)
from mars_ray.model.resolve import resolve_model
from tests.engine.grammar_samples import regex
from tests.factories.engine import MakeEngine, engine_processes, engine_spec, request, run, serving, started_engine

FIXED = DecodeParams(threshold=0.9, block=8)


async def read(front: AsyncEngine, asked: Request) -> list[Chunk]:
    return [chunk async for chunk in front.generate(asked)]


async def until_idle(front: AsyncEngine) -> None:
    while (state := await front.state()).running or state.waiting:
        pass


def spec(**options: Any) -> EngineSpec:
    return engine_spec(resolve_model("bundled"), **options)


def test_many_readers_get_what_the_engine_alone_says(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    requests = [request(n, p, FIXED, max_tokens=24) for n, p in enumerate(prompts[::25])]
    expected = run(make_engine(), requests)

    async def test() -> None:
        async with serving(make_engine(max_num_seqs=4)) as front:
            streams = await asyncio.gather(*(read(front, each) for each in requests))
        for each, chunks in zip(requests, streams, strict=True):
            assert [token for chunk in chunks for token in chunk.tokens] == expected[each.id].tokens
            assert "".join(chunk.text for chunk in chunks) == expected[each.id].text
            assert [chunk.finished is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

    asyncio.run(test())


def test_a_stream_of_n_sequences_ends_with_the_last_of_them(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine()) as front:
            chunks = await read(front, request("a", prompts[0], n=3, temperature=1.0, max_tokens=16))
        assert sorted(chunk.index for chunk in chunks if chunk.finished) == [0, 1, 2]

    asyncio.run(test())


def test_a_reader_that_leaves_cancels_its_request(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    async def test() -> None:
        async with serving(make_engine(max_num_seqs=1)) as front:
            async with aclosing(front.generate(request("a", prompts[0], max_tokens=1500, ignore_eos=True))) as stream:
                async for _ in stream:
                    break
            # The only slot is free again long before 1500 tokens are made.
            chunks = await read(front, request("b", prompts[1], max_tokens=4))
            assert chunks[-1].finished
            assert (await front.state()).running == 0

    asyncio.run(test())


def test_a_task_cancelled_before_its_first_chunk_leaves_nothing_behind(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine()) as front:
            task = asyncio.create_task(read(front, request("a", prompts[0], max_tokens=1500, ignore_eos=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_idle(front)

    asyncio.run(test())


def test_a_reader_that_stops_reading_is_cancelled_and_holds_no_one_up(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine(), buffered_tokens=64) as front:
            slow = front.generate(request("slow", prompts[0], max_tokens=1500, ignore_eos=True))
            await anext(slow)
            assert (await read(front, request("quick", prompts[1], max_tokens=40)))[-1].finished
            await until_idle(front)
            with pytest.raises(SlowReaderError, match="more than 64 tokens behind"):
                async for _ in slow:
                    pass

    asyncio.run(test())


def test_a_reader_that_keeps_up_may_get_more_tokens_at_once_than_the_buffer_holds(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    text = regex("ab" * 400 + "[cd]{60}")  # the first steps answer all that is forced

    async def test() -> None:
        async with serving(make_engine(), buffered_tokens=64) as front:
            chunks = await read(front, request("forced", prompts[0], grammar=text, max_tokens=1200))
            assert max(len(chunk.tokens) for chunk in chunks) > 64
            assert chunks[-1].finished

    asyncio.run(test())


def test_refusals_reach_the_caller_and_nobody_else(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    async def test() -> None:
        async with serving(make_engine(max_waiting_seqs=1)) as front:
            stream = front.generate(request("a", prompts[0], max_tokens=400, ignore_eos=True))
            await anext(stream)
            with pytest.raises(RequestError, match="already here"):
                await read(front, request("a", prompts[1]))
            with pytest.raises(RequestError, match="empty"):
                await read(front, request("b", ()))
            with pytest.raises(QueueFullError):
                await asyncio.gather(*(read(front, request(f"c{n}", prompts[n], n=1)) for n in range(40)))
            assert [chunk async for chunk in stream][-1].finished

    asyncio.run(test())


def test_closing_ends_open_streams_and_refuses_new_ones(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    async def test() -> None:
        async with serving(make_engine()) as front:
            stream = front.generate(request("a", prompts[0], max_tokens=1500, ignore_eos=True))
            await anext(stream)
        with pytest.raises(ReplicaLostError, match="stopped before the request ended"):
            async for _ in stream:
                pass
        with pytest.raises(ReplicaLostError, match="takes no more requests"):
            await read(front, request("b", prompts[0]))

    asyncio.run(test())


def test_closing_while_the_engine_is_asked_for_its_state_leaves_no_task_behind() -> None:
    async def test() -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        ours, theirs = socket.socketpair()
        with theirs:  # an engine that never answers
            front = AsyncEngine()
            connection = front.attach(*await asyncio.open_connection(sock=ours))
            front._watching = asyncio.create_task(front.progress.until_stalled(connection.state))  # type: ignore[arg-type]
            while not connection._states:
                await asyncio.sleep(0)
            await front.close()
            await asyncio.sleep(0)
            del front
        gc.collect()  # asyncio reports a failed task that nobody has awaited when it is collected
        assert not failed

    asyncio.run(test())


def test_a_step_that_fails_as_a_whole_ends_all_streams_and_the_next_request_is_served(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    step, broken = engine.step, threading.Event()

    def breaking_step() -> list[Chunk]:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("no such thing")
        return step()

    monkeypatch.setattr(engine, "step", breaking_step)

    async def test() -> None:
        async with serving(engine) as front:
            streams = [front.generate(request(n, prompts[n], max_tokens=1500, ignore_eos=True)) for n in range(2)]
            for stream in streams:
                await anext(stream)
            broken.set()
            for stream in streams:
                with pytest.raises(StepError, match="decoding failed"):
                    async for _ in stream:
                        pass
            assert (await read(front, request("next", prompts[2], max_tokens=4)))[-1].finished

    asyncio.run(test())


def test_a_process_says_what_the_engine_in_this_process_says(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    requests = [request(n, p, FIXED, max_tokens=24) for n, p in enumerate(prompts[::60])]
    expected = run(make_engine(), requests)

    async def test() -> None:
        engine, facts = await AsyncEngine.start(spec(max_num_seqs=4))
        try:
            assert (facts.max_model_len, facts.block) == (2048, 16)
            streams = await asyncio.gather(*(read(engine, each) for each in requests))
            for each, chunks in zip(requests, streams, strict=True):
                assert "".join(chunk.text for chunk in chunks) == expected[each.id].text
            assert (await engine.state()).running == 0
        finally:
            await engine.close()

    asyncio.run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_hangs_ends_what_it_was_asked(
    prompts: list[tuple[int, ...]], how: signal.Signals
) -> None:
    async def test() -> None:
        async with started_engine(spec(), stall_seconds=1, step_seconds=1) as engine:
            stream = engine.generate(request("a", prompts[0], max_tokens=1500, ignore_eos=True))
            await anext(stream)
            assert engine.process is not None
            os.kill(engine.process.pid, how)
            with pytest.raises((ReplicaLostError, EngineHungError)):
                async for _ in stream:
                    pass
            with pytest.raises(ReplicaLostError):
                await engine.state()

    asyncio.run(test())


async def kill(engine: AsyncEngine) -> None:
    """Kill the process of an engine while it decodes, and wait until its requests have ended."""
    assert engine.process is not None
    stream = engine.generate(request("killed", (5, 6, 7), max_tokens=1500, ignore_eos=True))
    await anext(stream)
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(ReplicaLostError):
        async for _ in stream:
            pass


def test_a_killed_process_is_replaced_and_the_next_request_waits_for_the_new_one(
    prompts: list[tuple[int, ...]],
) -> None:
    async def test() -> None:
        async with started_engine(spec(), restarts=1) as engine:
            wanted = request("a", prompts[0], FIXED, max_tokens=8)
            before = await read(engine, wanted)
            await kill(engine)
            assert [chunk.tokens for chunk in await read(engine, wanted)] == [chunk.tokens for chunk in before]
            assert not engine.gone.is_set()

    asyncio.run(test())


def test_an_engine_whose_processes_end_too_often_is_gone() -> None:
    async def test() -> None:
        async with started_engine(spec(), restarts=1) as engine:
            await kill(engine)
            await kill(engine)
            assert engine.gone.is_set()
            with pytest.raises(ReplicaLostError):
                await read(engine, request("late", (5, 6, 7)))

    asyncio.run(test())


def test_an_engine_that_is_closed_while_it_starts_again_leaves_no_process_behind() -> None:
    async def test() -> None:
        before = set(engine_processes(os.getpid()))  # of endpoints that tests share
        engine, _ = await AsyncEngine.start(spec(), restarts=1)
        await kill(engine)
        waiting = asyncio.create_task(read(engine, request("late", (5, 6, 7))))
        while not (begun := set(engine_processes(os.getpid())) - before):
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(ReplicaLostError):
            await waiting
        _, alive = psutil.wait_procs(begun, timeout=30)
        assert not alive

    asyncio.run(test())


async def ends_of(engine: AsyncEngine, *requests: Request) -> list[type[BaseException]]:
    """Send requests to an engine that hangs, and return the errors they end with."""
    assert engine.process is not None
    while engine._connected._states or not engine.progress.checks:
        await engine.state()  # what is sent behind a question that is not answered does not arrive
    os.kill(engine.process.pid, signal.SIGSTOP)
    ends = await asyncio.gather(*(read(engine, each) for each in requests), return_exceptions=True)
    return [type(each) for each in ends]  # type: ignore[misc]


def test_a_request_whose_engine_hangs_with_it_alone_is_told_apart(prompts: list[tuple[int, ...]]) -> None:
    """Others may have been there by chance, and are to be sent to another engine."""

    async def test() -> None:
        for asked, expected in ((1, EngineHungError), (2, ReplicaLostError)):
            async with started_engine(spec(), stall_seconds=1, step_seconds=1) as engine:
                requests = [request(f"r{number}", prompts[number]) for number in range(asked)]
                assert await ends_of(engine, *requests) == [expected] * asked

    asyncio.run(test())


@pytest.mark.slow
def test_the_newest_request_is_the_suspect_and_not_one_that_had_chunks(prompts: list[tuple[int, ...]]) -> None:
    async def test() -> None:
        async with started_engine(spec(), stall_seconds=1, step_seconds=1) as engine:
            old = engine.generate(request("old", prompts[0], max_tokens=1500, ignore_eos=True))
            await anext(old)
            assert await ends_of(engine, request("new", prompts[1])) == [EngineHungError]
            with pytest.raises(ReplicaLostError):
                async for _ in old:
                    pass

    asyncio.run(test())


def test_a_start_that_is_cancelled_leaves_no_process_behind() -> None:
    async def test() -> None:
        before = set(engine_processes(os.getpid()))  # of endpoints that tests share
        starting = asyncio.create_task(AsyncEngine.start(spec()))
        while not (begun := set(engine_processes(os.getpid())) - before):
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        _, alive = psutil.wait_procs(begun, timeout=30)
        assert not alive
        gc.collect()  # what is unclosed warns when it is collected, and warnings are errors

    asyncio.run(test())


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ModelError, match="no config"):
            await AsyncEngine.start(EngineSpec(folder=tmp_path, dtype="float32", threads=1, options=EngineOptions()))

    asyncio.run(test())
