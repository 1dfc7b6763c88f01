"""Send a request to another replica if the replica that serves it dies.

In:    a function that sends a request to some replica.
Out:   the result or the chunks of that request.
Never: sends a request again after a part of the answer has been sent: a sampled answer would change in the middle.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from mars_ray.engine.chunk import Chunk
from mars_ray.errors import ReplicaLostError

ATTEMPTS = 3
"""Maximum number of attempts. It is small because the request itself may be what kills the replicas."""

T = TypeVar("T")


async def collect_with_retry(send: Callable[[], Awaitable[T]], attempts: int = ATTEMPTS) -> T:
    """Call `send` and return its result; call it again if a replica dies. Raises `ReplicaLostError` if the last attempt
    fails too."""
    for _ in range(attempts - 1):
        try:
            return await send()
        except ReplicaLostError:
            continue
    return await send()


async def stream_with_retry(
    send: Callable[[], AsyncGenerator[Chunk, None]], attempts: int = ATTEMPTS
) -> AsyncGenerator[Chunk, None]:
    """Call `send` and yield its chunks; call it again if a replica dies before the first chunk. Raises
    `ReplicaLostError` if a replica dies later or in the last attempt."""
    for attempt in range(attempts):
        begun = False
        async with aclosing(send()) as chunks:
            try:
                async for chunk in chunks:
                    begun = True
                    yield chunk
                return
            except ReplicaLostError:
                if begun or attempt + 1 == attempts:
                    raise
