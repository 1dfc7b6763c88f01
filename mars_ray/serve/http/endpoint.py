"""One request of the API from its checked body to its response.

In:    bodies; engines behind a `Client`; a tokenizer behind `Prompts`.
Out:   Starlette responses, whole or streamed; a tally of each in the scope, for log and metrics.
Never: starts work for a client that left, or sends a status that a later error could make untrue.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import Request as EngineRequest
from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.openai_api.api_error import ApiError, api_error
from mars_ray.openai_api.chat_reply import ChatReply
from mars_ray.openai_api.completion_reply import CompletionReply
from mars_ray.openai_api.limits import RequestLimits
from mars_ray.openai_api.model_facts import ModelFacts
from mars_ray.openai_api.parts import joined, part_of, single_tokens
from mars_ray.openai_api.reply import Naming, Reply
from mars_ray.openai_api.translate import check, check_messages, engine_requests, template_messages
from mars_ray.openai_api.usage import Tally
from mars_ray.openai_api.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeReply,
    TokenizeRequest,
)
from mars_ray.serve.http.failover import collect_again, stream_again
from mars_ray.serve.http.merge import merged, once, one_of, together, unless_gone
from mars_ray.serve.http.prompts import Prompts
from mars_ray.serve.http.sse import DONE, EventStream
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.replicas.client import Client

AT_ONCE = 32
"""Answers of one request that are worked on; the others follow. A long list must not fill the queue of all callers."""

Arrived = tuple[int, Chunk]
"""Which prompt, and what was said of it."""


class Endpoint:
    """Answers chat and completion requests for one model."""

    def __init__(
        self, client: Client, prompts: Prompts, limits: RequestLimits, *, default_mode: Mode, log_prompts: bool
    ) -> None:
        self.client, self.prompts, self._limits = client, prompts, limits
        self._default_mode, self._log_prompts = default_mode, log_prompts
        self._facts: ModelFacts | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tokenizer, and what looks after the engines, within the block. Raises `ModelError`."""
        watching = asyncio.create_task(self.client.watch())
        try:
            await self.prompts.start()
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.prompts.close()

    async def facts(self) -> ModelFacts:
        """Return the facts of the model. Raises `MarsRayError` until an engine has been up once."""
        if self._facts is None:
            self._facts = await self.client.facts()
        return self._facts

    async def check_model(self, name: str | None) -> ModelFacts:
        """Return the facts of the model; a 404 for another name. None means whichever there is."""
        facts = await self.facts()
        if name not in (None, facts.name):
            message = f"the model {(name or '')[:80]!r} does not exist here; there is {facts.name!r}."
            raise ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")
        return facts

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        facts = await self.check_model(body.model)
        check(body, self._limits)
        messages = template_messages(body.messages)
        if self._log_prompts:
            _exchange(http).prompt = messages
        prompt = await self.prompts.render(messages)
        return await self._answer(body, [prompt], http, ChatReply(_naming(facts, "chatcmpl", http)), facts)

    async def complete(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        facts = await self.check_model(body.model)
        check(body, self._limits)
        if self._log_prompts:
            _exchange(http).prompt = "\n".join(body.texts)
        prompts = await self.prompts.encode(body.texts) if body.texts else body.ids
        return await self._answer(body, prompts, http, CompletionReply(_naming(facts, "cmpl", http)), facts)

    async def tokenize(self, body: TokenizeRequest) -> TokenizeReply:
        """Return the ids of a text or a conversation."""
        facts = await self.check_model(body.model)
        if body.messages is not None:
            check_messages(body.messages, self._limits)
            tokens = await self.prompts.render(template_messages(body.messages))
        else:
            [tokens] = await self.prompts.encode([body.prompt or ""])
        return TokenizeReply(count=len(tokens), max_model_len=facts.engine.positions, tokens=tokens)

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeReply:
        """Return the text of ids."""
        facts = await self.check_model(body.model)
        strange = [token for token in body.tokens if not 0 <= token < facts.engine.vocabulary]
        if strange:
            raise ApiError.bad_request(
                f"{strange[0]} is no token; ids go from 0 to {facts.engine.vocabulary - 1}.", "tokens"
            )
        return DetokenizeReply(prompt=await self.prompts.decode(body.tokens))

    async def _answer(
        self, body: GenerateRequest, prompts: list[list[int]], http: Request, reply: Reply, facts: ModelFacts
    ) -> Response:
        requests = engine_requests(
            body,
            prompts,
            request_id=uuid4().hex,  # not the caller's, which two may share
            tenant=_exchange(http).key or "",
            service_class=_exchange(http).service_class,
            facts=facts,
            limits=self._limits,
            default_mode=self._default_mode,
        )
        tally = _exchange(http).tally = Tally(prompt_tokens=sum(map(len, prompts)))
        if body.stream:
            return await self._streamed(body, requests, http, reply, tally)
        return await self._whole(body, requests, http, reply, tally)

    async def _whole(
        self, body: GenerateRequest, requests: list[EngineRequest], http: Request, reply: Reply, tally: Tally
    ) -> Response:
        turn = _turns(body)
        collecting = together(
            [once(turn, partial(collect_again, partial(self.client.collect, each))) for each in requests]
        )
        choices: dict[int, list[Chunk]] = {}
        for number, chunks in enumerate(await unless_gone(http.receive, collecting)):
            for chunk in chunks:
                _count(chunk, tally)
                choices.setdefault(number * body.n + chunk.index, []).append(chunk)
        parts = [joined([part_of(chunk, choice) for chunk in choices[choice]]) for choice in sorted(choices)]
        return Response(
            reply.whole(parts, tally.usage()).model_dump_json(exclude_unset=True),
            media_type="application/json",
            headers={"x-mars-threshold": tally.threshold_range},
        )

    async def _streamed(
        self, body: GenerateRequest, requests: list[EngineRequest], http: Request, reply: Reply, tally: Tally
    ) -> Response:
        turn = _turns(body)
        arriving = merged([one_of(turn, stream_again(partial(self.client.stream, each))) for each in requests])
        # The status is sent once there is something to say: until then an error is still a status of its own.
        try:
            first = await unless_gone(http.receive, anext(arriving))
            _count(first[1], tally)
        except BaseException:
            await arriving.aclose()
            raise
        events = _events(body, first, arriving, reply, tally, _exchange(http))
        return EventStream(events, {"x-mars-threshold": tally.threshold_range})


async def _events(
    body: GenerateRequest,
    first: Arrived,
    arriving: AsyncGenerator[Arrived, None],
    reply: Reply,
    tally: Tally,
    exchange: Exchange,
) -> AsyncGenerator[str, None]:
    """Yield the events of a stream; an error after the first of them is an event too."""
    asked = body.stream_options
    always = asked.include_usage and asked.continuous_usage_stats
    async with aclosing(arriving):
        try:
            arrived: Arrived | None = first
            while arrived:
                number, chunk = arrived
                part = part_of(chunk, number * body.n + chunk.index)
                for piece in single_tokens(part) if asked.single_tokens else (part,):
                    for spoken in reply.pieces(piece):
                        if always:
                            spoken = spoken.model_copy(update={"usage": tally.usage()})
                        yield spoken.model_dump_json(exclude_unset=True)
                arrived = await anext(arriving, None)
                if arrived:
                    _count(arrived[1], tally)
            if asked.include_usage:
                yield reply.closing(tally.usage()).model_dump_json(exclude_unset=True)
            yield DONE
        except MarsRayError as error:
            told = api_error(error, request_id=exchange.request_id)
            exchange.code = told.code  # the status said 200 long ago
            yield json.dumps(told.body())


def _turns(body: GenerateRequest) -> asyncio.Semaphore:
    """Return how many prompts of a request the engines have at a time."""
    return asyncio.Semaphore(max(1, AT_ONCE // body.n))


def _count(chunk: Chunk, tally: Tally) -> None:
    """Add a chunk to the tally. Raises the error its sequence ended with."""
    tally.add(chunk)
    if chunk.finished and chunk.finished.error:
        raise chunk.finished.error
    if chunk.finished and chunk.finished.reason == "cancelled":
        raise UnavailableError("the request was cancelled by the server. Try again.")


def _exchange(http: Request) -> Exchange:
    exchange: Exchange = http.state.exchange
    return exchange


def _naming(facts: ModelFacts, kind: str, http: Request) -> Naming:
    return Naming(
        id=f"{kind}-{_exchange(http).request_id}",
        created=int(_exchange(http).arrived_unix_s),
        model=facts.name,
        token_bytes=facts.engine.token_bytes,
    )
