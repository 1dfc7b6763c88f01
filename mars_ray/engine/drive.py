"""Requests -> an engine that always has enough to do, in the process that steps it.

In:    an engine, requests as they come.
Out:   the chunks of all of them.
Never: fills the queue of the engine: requests wait where they come from.
"""

from collections.abc import Iterable, Iterator

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.engine import Engine
from mars_ray.engine.request import Request


def decode_all(engine: Engine, requests: Iterable[Request]) -> Iterator[Chunk]:
    """Yield the chunks step by step, until every request has ended. Raises what `Engine.add` raises."""
    coming = iter(requests)
    while True:
        while engine.waiting < engine.limits.rows and (request := next(coming, None)):
            engine.add(request)
        if not engine.busy:
            return
        yield from engine.step()
