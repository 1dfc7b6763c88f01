"""A real client against a real server that behaves badly: every outcome is recorded, and nothing hangs."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from mars_ray.load import client as serve_client
from mars_ray.load.generator import Clients, run_load
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord
from mars_ray.serve.deploy.environment import free_ports
from tests.load.server_samples import SmallServer, planned, target


def load(url: str, requests: list[PlannedRequest], clients: int | None = 2, **changes: Any) -> list[RequestRecord]:
    async def sent() -> list[RequestRecord]:
        return await asyncio.wait_for(run_load(target(url, **changes), requests, clients=clients), 60)

    return asyncio.run(sent())


@pytest.mark.parametrize("what", ["stream", "pieces", "linger", "no done"])
def test_a_stream_is_read_whole_however_it_is_cut_and_ended(url: str, what: str) -> None:
    (seen,) = load(url, planned(what))
    assert (seen.outcome, seen.http_status, seen.error) == (RequestOutcome.OK, 200, None)
    assert (seen.prompt_tokens, seen.completion_tokens, seen.tokens_per_forward) == (5, 7, 3.5)
    assert (len(seen.chunk_s), seen.text) == (2, "one two three")
    assert 0 <= seen.sent_s <= seen.chunk_s[0] <= seen.chunk_s[1] <= seen.end_s


def test_an_answer_without_streaming_has_an_end_and_no_chunks(url: str, server: SmallServer) -> None:
    (seen,) = load(url, planned("plain"), stream=False)
    assert (seen.outcome, seen.chunk_s, seen.completion_tokens) == (RequestOutcome.OK, (), 7)
    assert seen.text == "one two three"
    assert seen.ttft_s is None and seen.e2e_s >= 0
    assert server.bodies[0]["stream"] is False and "stream_options" not in server.bodies[0]


@pytest.mark.parametrize(
    ("what", "outcome", "status", "chunks", "said"),
    [
        ("busy", RequestOutcome.LIMITED, 429, 0, "HTTP 429: it is busy"),
        ("bad", RequestOutcome.CLIENT_ERROR, 400, 0, "HTTP 400: it is bad"),
        ("fail", RequestOutcome.SERVER_ERROR, 500, 0, "HTTP 500: it is fail"),
        ("unwell", RequestOutcome.SERVER_ERROR, 503, 0, "HTTP 503: it is unwell"),
        ("page", RequestOutcome.SERVER_ERROR, 502, 0, "HTTP 502: <h1>Bad ?[31m gateway</h1>"),
        ("break", RequestOutcome.BROKEN, 200, 2, "Error"),
        ("stop short", RequestOutcome.BROKEN, 200, 2, "the stream ended before the answer"),
        ("no json", RequestOutcome.BROKEN, 200, 0, "not a chat completion"),
        ("no object", RequestOutcome.BROKEN, 200, 0, "not a JSON object: '[1]'"),
        ("error event", RequestOutcome.ERROR_EVENT, 200, 2, "it broke"),
    ],
)
def test_every_way_to_fail_is_an_outcome(
    url: str, what: str, outcome: RequestOutcome, status: int, chunks: int, said: str
) -> None:
    (seen,) = load(url, planned(what))
    assert (seen.outcome, seen.http_status, len(seen.chunk_s)) == (outcome, status, chunks)
    assert seen.error is not None and said in seen.error
    assert seen.retry_after_s == (7.0 if what == "busy" else None)


def test_a_429_that_names_no_time_is_recorded_without_one(url: str) -> None:
    assert load(url, planned("busy without a time"))[0].retry_after_s is None


@pytest.mark.parametrize(("what", "status", "chunks"), [("hang", None, 0), ("hang inside", 200, 2)])
def test_a_server_that_hangs_is_left_when_the_time_is_over(
    url: str, what: str, status: int | None, chunks: int
) -> None:
    (seen,) = load(url, planned(what), timeout_s=0.5)
    assert (seen.outcome, seen.http_status, len(seen.chunk_s)) == (RequestOutcome.TIMEOUT, status, chunks)
    assert seen.error == "no end of the reply within 0.5 s"


def test_nobody_at_the_port_is_an_outcome_of_each_request() -> None:
    seen = load(f"http://127.0.0.1:{next(free_ports())}", planned("a", "b", arrivals_s=(0.0, 0.0)))
    assert [each.outcome for each in seen] == [RequestOutcome.CONNECTION] * 2
    assert all(each.http_status is None and each.error for each in seen)


def test_a_server_that_hangs_up_before_it_answers_is_an_outcome() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        (seen,) = load(f"http://127.0.0.1:{listening.getsockname()[1]}", planned("a"))
        thread.join()
    assert seen.outcome is RequestOutcome.CONNECTION


def test_chunks_are_those_with_something_in_them(url: str) -> None:
    empty, tool = load(url, planned("no text", "tool"))
    assert (empty.outcome, empty.chunk_s, empty.ttft_s) == (RequestOutcome.OK, (), None)
    assert (tool.outcome, len(tool.chunk_s)) == (RequestOutcome.OK, 1)


def test_a_server_that_counts_no_tokens_is_not_guessed_for(url: str) -> None:
    (seen,) = load(url, planned("no usage"))
    assert (seen.outcome, seen.prompt_tokens, seen.completion_tokens, seen.tpot_s) == (
        RequestOutcome.OK,
        None,
        None,
        None,
    )


def test_records_are_in_the_order_of_the_plan_whatever_ended_first(url: str) -> None:
    whats = ["meet 3", "busy", "stream", "bad", "meet 3", "fail", "meet 3", "break"]
    outcomes = [
        RequestOutcome.OK,
        RequestOutcome.LIMITED,
        RequestOutcome.OK,
        RequestOutcome.CLIENT_ERROR,
        RequestOutcome.OK,
        RequestOutcome.SERVER_ERROR,
    ]
    seen = load(url, planned(*whats), clients=4)
    assert [each.number for each in seen] == list(range(8))
    assert [each.outcome for each in seen] == [*outcomes, RequestOutcome.OK, RequestOutcome.BROKEN]


def test_a_closed_loop_has_as_many_under_way_as_clients_and_no_more(url: str, server: SmallServer) -> None:
    # The first three are answered when all three are there, so fewer clients would never get on.
    seen = load(url, planned(*["meet 3"] * 3, *["stream"] * 17), clients=3)
    assert [each.outcome for each in seen] == [RequestOutcome.OK] * 20
    assert server.under_way_max == 3
    assert not any(each.waited for each in seen)


def test_connections_are_used_again(url: str, server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_client, "DRAIN_S_MAX", 60.0)
    load(url, planned(*["stream"] * 8, *["late end"] * 2, *["busy"] * 4), clients=1)
    assert len(server.clients) == 1


def test_an_open_loop_sends_on_schedule_whatever_the_server_does(url: str, server: SmallServer) -> None:
    seen = load(url, planned(*["meet 5"] * 5, arrivals_s=(0.0, 0.0, 0.01, 0.01, 0.02)), clients=None)
    assert [each.outcome for each in seen] == [RequestOutcome.OK] * 5
    assert server.under_way_max == 5
    assert all(each.sent_s >= (each.scheduled_s or 0) and not each.waited for each in seen)


def test_an_open_loop_that_lacks_a_client_waits_and_counts_from_the_arrival(url: str, server: SmallServer) -> None:
    seen = load(url, planned(*["stream"] * 4, arrivals_s=(0.0, 0.0, 0.0, 0.0)), clients=1)
    assert server.under_way_max == 1
    assert [each.waited for each in seen] == [False, True, True, True]
    for before, after in pairwise(seen):
        assert after.sent_s >= before.end_s
        assert after.e2e_s == after.end_s > after.end_s - after.sent_s


def test_who_waited_is_told_by_the_moment_of_the_arrival() -> None:
    async def test() -> None:
        now_s = 0.0
        clients = Clients(2, lambda: now_s)
        assert [await clients.take(0.0), await clients.take(0.0)] == [False, False]
        third = asyncio.create_task(clients.take(1.0))
        await asyncio.sleep(0)
        now_s = 3.0
        clients.give_back()
        clients.give_back()
        assert await third is True
        assert await clients.take(2.0) is True  # due while the third waited, though a client is free by now
        clients.give_back()
        now_s = 9.0
        assert await clients.take(5.0) is False  # late for another reason, and so is the next
        clients.give_back()
        assert await clients.take(6.0) is False

    run_until(test)


def run_until(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_requests_after_the_duration_are_not_sent_and_those_under_way_end(url: str, server: SmallServer) -> None:
    async def test() -> None:
        arriving = planned("stream", "stream", "stream", arrivals_s=(0.0, 0.01, 5000.0))
        seen = await run_load(target(url), arriving, duration_s=1000.0)
        assert [each.outcome for each in seen] == [RequestOutcome.OK] * 2

        def endless() -> Iterator[PlannedRequest]:
            while True:
                yield from planned("stream")

        seen = await run_load(target(url), endless(), clients=2, duration_s=0.2)
        assert seen and {each.outcome for each in seen} == {RequestOutcome.OK}
        assert all(each.sent_s >= 0 for each in seen)

    run_until(test)


def test_a_load_that_is_stopped_returns_what_ended_and_what_was_under_way(url: str, server: SmallServer) -> None:
    async def test() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        server.on_hang = lambda: loop.call_soon_threadsafe(stop.set)
        told: list[RequestRecord] = []
        asked = planned("stream", "hang", "never sent")
        seen = await run_load(target(url), asked, clients=1, stop=stop, on_record=told.append)
        assert [each.outcome for each in seen] == [RequestOutcome.OK, RequestOutcome.INTERRUPTED]
        assert told == seen

    run_until(test)


def test_a_load_that_is_cancelled_leaves_nothing_running(url: str, server: SmallServer) -> None:
    async def test() -> None:
        hanging, loop = asyncio.Event(), asyncio.get_running_loop()
        server.on_hang = lambda: loop.call_soon_threadsafe(hanging.set)
        running = asyncio.create_task(run_load(target(url), planned("hang"), clients=1))
        await hanging.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    # Not under wait_for, which would add a task of its own.
    asyncio.run(test())


def test_a_request_is_what_every_openai_compatible_server_takes(url: str, server: SmallServer) -> None:
    load(url, planned("stream"), api_key="secret", extra_body={"threshold": 0.9})
    assert server.bodies == [
        {
            "model": "small",
            "messages": [{"role": "user", "content": "stream"}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "threshold": 0.9,
        }
    ]
    assert server.headers[0][b"authorization"] == b"Bearer secret"
    assert server.headers[0][b"accept-encoding"] == b"identity"  # compression would hold chunks back
    assert "secret" not in repr(target(url, api_key="secret"))
    assert json.dumps(server.bodies).count("secret") == 0
