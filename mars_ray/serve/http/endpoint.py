"""Answer a request of the API, from its checked body to its response.

In:    request bodies; engines behind an `EngineClient`; a tokenizer behind `TokenizerProcess`.
Out:   Starlette responses, complete or streamed; each request's usage in its `Exchange`, for the log and the metrics.
Never: starts work for a client that has disconnected, or sends a status that a later error could contradict.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from mars_ray.chat.conversation import plain_messages, template_text
from mars_ray.chat.messages import Message
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import Request as EngineRequest
from mars_ray.engine.service_class import BATCH_CLASS, waiting_places
from mars_ray.errors import GrammarError
from mars_ray.openai_api.answer_plan import AnswerPlan, plan_answer
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.choices import answers_of
from mars_ray.openai_api.infill import infill_prompt
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.prompt_scores import shown_prompt, shown_prompts
from mars_ray.openai_api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from mars_ray.openai_api.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    ResponseMetadata,
)
from mars_ray.openai_api.tools import OfferedTools, conversation, tools_of
from mars_ray.openai_api.translate import (
    check_limits,
    check_messages,
    check_text_length,
    engine_requests,
    lowered_max_tokens,
)
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.engine_calls import EngineCalls
from mars_ray.serve.http.extension import Meter
from mars_ray.serve.http.generation import Generation, Keep, answer_events, count_chunks
from mars_ray.serve.http.streams import (
    EventStreamResponse,
    MergedCalls,
    cancel_tasks,
    gather_or_cancel,
    run_unless_disconnected,
)
from mars_ray.serve.http.tokenizer_process import RenderedPrompt, TokenizerProcess
from mars_ray.serve.middleware.exchange import Exchange, Operation
from mars_ray.serve.replicas.engine_client import EngineClient
from mars_ray.traces.engine_call import EngineCall

MakeBuilder = Callable[[ResponseMetadata, AnswerPlan, Sequence[int]], ResponseBuilder]
"""Makes the builder of a response; the last argument is the prompt as tokens."""


class Endpoint:
    """Answers chat and completion requests for one model."""

    def __init__(self, client: EngineClient, config: ServeConfig, folder: Path, meter: Meter | None = None) -> None:
        """Answer with the model in `folder`. Without a `meter`, usage is neither limited nor counted."""
        self.name = config.model_name
        self.client = client
        self.calls = EngineCalls(client, config.migration_limit)
        self.tokenizer = TokenizerProcess(
            folder, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
        )
        self.limits = config.limits
        self._meter = meter or Meter()
        self._default_mode = Mode(config.mode)
        self._default_sampling = generation_defaults(folder)
        self._log_prompts = config.log_prompts
        self._places = waiting_places(config.classes, config.engine.max_waiting_seqs)
        self._batch_class = BATCH_CLASS if BATCH_CLASS in config.class_names else None
        self.adapters: Sequence[str] | None = None
        """Names of the adapters; None means those that the engines had when they started."""
        self._model: ModelInfo | None = None
        self._longest_token_bytes = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tokenizer and watch the engines within the block. Raises `ModelError`."""
        watching = asyncio.create_task(self.client.watch())
        try:
            await self.tokenizer.start()
            yield
        finally:
            await cancel_tasks(watching)
            await self.tokenizer.close()

    @property
    def knows_model(self) -> bool:
        """Whether an engine has told the facts about the model."""
        return self._model is not None

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model. Raises `MarsRayError` until an engine has answered once."""
        if self._model is None:
            self._model = await self.client.model_info()
            self._longest_token_bytes = max(map(len, self._model.engine.token_bytes))
        return self._model if self.adapters is None else replace(self._model, adapters=tuple(self.adapters))

    async def check_model(self, name: str | None) -> ModelInfo:
        """Return the facts about a model or adapter; None means the main model. Raises a 404 for an unknown name."""
        model = await self.model_info()
        if (info := model.by_name(name)) is None:
            names = ", ".join(map(repr, (model.name, *model.served_names, *model.adapters)))
            message = f"the model {(name or '')[:NAME_CHARS]!r} does not exist here. Available: {names}."
            raise ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")
        return info

    def requests_of(
        self,
        body: GenerateRequest,
        prompts: list[list[int]],
        model: ModelInfo,
        plan: AnswerPlan | None = None,
        *,
        tenant: str,
        service_class: str,
    ) -> tuple[list[EngineRequest], ResponseUsage]:
        """Return the request to the engine for each prompt, and the usage that counts their answers.

        `service_class` is the caller's. Requests with `service_tier: flex` belong to the batch class, if it exists.
        """
        flex = self._batch_class if body.service_tier == "flex" else None
        requests = engine_requests(
            body,
            prompts,
            request_id=uuid4().hex,  # a new id, because callers may send the same id twice
            tenant=tenant,
            service_class=flex or service_class,
            model=model,
            limits=self.limits,
            default_mode=self._default_mode,
            default_sampling=self._default_sampling,
            plan=plan,
        )
        return requests, ResponseUsage(
            prompt_tokens=sum(map(len, prompts)), max_tokens=lowered_max_tokens(body, requests)
        )

    async def chat(self, body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""

        def builder(metadata: ResponseMetadata, plan: AnswerPlan, prompt: Sequence[int]) -> ResponseBuilder:
            return ChatResponseBuilder(metadata, plan, shown_prompt(body, prompt))

        return await self.converse(body, http, response_id("chatcmpl", http), builder)

    async def converse(
        self,
        body: ChatCompletionRequest,
        http: Request,
        id: str,
        make_builder: MakeBuilder,
        keep: Keep | None = None,
    ) -> Response:
        """Answer a conversation. The builder makes a response with this id, which `keep` gets before it is sent."""
        model = await self.check_model(body.model)
        check_limits(body, self.limits)
        exchange = Exchange.of(http.scope)
        if self._log_prompts:
            exchange.prompt = [message.model_dump(exclude_unset=True) for message in body.messages]
        prompt, plan = await self.chat_prompt(body, model, exchange.key or "")
        builder = make_builder(_metadata(model, id, http), plan, prompt)
        try:
            return await self._generate(body, model, [prompt], http, builder, plan, keep)
        except GrammarError as error:
            raise ApiError.bad_request(str(error), plan.param) from error

    async def complete(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        model = await self.check_model(body.model)
        check_limits(body, self.limits)
        if self._log_prompts:
            Exchange.of(http.scope).prompt = "\n".join(body.texts)
        texts = body.texts
        if body.suffix:
            texts = [infill_prompt(self.tokenizer.infill, text, body.suffix) for text in texts]
        for text in texts:
            check_text_length([text], model, self._longest_token_bytes)
        key = Exchange.of(http.scope).key or ""
        prompts = await self.tokenizer.encode(texts, key) if texts else body.ids
        metadata = _metadata(model, response_id("cmpl", http), http)
        shown = shown_prompts(body, prompts, metadata.bytes_of)
        return await self._generate(body, model, prompts, http, CompletionResponseBuilder(metadata, shown, body.n))

    async def chat_prompt(
        self, body: ChatCompletionRequest, model: ModelInfo, key: str
    ) -> tuple[list[int], AnswerPlan]:
        """Return the prompt tokens of a checked request and the plan of its answer. Raises `ApiError` and
        `RequestError`."""
        offered = tools_of(body, self.limits)
        prompt = await self._rendered(body.messages, offered, model, key)
        form = self.tokenizer.answer_format
        return prompt.tokens, plan_answer(
            offered,
            form,
            in_reasoning=prompt.in_reasoning,
            response_format=body.response_format,
            budget=body.thinking_token_budget,
        )

    async def _rendered(
        self, messages: Sequence[Message], offered: OfferedTools | None, model: ModelInfo, key: str
    ) -> RenderedPrompt:
        talk = conversation(plain_messages(messages), offered, self.tokenizer.answer_format)
        check_text_length(template_text(talk), model, self._longest_token_bytes)
        return await self.tokenizer.apply_chat_template(talk.messages, key, talk.tools)

    async def tokenize(self, body: TokenizeRequest, key: str) -> TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        model = await self.check_model(body.model)
        if body.messages is not None:
            check_messages(body.messages, self.limits)
            tokens = (await self._rendered(body.messages, None, model, key)).tokens
        else:
            text = body.prompt or ""
            check_text_length([text], model, self._longest_token_bytes)
            [tokens] = await self.tokenizer.encode([text], key)
        return TokenizeResponse(count=len(tokens), max_model_len=model.engine.max_model_len, tokens=tokens)

    async def detokenize(self, body: DetokenizeRequest, key: str) -> DetokenizeResponse:
        """Return the text of token ids."""
        model = await self.check_model(body.model)
        if len(body.tokens) > (limit := model.engine.max_model_len):
            raise ApiError.bad_request(f"tokens holds {len(body.tokens)} ids; the maximum is {limit}.", "tokens")
        unknown = [token for token in body.tokens if not 0 <= token < model.engine.vocab_size]
        if unknown:
            raise ApiError.bad_request(
                f"{unknown[0]} is not a token id; ids go from 0 to {model.engine.vocab_size - 1}.", "tokens"
            )
        return DetokenizeResponse(prompt=await self.tokenizer.decode(body.tokens, key))

    async def _generate(
        self,
        body: GenerateRequest,
        model: ModelInfo,
        prompts: list[list[int]],
        http: Request,
        builder: ResponseBuilder,
        plan: AnswerPlan | None = None,
        keep: Keep | None = None,
    ) -> Response:
        exchange = Exchange.of(http.scope)
        requests, exchange.usage = self.requests_of(
            body, prompts, model, plan, tenant=exchange.key or "", service_class=exchange.service_class
        )
        answer_tokens = sum(request.sampling.n * request.sampling.max_tokens for request in requests)
        await self._meter.admit(exchange, model.name, exchange.usage.prompt_tokens, answer_tokens)
        calls: Sequence[EngineCall | None] = [None] * len(requests)
        if exchange.trace:
            operation: Operation = "text_completion" if isinstance(body, CompletionRequest) else "chat"
            traced = exchange.trace.generate(operation, model.name, requests, streamed=body.stream)
            requests = [call.request for call in traced]
            calls = traced
        # A model that was stored before the endpoint had this class lacks it. Its engine refuses the request, so any
        # number will do here.
        places = self._places.get(requests[0].service_class, 1)
        generation = Generation(
            body, requests, http, builder, exchange.usage, model.engine.notice, keep, calls, self._meter, places
        )
        return await (self._stream(generation) if body.stream else self._full(generation))

    async def _full(self, generation: Generation) -> Response:
        usage = generation.usage
        arrived: list[list[Chunk]] = [[] for _ in generation.requests]
        running = asyncio.Semaphore(generation.at_once)

        async def collect(request: EngineRequest, chunks: list[Chunk], call: EngineCall | None) -> None:
            async with running:
                await self.calls.collect(request, chunks, call)

        body = generation.body
        try:
            await run_unless_disconnected(
                generation.http.receive,
                gather_or_cancel(list(map(collect, generation.requests, arrived, generation.calls))),
            )
        except BaseException:  # what was decoded counts, although the whole answer does not come about
            for chunk in chain.from_iterable(arrived):
                usage.add(chunk)
            raise
        count_chunks(list(chain.from_iterable(arrived)), usage)
        answers = [
            answer
            for prompt, chunks in enumerate(arrived)
            for answer in answers_of(chunks, body.n, prompt * body.n, logprobs=body.shows_logprobs)
        ]
        response = generation.builder.full(answers, usage.usage())
        await generation.count()
        if generation.keep:
            await generation.keep(response)
        return Response(
            response.model_dump_json(exclude_unset=True),
            media_type="application/json",
            headers=generation.headers(),
        )

    async def _stream(self, generation: Generation) -> Response:
        arriving = MergedCalls[Sequence[Chunk]](
            [
                partial(self.calls.stream, request, usage=generation.usage, call=call)
                for request, call in zip(generation.requests, generation.calls, strict=True)
            ],
            generation.at_once,
        )
        # Send the status only with the first part: until then, an error can still have its own status.
        try:
            first = await run_unless_disconnected(generation.http.receive, arriving.next())
            assert first is not None, "an answer has at least one chunk"
            count_chunks(first[1], generation.usage)
        except BaseException:
            await arriving.close()
            raise
        events = answer_events(generation, first, arriving)
        return EventStreamResponse(events, generation.headers(), arriving.close)


def response_id(prefix: str, http: Request) -> str:
    """Return an id for the response to a request, with the id of the request."""
    return f"{prefix}-{Exchange.of(http.scope).request_id}"


def _metadata(model: ModelInfo, id: str, http: Request) -> ResponseMetadata:
    return ResponseMetadata(
        id=id,
        created=int(Exchange.of(http.scope).arrived_unix_s),
        model=model.name,
        token_bytes=model.engine.token_bytes,
        calls_id=uuid4().hex,
    )
