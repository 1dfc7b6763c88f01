"""Requests -> an engine that always has enough to do, in the process that steps it.

In:    an engine, requests as they come, each for one sequence.
Out:   what it answered to each.
Never: fills the queue of the engine: requests wait where they come from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError


@dataclass(slots=True)
class Decoded:
    """What came of one request."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """The one that stopped it included."""
    forwards: int = 0
    error: MarsRayError | None = None
    """What ended it before its time; the rest is then what there was."""


def decode_all(engine: Engine, requests: Iterable[Request]) -> Iterator[Decoded]:
    """Yield each request when it has ended. Raises what `Engine.add` raises, and what ends one before its time."""
    for decoded in decode_each(engine, requests):
        if decoded.error:
            raise decoded.error
        yield decoded


def decode_each(engine: Engine, requests: Iterable[Request]) -> Iterator[Decoded]:
    """As `decode_all`, but one that ends before its time ends no other: its error is with it."""
    coming = iter(requests)
    running: dict[str, Decoded] = {}
    while True:
        while engine.waiting < engine.limits.rows and (request := next(coming, None)):
            engine.add(request)
            running[request.id] = Decoded(request)
        if not engine.busy:
            return
        for chunk in engine.step():
            decoded = running[chunk.request_id]
            decoded.text += chunk.text
            decoded.tokens += chunk.tokens
            if ended := chunk.finished:
                decoded.forwards, decoded.error = ended.forwards, ended.error
                yield running.pop(chunk.request_id)
