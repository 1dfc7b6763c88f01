"""`AsyncLLM`: `LLM` for asyncio programs. The model decodes in a separate process."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.card import resolve_adapter, resolve_adapters, unnamed
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import options_by_name
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.llm.outputs import RequestCollector, RequestOutput
from mars_ray.llm.requests import (
    Conversation,
    Schema,
    TextOrTokens,
    ToolChoice,
    Tools,
    as_conversation,
    decode_params,
    encode_conversations,
    encode_prompt,
    make_requests,
)
from mars_ray.model.dtype import DtypeOrAuto, check_dtype
from mars_ray.model.folder import open_model
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.usable_cpus import usable_cpus


class AsyncLLM:
    """A model that any number of coroutines in one event loop can use.

    Use it as `async with AsyncLLM("bundled") as llm:`, which starts the process. Parameters and errors are the same as
    for `LLM`. Errors of the options are raised at once, other errors of `LLM()` when the block is entered.
    """

    engine: AsyncEngine
    tokenizer: PreTrainedTokenizerBase
    default_sampling_params: SamplingParams
    """Sampling parameters from the model's generation_config.json, used if a call passes none."""

    def __init__(
        self,
        model: str | Path = "bundled",
        *,
        adapter: str | Path | None = None,
        dtype: DtypeOrAuto = "auto",
        **options: Any,
    ) -> None:
        self._model = model
        self._adapter = adapter
        check_dtype(dtype)
        self._dtype = dtype
        self._options = options_by_name(options)

    async def __aenter__(self) -> Self:
        model = await asyncio.to_thread(open_model, self._model)
        self.default_sampling_params = SamplingParams(**generation_defaults(model.folder))
        self.tokenizer = await asyncio.to_thread(model.load_tokenizer)
        adapter = await asyncio.to_thread(resolve_adapter, self._adapter)
        spec = EngineSpec(
            folder=model.folder,
            dtype=self._dtype,
            threads=usable_cpus(),
            options=self._options,
            adapters=unnamed(adapter),
        )
        self.engine, _ = await AsyncEngine.start(spec)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def set_adapters(self, adapters: Mapping[str, str | Path]) -> None:
        """Have exactly these adapters with a name: folders, URLs or hub names, keyed by the names that `adapter` takes.

        Answers that have begun keep their adapter. Adapters beyond `adapter_memory_gib` are loaded when they are
        needed. Raises `AdapterError` for the first one that cannot be used; then nothing has changed.
        """
        folders = await asyncio.to_thread(resolve_adapters, None, adapters)
        await self.engine.set_adapters({name: folder for name, folder in folders.items() if name is not None})

    async def generate(
        self,
        prompt: TextOrTokens,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        adapter: str | None = None,
        schema: Schema | None = None,
    ) -> RequestOutput:
        """Continue a prompt, as `LLM.generate` does. Cancelling the task cancels the request."""
        decode = decode_params(mode, threshold, adapter)
        encoded = [encode_prompt(self.tokenizer, prompt)]
        return await self._answer(self._request(encoded, sampling_params, decode, schema))

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        adapter: str | None = None,
        schema: Schema | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice = "auto",
    ) -> RequestOutput:
        """Answer a conversation, as `LLM.chat` does. Cancelling the task cancels the request."""
        decode = decode_params(mode, threshold, adapter)
        encoded, plans = encode_conversations(self.tokenizer, [as_conversation(messages)], tools, tool_choice)
        return await self._answer(self._request(encoded, sampling_params, decode, schema, plans), *plans)

    async def stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        adapter: str | None = None,
        schema: Schema | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Answer a conversation, and yield chunks with the `text` and `tokens` that each step adds to an answer.

        The `index` of a chunk is the number of its answer. In the last chunk of each answer, `finished` is set. To stop
        early, call `aclose` or cancel the task.
        """
        decode = decode_params(mode, threshold, adapter)
        encoded, _ = encode_conversations(self.tokenizer, [as_conversation(messages)])
        async for chunk in self.engine.generate(self._request(encoded, sampling_params, decode, schema)):
            yield chunk

    def _request(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling_params: SamplingParams | None,
        decode: DecodeParams,
        schema: Schema | None,
        plans: Sequence[AnswerPlan] = (),
    ) -> Request:
        default = self.default_sampling_params
        [request] = make_requests(prompts, sampling_params, decode, schema, default=default, plans=plans)
        return request

    async def _answer(self, request: Request, plan: AnswerPlan | None = None) -> RequestOutput:
        collector = RequestCollector(request, self.tokenizer, plan)
        async for chunk in self.engine.generate(request, stream=False):
            collector.add(chunk)
        return collector.output()
