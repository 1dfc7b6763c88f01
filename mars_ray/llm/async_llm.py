"""`AsyncLLM`: the same as `LLM`, for programs on asyncio; the model decodes in a process of its own."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Self

from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.card import resolve_adapter, unnamed
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import DEFAULT_OPTIONS, EngineOptions
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.llm.outputs import RequestCollector, RequestOutput
from mars_ray.llm.requests import (
    Conversation,
    Prompt,
    Schema,
    encode_conversation,
    encode_prompt,
    make_requests,
)
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.tokenizer import load_tokenizer
from mars_ray.usable_cpus import usable_cpus


class AsyncLLM:
    """A model behind asyncio, for any number of coroutines of one event loop.

    Use it as `async with AsyncLLM("bundled") as llm:`; entering starts the process and may raise `ModelError` and
    `ConfigError`. The parameters are those of `LLM`.
    """

    engine: AsyncEngine
    tokenizer: PreTrainedTokenizerBase
    default_sampling_params: SamplingParams
    """How prompts without sampling parameters are sampled: as the model's generation_config.json says."""

    def __init__(
        self,
        model: str = "bundled",
        *,
        adapter: str | None = None,
        dtype: DtypeOrAuto = "auto",
        options: EngineOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._model, self._adapter, self._dtype, self._options = model, adapter, dtype, options

    async def __aenter__(self) -> Self:
        folder = (await asyncio.to_thread(resolve_model, self._model)).absolute()
        found = await asyncio.to_thread(check_folder, folder)
        self.default_sampling_params = SamplingParams(**generation_defaults(folder))
        self.tokenizer = await asyncio.to_thread(load_tokenizer, folder, found.config, found.tokenizer_is_custom)
        adapter = await asyncio.to_thread(resolve_adapter, self._adapter)
        spec = EngineSpec(
            folder=folder, dtype=self._dtype, threads=usable_cpus(), options=self._options, adapters=unnamed(adapter)
        )
        self.engine, _ = await AsyncEngine.start(spec)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        schema: Schema | None = None,
    ) -> RequestOutput:
        """Continue a prompt; parameters and errors are those of `LLM.generate`. Cancelling the task ends the work."""
        encoded = encode_prompt(self.tokenizer, prompt)
        request = self._request(encoded, sampling_params, threshold, mode, schema)
        return await self._answer(request)

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        schema: Schema | None = None,
    ) -> RequestOutput:
        """Answer a conversation; parameters and errors are those of `LLM.chat`. Cancelling the task ends the work."""
        encoded = encode_conversation(self.tokenizer, messages)
        request = self._request(encoded, sampling_params, threshold, mode, schema)
        return await self._answer(request)

    async def stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        schema: Schema | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Answer a conversation, and yield what each step gives: `text` and `tokens` of the answer with number `index`.

        The last chunk of each answer has `finished` set. Leave it early with `aclose`, or by cancelling the task.
        """
        encoded = encode_conversation(self.tokenizer, messages)
        request = self._request(encoded, sampling_params, threshold, mode, schema)
        async for chunk in self.engine.generate(request):
            yield chunk

    def _request(
        self,
        prompt: tuple[int, ...],
        sampling_params: SamplingParams | None,
        threshold: float | None,
        mode: Mode | str,
        schema: Schema | None,
    ) -> Request:
        [request] = make_requests(
            [prompt],
            sampling_params,
            threshold=threshold,
            mode=mode,
            schema=schema,
            default=self.default_sampling_params,
        )
        return request

    async def _answer(self, request: Request) -> RequestOutput:
        collector = RequestCollector(request, self.tokenizer)
        async for chunk in self.engine.generate(request, stream=False):
            collector.add(chunk)
        return collector.output()
