"""Send a request to another replica if the replica that serves it dies.

In:    a function that sends a request to some replica.
Out:   the result or the chunks of that request.
Never: yields a token twice: a begun stream continues after the tokens that were already sent.

The next engine reads the tokens that were sent like those of a preempted sequence: they count as output for limits,
penalties and draws. Parsers of calls run in the gateway, so they notice nothing. Each attempt has its own id, because a
late cancel of the lost attempt must not end the next one.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import PartialAnswer, Request
from mars_ray.errors import ReplicaLostError, RequestError
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.traces.engine_call import EngineCall

ATTEMPTS = 3
"""Maximum number of attempts until the answer begins. It is small because the request itself may be what kills the
replicas."""

T = TypeVar("T")


async def collect_with_retry(
    send: Callable[[Request], Awaitable[T]], request: Request, *, call: EngineCall | None = None
) -> T:
    """Send a request and return the result; send it again if a replica dies. Raises `ReplicaLostError` if the last
    attempt fails too. `call` records the retries."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await send(_attempted(request, attempt))
        except ReplicaLostError:
            if call:
                call.lost("retry")
    return await send(_attempted(request, ATTEMPTS - 1))


def _attempted(request: Request, attempt: int) -> Request:
    """Return the request with an id of this attempt's own, except for the first one."""
    return replace(request, id=f"{request.id}-{attempt}") if attempt else request


async def stream_with_migration(
    stream: Callable[[Request], AsyncGenerator[Chunk, None]],
    request: Request,
    migration_limit: int,
    usage: ResponseUsage,
    *,
    call: EngineCall | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a request. If its replica dies, another one continues; `usage` counts these migrations, and
    `call` records them and the chunks.

    Raises `ReplicaLostError` after `migration_limit` replicas, or `ATTEMPTS` before the first chunk, and if no replica
    can continue the answer.
    """
    unfinished = _UnfinishedAnswers(request)
    lost = 0
    while unfinished.answers:
        try:
            async with aclosing(stream(unfinished.request(lost))) as chunks:
                async for chunk in chunks:
                    unfinished.add(chunk)
                    if call:
                        call.add(chunk)
                    yield chunk
            return
        except ReplicaLostError:
            lost += 1
            if lost > (migration_limit if unfinished.begun else ATTEMPTS - 1):
                raise
            usage.migrations += unfinished.begun
            if call:
                call.lost("migration" if unfinished.begun else "retry")
        except RequestError as error:
            if not (lost and unfinished.begun):
                raise
            raise ReplicaLostError(
                f"the replica that processed the request died, and another one cannot continue: {error} "
                "Send the request again."
            ) from error


class _UnfinishedAnswers:
    """The answers of one request that have not ended, with the tokens that were already sent."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.answers: dict[int, tuple[list[int], int]] = {index: ([], 0) for index in request.indices}
        """Tokens and number of forwards of each answer, by index."""
        self.begun = False
        """Whether a chunk has been sent."""

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, which holds the tokens of one forward."""
        self.begun = True
        if chunk.finished:
            del self.answers[chunk.index]
        elif chunk.tokens:
            tokens, forwards = self.answers[chunk.index]
            tokens += chunk.tokens
            self.answers[chunk.index] = tokens, forwards + 1

    def request(self, attempt: int) -> Request:
        """Return the request for the rest of the answers. For attempt 0 it is the whole request."""
        request = _attempted(self._request, attempt)
        if not attempt or not self.begun:
            return request
        partial_answers = {
            index: PartialAnswer(tuple(tokens), forwards) for index, (tokens, forwards) in self.answers.items()
        }
        return replace(request, partial_answers=partial_answers)
