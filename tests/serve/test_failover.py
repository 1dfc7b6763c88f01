"""A request goes to another replica only while nothing of its answer has left, and not for ever."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.chunk import Chunk
from mars_ray.errors import (
    EngineHungError,
    MarsRayError,
    QueueFullError,
    ReplicaLostError,
    StepError,
    UnavailableError,
)
from mars_ray.serve.http.failover import ATTEMPTS, collect_with_retry, stream_with_retry

CHUNKS = [Chunk("r", 0, (number,), (str(number),)) for number in range(4)]


class Replicas:
    """The k-th call gives `counts[k]` chunks and then dies with `error`, or ends if there is none."""

    def __init__(self, *ends: tuple[int, MarsRayError | None]) -> None:
        self.ends, self.calls, self.closed = ends, 0, 0

    async def stream(self) -> AsyncGenerator[Chunk, None]:
        count, error = self.ends[min(self.calls, len(self.ends) - 1)]
        self.calls += 1
        try:
            for chunk in CHUNKS[:count]:
                await asyncio.sleep(0)
                yield chunk
            if error:
                raise error
        finally:
            self.closed += 1

    async def collect(self) -> list[Chunk]:
        return [chunk async for chunk in self.stream()]


def streamed(replicas: Replicas) -> tuple[list[Chunk], MarsRayError | None]:
    """What a reader gets, and how it ends."""

    async def read() -> tuple[list[Chunk], MarsRayError | None]:
        got = []
        try:
            async for chunk in stream_with_retry(replicas.stream):
                got.append(chunk)
        except MarsRayError as error:
            return got, error
        return got, None

    return asyncio.run(read())


LOST = ReplicaLostError("died")


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([LOST, StepError("no"), None])), min_size=1, max_size=6))
def test_a_stream_is_what_the_first_replica_that_speaks_says(ends: list[tuple[int, MarsRayError | None]]) -> None:
    replicas = Replicas(*ends)
    got, error = streamed(replicas)
    tried = [ends[min(number, len(ends) - 1)] for number in range(replicas.calls)]
    assert all(end == (0, LOST) for end in tried[:-1]), "only the silent dead are replaced"
    assert (got, error) == (CHUNKS[: tried[-1][0]], tried[-1][1])
    assert replicas.calls == replicas.closed <= ATTEMPTS
    assert replicas.calls == ATTEMPTS or tried[-1] != (0, LOST)


def test_a_stream_that_has_begun_is_never_begun_again() -> None:
    replicas = Replicas((2, LOST), (4, None))
    assert streamed(replicas) == (CHUNKS[:2], LOST)
    assert replicas.calls == 1


def test_a_request_that_kills_every_replica_ends() -> None:
    replicas = Replicas((0, LOST))
    assert streamed(replicas) == ([], LOST)
    assert replicas.calls == ATTEMPTS


def test_leaving_a_stream_early_closes_the_replicas() -> None:
    replicas = Replicas((0, LOST), (4, None))

    async def leave() -> None:
        stream = stream_with_retry(replicas.stream)
        assert await anext(stream) == CHUNKS[0]
        await stream.aclose()

    asyncio.run(leave())
    assert (replicas.calls, replicas.closed) == (2, 2)


@pytest.mark.parametrize("lives_at", range(1, ATTEMPTS + 2))
def test_a_whole_answer_is_asked_for_again_whenever_its_replica_died(lives_at: int) -> None:
    replicas = Replicas(*[(2, LOST)] * (lives_at - 1), (4, None))
    if lives_at > ATTEMPTS:
        with pytest.raises(ReplicaLostError):
            asyncio.run(collect_with_retry(replicas.collect))
    else:
        assert asyncio.run(collect_with_retry(replicas.collect)) == CHUNKS
    assert replicas.calls == min(lives_at, ATTEMPTS)


@pytest.mark.parametrize(
    "error", [QueueFullError("full"), UnavailableError("none"), StepError("nan"), EngineHungError("alone")]
)
def test_other_errors_are_not_tried_again(error: MarsRayError) -> None:
    replicas = Replicas((0, error))
    with pytest.raises(type(error)):
        asyncio.run(collect_with_retry(replicas.collect))
    assert streamed(replicas) == ([], error)
    assert replicas.calls == 2
