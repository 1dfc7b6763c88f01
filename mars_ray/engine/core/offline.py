"""Decode many requests, in the process that steps the engine.

Requests wait where they come from, not in the queue of the engine, which always has enough to do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError


@dataclass(slots=True)
class OfflineResult:
    """What came of one request, which must be for one sequence."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated, the one that stopped the sequence included."""
    forwards: int = 0
    error: MarsRayError | None = None
    """What ended the request early, if something did; text and tokens are then what there was."""


def decode_all(engine: Engine, requests: Iterable[Request]) -> Iterator[OfflineResult]:
    """Yield each request when it has ended. Raises what `Engine.add` raises, and an error that ends a request early."""
    for result in decode_each(engine, requests):
        if result.error:
            raise result.error
        yield result


def decode_each(engine: Engine, requests: Iterable[Request]) -> Iterator[OfflineResult]:
    """Yield each request when it has ended, one that ended early with its error. Raises what `Engine.add` raises."""
    running: dict[str, OfflineResult] = {}

    def started() -> Iterator[Request]:
        for request in requests:
            running[request.id] = OfflineResult(request)
            yield request

    for chunks in run_steps(engine, started()):
        for chunk in chunks:
            result = running[chunk.request_id]
            result.text += chunk.text
            result.tokens += chunk.tokens
            if ended := chunk.finished:
                result.forwards, result.error = ended.forwards, ended.error
                yield running.pop(chunk.request_id)


def run_steps(engine: Engine, requests: Iterable[Request]) -> Iterator[list[Chunk]]:
    """Yield what each step gives until all requests have ended. Raises what `Engine.add` raises."""
    coming = iter(requests)
    while True:
        while engine.waiting < engine.limits.max_num_seqs and (request := next(coming, None)):
            engine.add(request)
        if not engine.busy:
            return
        yield engine.step()
