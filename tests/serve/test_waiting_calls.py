"""Calls end when no engine has them any more, and not before."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from mars_ray.errors import ReplicaLostError, UnavailableError
from mars_ray.serve.replicas.liveness import LOST_ROUNDS, SILENT_SECONDS, STOPPING, Heard, WaitingCall, WaitingCalls

UP_ROUNDS = 3 * LOST_ROUNDS


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def ask(calls: WaitingCalls, rounds: int, *, running: tuple[str, ...] = (), up: bool = True) -> None:
    """Ask the engines so often; those that answer say what they have of what they are asked for."""
    for _ in range(rounds):
        calls.hear(set(calls.unheard(up=up)) & set(running))


async def answer_of(call: WaitingCall, answer: "asyncio.Future[str]") -> "asyncio.Task[str]":
    """Begin to wait for an answer."""
    waiting = asyncio.create_task(call.wait_for(answer))
    await asyncio.sleep(0)
    return waiting


def future() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


def test_a_call_that_no_engine_has_ends_as_one_whose_replica_died() -> None:
    async def test() -> None:
        calls = WaitingCalls(UP_ROUNDS)
        with calls.call("a", lambda: True) as call:
            waiting = await answer_of(call, future())
            ask(calls, LOST_ROUNDS)
            await asyncio.sleep(0)
            assert not waiting.done()
            ask(calls, 1)
            with pytest.raises(ReplicaLostError):
                await waiting
        assert not calls.unheard(up=True)

    run(test())


def test_a_call_that_an_engine_has_waits_however_long() -> None:
    async def test() -> None:
        calls, answer = WaitingCalls(UP_ROUNDS), future()
        with calls.call("a", lambda: True) as call:
            waiting = await answer_of(call, answer)
            for _ in range(10):
                ask(calls, LOST_ROUNDS - 1)
                ask(calls, 1, running=("a",))
            answer.set_result("said")
            assert await waiting == "said"

    run(test())


def test_time_that_a_reader_takes_is_not_the_engine_s() -> None:
    async def test() -> None:
        calls, answer = WaitingCalls(UP_ROUNDS), future()
        answer.set_result("said")
        with calls.call("a", lambda: True) as call:
            await call.wait_for(answer)
            ask(calls, 3 * LOST_ROUNDS)
            assert await call.wait_for(answer) == "said"

    run(test())


def test_a_call_that_no_replica_has_taken_is_unsent_while_it_waits() -> None:
    async def test() -> None:
        calls, taken = WaitingCalls(UP_ROUNDS), False
        with calls.call("a", lambda: taken) as call, calls.call("b", lambda: True) as other:
            assert calls.unsent == []
            waiting = [await answer_of(each, future()) for each in (call, other)]
            assert calls.unsent == [call]
            call.end(UnavailableError(STOPPING))
            with pytest.raises(UnavailableError, match="stopping"):
                await waiting[0]
            assert calls.unsent == [] and not waiting[1].done()
            waiting[1].cancel()

    run(test())


@pytest.mark.parametrize("begun", [False, True])
def test_while_no_engine_answers_only_a_call_that_has_begun_is_lost(begun: bool) -> None:
    async def test() -> None:
        calls, answer = WaitingCalls(UP_ROUNDS), future()
        answer.set_result("said")
        with calls.call("a", lambda: True) as call:
            if begun:
                await call.wait_for(answer)
            waiting = await answer_of(call, future())
            ask(calls, UP_ROUNDS, up=False)
            await asyncio.sleep(0)
            assert begun or not waiting.done()
            ask(calls, 1, up=False)
            with pytest.raises(ReplicaLostError if begun else UnavailableError):
                await waiting

    run(test())


def test_a_replica_is_silent_once_it_was_heard_and_is_not_any_more() -> None:
    now_s = 50.0
    heard = Heard(lambda: now_s)
    assert not heard.silent("new")
    heard.note("a")
    heard.note("b")
    now_s += SILENT_SECONDS
    heard.note("b")
    assert not heard.silent("a")
    now_s += 0.1
    assert heard.silent("a") and not heard.silent("b")
    heard.note("a")
    assert not heard.silent("a")
