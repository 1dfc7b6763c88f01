"""Clients that leave, do not read, or lose their engine: others are served, and nothing is left behind."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar, cast

import openai
import pytest
from openai import OpenAI
from starlette.requests import ClientDisconnect
from starlette.types import Message

from mars_ray.errors import UnavailableError
from mars_ray.serve.http import streams as sse
from mars_ray.serve.http.streams import EventStreamResponse, MergedCalls, gather_or_cancel, run_unless_disconnected
from tests.serve.endpoint_clients import MODEL, PATIENCE_S, check_error, http, read_until, sent, settled, until_running
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served, config_of, served

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "threshold": 1}
T = TypeVar("T")

WIDE = LONG | {"stream": True, "stream_options": {"single_tokens": True}, "logprobs": 20}


def answer(endpoint: Served) -> str | None:
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    return reply.choices[0].message.content


def test_a_client_that_leaves_in_mid_stream_frees_its_sequences(endpoint: Served) -> None:
    with sent(endpoint, LONG | {"stream": True, "n": 2}) as raw:
        read_until(raw, b"data: ")
        assert endpoint.in_flight() == (2, 0, 1)
    settled(endpoint)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(endpoint: Served, stream: bool) -> None:
    for _ in range(5):
        sent(endpoint, LONG | {"stream": stream}).close()
    settled(endpoint)


def test_a_client_that_leaves_a_whole_answer_frees_its_sequences(endpoint: Served) -> None:
    with sent(endpoint, LONG | {"prompt": ["Hello", "World"]}):
        until_running(endpoint, 2)
    settled(endpoint)


def test_two_hundred_clients_that_leave_leak_nothing(endpoint: Served) -> None:
    for wave in range(4):  # of as many as one caller may have in flight
        raws = [sent(endpoint, LONG | {"stream": number % 3 > 0}) for number in range(50)]
        for raw in raws[:: wave + 1]:
            raw.close()
        until_running(endpoint, min(32, 50 - len(raws[:: wave + 1])))
        for raw in raws:
            raw.close()
        settled(endpoint)
    assert answer(endpoint) == ANSWER


def test_a_reader_that_never_reads_holds_nobody_up(endpoint: Served) -> None:
    with sent(endpoint, WIDE, receive_bytes=2048):
        until_running(endpoint, 1)
        with ThreadPoolExecutor(4) as others:
            assert set(others.map(answer, [endpoint] * 8)) == {ANSWER}
        assert endpoint.in_flight()[2] == 1, "it is still there"
    settled(endpoint)


# An engine that dies.


@pytest.fixture
def mortal() -> Iterator[Served]:
    with served(config_of(migration_limit=0)) as running:
        yield running


def test_an_engine_that_is_killed_ends_every_answer_with_an_error(mortal: Served) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    process = mortal.engine.process
    assert process
    with (
        OpenAI(base_url=f"{mortal.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(3) as pool,
        http(mortal) as plain,
    ):
        whole = [pool.submit(cast(Any, client.completions.create), **fields) for _ in range(3)]
        streams = [client.completions.create(**fields, stream=True) for _ in range(2)]
        assert all(next(iter(stream)).choices for stream in streams), "they have begun"
        until_running(mortal, 5)
        os.kill(process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match="engine stopped") as broken:
                list(stream)
            assert broken.value.code == "replica_lost"
        for each in whole:
            with pytest.raises(openai.InternalServerError) as lost:
                each.result(60)
            assert (lost.value.status_code, lost.value.code) == (503, "replica_lost")
            assert int(lost.value.response.headers["retry-after"]) >= 1
        assert plain.get("/readyz").status_code == 503
        for path in ("/health", "/ping"):
            check_error(plain.get(path), 503, code="unavailable")
        assert plain.get("/healthz").status_code == 200, "the process itself is well"
        check_error(plain.post("/v1/completions", json={"model": MODEL, "prompt": "a"}), 503, code="replica_lost")
        until_s = time.monotonic() + PATIENCE_S
        while mortal.gateway.admission.in_flight:
            assert time.monotonic() < until_s, "places are given back"


# The parts.


def in_loop(test: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await test

    return asyncio.run(bounded())


class Closing:
    """A generator that counts, and tells when it is closed."""

    def __init__(self, count: int = 10**9, error: Exception | None = None) -> None:
        self.count, self.error, self.closed, self.yielded = count, error, False, 0

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.yielded += 1
                yield number
            if self.error:
                raise self.error
        finally:
            self.closed = True

    async def give(self, take: Callable[[int], Awaitable[None]]) -> None:
        async with aclosing(self.items()) as items:
            async for item in items:
                await take(item)


def test_merged_streams_keep_each_its_order_and_are_read_no_faster_than_taken() -> None:
    async def test() -> None:
        endless = [Closing(), Closing()]
        arriving = MergedCalls([each.give for each in endless], len(endless))
        seen: dict[int, list[int]] = {0: [], 1: []}
        for taken in range(1, 40):
            number, item = await arriving.next() or pytest.fail("it is endless")
            seen[number].append(item)
            for _ in range(5):  # a slow reader
                await asyncio.sleep(0)
            assert sum(each.yielded for each in endless) <= taken + 3, "one in the place, one in each hand"
        await arriving.close()
        assert all(items == list(range(len(items))) for items in seen.values())
        assert abs(len(seen[0]) - len(seen[1])) <= 1, "in turn"
        assert all(each.closed for each in endless)

    in_loop(test())


def test_the_first_error_of_merged_streams_closes_the_others() -> None:
    async def test() -> None:
        endless, failing = Closing(), Closing(3, UnavailableError("gone"))
        arriving = MergedCalls([endless.give, failing.give], 2)
        with pytest.raises(UnavailableError, match="gone"):
            while await arriving.next():
                pass
        await arriving.close()
        assert endless.closed
        assert len(asyncio.all_tasks()) == 1

    in_loop(test())


def test_the_first_error_of_several_results_cancels_the_others() -> None:
    async def test() -> None:
        waiting = asyncio.Event()

        async def fail() -> int:
            raise UnavailableError("gone")

        with pytest.raises(UnavailableError):
            await gather_or_cancel([waiting.wait(), fail()])
        assert len(asyncio.all_tasks()) == 1

    in_loop(test())


@pytest.mark.parametrize("leaves", [True, False])
def test_work_ends_when_the_client_leaves_and_leaves_no_task_behind(leaves: bool) -> None:
    async def test() -> None:
        never = asyncio.Event()

        async def receive() -> Message:
            if not leaves:
                await never.wait()
            return {"type": "http.disconnect"}

        async def work() -> int:
            if leaves:
                await never.wait()
            return 5

        if leaves:
            with pytest.raises(ClientDisconnect):
                await run_unless_disconnected(receive, work())
        else:
            assert await run_unless_disconnected(receive, work()) == 5
        assert len(asyncio.all_tasks()) == 1

    in_loop(test())


async def never_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def texts(numbers: Closing) -> AsyncGenerator[str, None]:
    items = numbers.items()
    try:
        async for number in items:
            yield json.dumps(number)
    finally:
        await items.aclose()


def test_events_are_one_data_line_each_with_an_empty_line_behind() -> None:
    async def test() -> list[Message]:
        told: list[Message] = []

        async def send(message: Message) -> None:
            told.append(message)

        await EventStreamResponse(texts(Closing(2)), {"x-a": "b"})({"type": "http"}, never_leaves, send)
        return told

    start, *bodies = in_loop(test())
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert dict(start["headers"])[b"x-a"] == b"b"
    assert b"content-length" not in dict(start["headers"])
    assert [body["body"] for body in bodies] == [b"data: 0\n\n", b"data: 1\n\n", b""]
    assert [body["more_body"] for body in bodies] == [True, True, False]


@pytest.mark.parametrize("how", ["stops reading", "breaks off", "leaves"])
def test_a_stream_is_closed_however_its_reader_is_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_SECONDS", 0.01)

    async def test() -> None:
        numbers, left = Closing(), asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body" and numbers.yielded == 3:
                if how == "breaks off":
                    raise OSError("connection reset")
                left.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            await (left if how == "leaves" else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        await EventStreamResponse(texts(numbers), {})({"type": "http"}, receive, send)
        assert numbers.closed
        assert numbers.yielded == 3
        assert len(asyncio.all_tasks()) == 1

    in_loop(test())


@pytest.mark.parametrize("leaves", [True, False])
def test_the_calls_of_a_stream_end_with_a_client_that_is_lost_before_the_first_event(leaves: bool) -> None:
    async def test() -> None:
        endless = Closing()
        arriving = MergedCalls([endless.give])
        await arriving.next()

        async def receive() -> Message:
            return {"type": "http.disconnect"} if leaves else await never_leaves()

        async def send(message: Message) -> None:
            raise OSError("connection reset")

        events = texts(Closing())
        await EventStreamResponse(events, {}, arriving.close)({"type": "http"}, receive, send)
        assert endless.closed
        assert len(asyncio.all_tasks()) == 1

    in_loop(test())
