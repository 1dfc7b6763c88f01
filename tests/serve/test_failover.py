"""A request goes to another replica if its own dies, after the tokens that have left, and not for ever."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import PartialAnswer, Request
from mars_ray.errors import (
    EngineHungError,
    MarsRayError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    StepError,
    UnavailableError,
)
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.engine_calls import ATTEMPTS, EngineCalls
from mars_ray.serve.replicas.engine_client import Take

LIMIT = 2
REQUEST = Request(id="r", prompt=(7,))
CHUNKS = [Chunk("r", 0, (number,), (str(number),)) for number in range(4)]


class Replicas:
    """A client of engines. The k-th call gives so many further chunks and then dies with its error, or ends if there
    is none."""

    def __init__(self, *ends: tuple[int, MarsRayError | None]) -> None:
        self.ends, self.calls, self.closed = ends, 0, 0
        self.names: list[str] = []

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        count, error = self.ends[min(self.calls, len(self.ends) - 1)]
        self.calls += 1
        self.names.append(request.id)
        sent = len(request.partial_answers.get(0, PartialAnswer()).tokens)
        try:
            for chunk in CHUNKS[sent:][:count]:
                await asyncio.sleep(0)
                await take([chunk])
            if error:
                raise error
        finally:
            self.closed += 1


def calls_of(replicas: Replicas) -> EngineCalls:
    client: Any = replicas
    return EngineCalls(client, LIMIT)


def streamed(replicas: Replicas, usage: ResponseUsage | None = None) -> tuple[list[Chunk], MarsRayError | None]:
    """What a reader gets, and how it ends."""
    got: list[Chunk] = []

    async def take(part: Sequence[Chunk]) -> None:
        got.extend(part)

    try:
        asyncio.run(calls_of(replicas).stream(REQUEST, take, usage or ResponseUsage(prompt_tokens=1)))
    except MarsRayError as error:
        return got, error
    return got, None


def collected(replicas: Replicas) -> list[Chunk]:
    chunks: list[Chunk] = []
    asyncio.run(calls_of(replicas).collect(REQUEST, chunks))
    return chunks


LOST = ReplicaLostError("died")
HUNG = EngineHungError("alone")


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([LOST, StepError("no"), None])), min_size=1, max_size=6))
@example([(0, LOST)])
def test_a_stream_goes_on_at_the_next_replica_after_the_tokens_that_have_left(
    ends: list[tuple[int, MarsRayError | None]],
) -> None:
    replicas = Replicas(*ends)
    usage = ResponseUsage(prompt_tokens=1)
    got, error = streamed(replicas, usage)
    tried = [ends[min(number, len(ends) - 1)] for number in range(replicas.calls)]
    assert all(end == LOST for _, end in tried[:-1]), "only the dead are replaced"
    assert (got, error) == (CHUNKS[: sum(count for count, _ in tried)], tried[-1][1])
    assert replicas.calls == replicas.closed <= max(ATTEMPTS, LIMIT + 1)
    assert error != LOST or replicas.calls == (LIMIT + 1 if got else ATTEMPTS)
    assert usage.migrations <= LIMIT


def test_a_begun_stream_that_no_other_replica_can_continue_ends_as_lost_and_says_why() -> None:
    replicas = Replicas((2, LOST), (0, RequestError("the engine continues no answer with a grammar.")))
    got, error = streamed(replicas)
    assert got == CHUNKS[:2]
    assert isinstance(error, ReplicaLostError)
    assert "cannot continue: the engine continues no answer with a grammar. Send" in str(error)


@pytest.mark.parametrize("begun", [0, 2])
def test_a_request_under_which_an_engine_hung_is_tried_once_more(begun: int) -> None:
    replicas = Replicas((begun, HUNG), (4, None))
    assert streamed(replicas) == (CHUNKS, None)
    assert collected(Replicas((begun, HUNG), (4, None))) == CHUNKS


@pytest.mark.parametrize("between", [[], [(0, LOST)]])
def test_a_request_under_which_a_second_engine_hung_ends(between: list[tuple[int, MarsRayError]]) -> None:
    ends = [(0, HUNG), *between, (0, HUNG), (4, None)]
    replicas = Replicas(*ends)
    assert streamed(replicas) == ([], HUNG)
    assert replicas.calls == len(ends) - 1
    with pytest.raises(EngineHungError):
        collected(Replicas(*ends))


def test_leaving_a_stream_early_closes_the_replicas() -> None:
    replicas = Replicas((0, LOST), (4, None))

    async def leave() -> None:
        got = asyncio.Queue[Sequence[Chunk]]()
        stream = calls_of(replicas).stream(REQUEST, got.put, ResponseUsage(prompt_tokens=1))
        reading = asyncio.create_task(stream)
        assert await got.get() == [CHUNKS[0]]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(leave())
    assert (replicas.calls, replicas.closed) == (2, 2)


@pytest.mark.parametrize("lives_at", range(1, ATTEMPTS + 2))
def test_a_whole_answer_is_asked_for_again_whenever_its_replica_died(lives_at: int) -> None:
    replicas = Replicas(*[(2, LOST)] * (lives_at - 1), (4, None))
    if lives_at > ATTEMPTS:
        with pytest.raises(ReplicaLostError):
            collected(replicas)
    else:
        assert collected(replicas) == CHUNKS
    assert replicas.calls == min(lives_at, ATTEMPTS)
    assert len(set(replicas.names)) == replicas.calls, "a late cancel of a lost attempt ends no other"


@pytest.mark.parametrize("error", [QueueFullError("full"), UnavailableError("none"), StepError("nan")])
def test_other_errors_are_not_tried_again(error: MarsRayError) -> None:
    replicas = Replicas((0, error))
    with pytest.raises(type(error)):
        collected(replicas)
    assert streamed(replicas) == ([], error)
    assert replicas.calls == 2
