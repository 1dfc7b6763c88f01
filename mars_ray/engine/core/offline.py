"""Decode many requests with an engine in the same process.

Requests are read from the caller's iterator whenever the engine has room, so the engine's queue stays short but never
runs empty.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError, QueueFullError


@dataclass(slots=True)
class OfflineResult:
    """The answer to a request for one sequence."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens, including the one that stopped the sequence."""
    forwards: int = 0
    error: MarsRayError | None = None
    """The error that ended the request early, if any; text and tokens are then partial."""


def decode_all(engine: DecodingEngine, requests: Iterable[Request]) -> Iterator[OfflineResult]:
    """Yield the answer to each request when it is complete.

    Raises the errors of `Engine.add`, and any error that ends a request early.
    """
    for result in decode_each(engine, requests):
        if result.error:
            raise result.error
        yield result


def decode_each(engine: DecodingEngine, requests: Iterable[Request]) -> Iterator[OfflineResult]:
    """Yield the answer to each request when the request has ended. After an error, the answer may be partial.

    Raises the errors of `Engine.add`.
    """
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
            if chunk.finished:
                result.forwards = chunk.finished.forwards
                result.error = chunk.finished.error
                yield running.pop(chunk.request_id)


def run_steps(
    engine: DecodingEngine, requests: Iterable[Request] = (), *, at_a_time: int | None = None
) -> Iterator[list[Chunk]]:
    """Yield the chunks of each step until all requests have ended, including requests that are already in the engine.

    At most `at_a_time` sequences are in the engine at once; None keeps the engine's queue filled. Raises the errors of
    `Engine.add`.
    """
    coming = iter(requests)
    refused: Request | None = None
    waiting = 0
    while True:
        # A refused request is tried again once fewer sequences wait than when it was refused.
        while _has_room(engine, at_a_time) and (refused is None or engine.waiting < waiting or not engine.busy):
            if not (request := refused or next(coming, None)):
                break
            refused = None
            try:
                engine.add(request)
            except QueueFullError:  # the class of the request has fewer places than the engine has slots
                if not engine.busy:
                    raise
                refused, waiting = request, engine.waiting
        if not engine.busy:
            return
        yield engine.step()


def _has_room(engine: DecodingEngine, at_a_time: int | None) -> bool:
    if at_a_time is None:
        return engine.waiting < engine.limits.max_num_seqs
    return engine.running + engine.waiting < at_a_time
