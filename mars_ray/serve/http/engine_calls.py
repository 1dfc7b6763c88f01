"""The requests of one gateway to the engines of one model.

In:    engine requests; a client of the engines.
Out:   chunks, from several engines in turn if engines die; how long the model has not been used.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.failover import collect_with_retry, stream_with_migration
from mars_ray.serve.replicas.engine_client import EngineClient
from mars_ray.traces.engine_call import EngineCall


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

    async def stream(
        self, request: Request, usage: ResponseUsage, call: EngineCall | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request, from several engines in turn if engines die. `call` records them."""
        chunks = stream_with_migration(self._client.stream, request, self._migration_limit, usage, call=call)
        with self._counted():
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def collect(self, request: Request, chunks: list[Chunk], call: EngineCall | None = None) -> None:
        """Add the chunks of a request to `chunks` as they arrive. If an engine dies, another one begins again with an
        empty list. `call` records the chunks."""

        async def once(attempt: Request) -> None:
            chunks.clear()
            async with aclosing(self._client.collect(attempt)) as parts:
                async for part in parts:
                    chunks.extend(part)

        with self._counted():
            await collect_with_retry(once, request, call=call)
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
