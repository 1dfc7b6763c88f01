"""A checked request on its way to a response, and the events of its stream.

In:    chunks of the engine as they arrive; a builder of responses.
Out:   events for the client; usage.
Never: ends a stream without its last event or an error event.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel
from starlette.requests import Request

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request as EngineRequest
from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.openai_api.api_error import api_error
from mars_ray.openai_api.choices import split_by_token
from mars_ray.openai_api.protocol import GenerateRequest
from mars_ray.openai_api.responses import ResponseBuilder
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.extension import Meter
from mars_ray.serve.http.streams import DONE, MergedCalls, NamedEvent, sent_event
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.traces.engine_call import EngineCall

MAX_RUNNING_CHOICES = 32
"""Maximum number of choices of one request that run at a time, so that a long list does not fill the shared queue.
It is lower for classes with fewer places in the queue."""

Keep = Callable[[BaseModel], Awaitable[None]]
"""Takes each object that ends an answer before it is sent, and may change it."""

NumberedPart = tuple[int, Sequence[Chunk]]
"""Index of a prompt in its request, and chunks of the answer to it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One checked request on its way to a response."""

    body: GenerateRequest
    requests: list[EngineRequest]
    """One engine request per prompt."""
    http: Request
    builder: ResponseBuilder
    usage: ResponseUsage
    notice: str
    """Sentence that goes with every figure of the engine; usually empty."""
    keep: Keep | None
    calls: Sequence[EngineCall | None]
    """The trace of each engine request; None for each request if the HTTP request is not traced."""
    meter: Meter
    places: int
    """Maximum number of sequences of the class of service that wait in an engine."""

    async def count(self) -> None:
        """Store the usage of the answer. Call it before the end of the answer is sent."""
        await self.meter.count(Exchange.of(self.http.scope))

    def headers(self) -> dict[str, str]:
        """Return the headers of the response, which go out with the first chunk of a stream."""
        headers = {"x-mars-threshold": self.usage.threshold_range}
        if self.usage.max_tokens is not None:
            headers["x-mars-max-tokens"] = str(self.usage.max_tokens)
        if self.notice:
            headers["x-mars-notice"] = ascii(self.notice)[1:-1]
        return headers

    @property
    def at_once(self) -> int:
        """Number of prompts of this request that run at a time."""
        return max(1, min(MAX_RUNNING_CHOICES, self.places) // self.body.candidates)


async def answer_events(
    generation: Generation, first: NumberedPart, arriving: MergedCalls[Sequence[Chunk]]
) -> AsyncGenerator[str | NamedEvent, None]:
    """Yield the events of a stream. An error after the first part becomes an event."""
    options = generation.body.stream_options
    builder = generation.builder
    usage = generation.usage
    exchange = Exchange.of(generation.http.scope)
    usage_in_all = options.include_usage and options.continuous_usage_stats
    sent = 0
    try:
        arrived: NumberedPart | None = first
        while arrived:
            prompt, chunks = arrived
            for chunk in chunks:
                answer = replace(chunk, index=prompt * generation.body.n + chunk.index)
                for part in split_by_token(answer) if options.single_tokens else (answer,):
                    for event in builder.chunks(part):
                        if usage_in_all:
                            event = event.model_copy(update={"usage": usage.usage(ended=False)})
                        yield sent_event(event)
                        sent += 1
            if arrived := await arriving.next():
                count_chunks(arrived[1], usage)
        await generation.count()
        if options.include_usage:
            for event in builder.last_chunks(usage.usage()):
                if generation.keep:
                    await generation.keep(event)
                yield sent_event(event)
        if exchange.api.ends_with_done:
            yield DONE
    except MarsRayError as error:
        refusal = exchange.api.translated(api_error(error, request_id=exchange.request_id))
        exchange.code = refusal.code  # for the log, because the status that was sent is 200
        form = exchange.api
        fields = form.stream_error(refusal, sent) if form.stream_error else form.body(refusal, exchange.request_id)
        body = json.dumps(fields)
        yield NamedEvent(form.error_event, body) if form.error_event else body


def count_chunks(chunks: Sequence[Chunk], usage: ResponseUsage) -> None:
    """Add chunks to the usage. Raises the error of a sequence that failed or was cancelled."""
    for chunk in chunks:
        usage.add(chunk)
    for chunk in chunks:
        if chunk.finished and chunk.finished.error:
            raise chunk.finished.error
        if chunk.finished and chunk.finished.reason == "cancelled":
            raise UnavailableError("the request was cancelled by the server. Try again.")
