"""The requests of one gateway to the engines of one model. If a replica dies, another one gets its requests.

In:    engine requests; a client of the engines.
Out:   chunks, from several engines in turn if engines die; how long the model has not been used.
Never: passes on a token twice: a begun stream continues after the tokens that were already sent.

The next engine reads the tokens that were sent like those of a preempted sequence: they count as output for limits,
penalties and draws. Parsers of calls run in the gateway, so they notice nothing. Each attempt has its own id, because a
late cancel of the lost attempt must not end the next one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import PartialAnswer, Request
from mars_ray.errors import EngineHungError, ReplicaLostError, RequestError
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.replicas.engine_client import EngineClient, Take
from mars_ray.traces.engine_call import EngineCall

ATTEMPTS = 3
"""Maximum number of attempts until the answer begins. It is small because the request itself may be what kills the
replicas."""
HANGS = 2
"""Number of engines that may hang because of one request. The first one may have hung for another reason."""


class EngineCalls:
    """Sends requests to the engines behind `client`. A begun stream moves to another engine `migration_limit` times."""

    def __init__(self, client: EngineClient, migration_limit: int) -> None:
        self._client = client
        self._migration_limit = migration_limit
        self.running = 0
        """Number of requests that the engines are processing."""
        self._used_s = time.monotonic()

    def touch(self) -> None:
        """Note that the model is used now."""
        self._used_s = time.monotonic()

    def idle_s(self) -> float:
        """Return the seconds since the model was last used, 0 while it is in use."""
        return 0.0 if self.running else time.monotonic() - self._used_s

    async def stream(self, request: Request, take: Take, usage: ResponseUsage, call: EngineCall | None = None) -> None:
        """Give the chunks of a request to `take`. If its replica dies, another one continues.

        `usage` counts these migrations, and `call` records them and the chunks. Raises `ReplicaLostError` after
        `migration_limit` replicas, or `ATTEMPTS` before the first chunk, and if no replica can continue the answer.
        Raises `EngineHungError` after `HANGS`.
        """
        unfinished = _UnfinishedAnswers(request)
        lost = 0
        hung = 0

        async def take_part(part: Sequence[Chunk]) -> None:
            for chunk in part:
                unfinished.add(chunk)
                if call:
                    call.add(chunk)
            await take(part)

        with self._counted():
            while unfinished.answers:
                try:
                    await self._client.generate(unfinished.request(lost), take_part)
                    return
                except (EngineHungError, ReplicaLostError) as error:
                    lost += 1
                    hung += isinstance(error, EngineHungError)
                    if hung == HANGS or lost > (self._migration_limit if unfinished.begun else ATTEMPTS - 1):
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

    async def collect(self, request: Request, chunks: list[Chunk], call: EngineCall | None = None) -> None:
        """Add the chunks of a request to `chunks` as they arrive. If a replica dies, another one begins again with an
        empty list. `call` records the retries and the chunks. Raises `ReplicaLostError` after `ATTEMPTS`, and
        `EngineHungError` after `HANGS`."""
        hung = 0

        async def take(part: Sequence[Chunk]) -> None:
            chunks.extend(part)

        with self._counted():
            for attempt in range(ATTEMPTS):
                chunks.clear()
                try:
                    await self._client.generate(_attempted(request, attempt), take, whole=True)
                    break
                except (EngineHungError, ReplicaLostError) as error:
                    hung += isinstance(error, EngineHungError)
                    if hung == HANGS or attempt == ATTEMPTS - 1:
                        raise
                    if call:
                        call.lost("retry")
        if call:
            for chunk in chunks:
                call.add(chunk)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request within the block."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.touch()


def _attempted(request: Request, attempt: int) -> Request:
    """Return the request with an id of this attempt's own, except for the first one."""
    return replace(request, id=f"{request.id}-{attempt}") if attempt else request


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
