"""One tokenizer process for all endpoints of the bundled model: each start takes two seconds of processor time."""

import asyncio
import atexit
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from mars_ray.chat.call_format import AnswerFormat, ReasoningParserName, ToolParserName
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.infill import InfillMarkers
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.tokenizer_process import RenderedPrompt, TokenizerProcess

BUNDLED = resolve_model("bundled")

T = TypeVar("T")


class SharedTokenizer:
    """A `TokenizerProcess` on an event loop of its own, which endpoints on other loops call and do not close."""

    def __init__(self, process: TokenizerProcess) -> None:
        self._process = process
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        atexit.register(lambda: asyncio.run_coroutine_threadsafe(process.close(), self._loop).result())

    @property
    def answer_format(self) -> AnswerFormat:
        return self._process.answer_format

    @property
    def infill(self) -> InfillMarkers | None:
        return self._process.infill

    async def start(self) -> None:
        await self._there(self._process.start())

    async def encode(self, texts: Sequence[str], key: str = "") -> list[list[int]]:
        return await self._there(self._process.encode(texts, key))

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], key: str = "", tools: Sequence[Mapping[str, Any]] = ()
    ) -> RenderedPrompt:
        return await self._there(self._process.apply_chat_template(messages, key, tools))

    async def decode(self, tokens: Sequence[int], key: str = "") -> str:
        return await self._there(self._process.decode(tokens, key))

    async def close(self) -> None:
        """Leave the process to the next endpoint."""

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


@cache
def _tokenizer(tool_parser: ToolParserName | None, reasoning_parser: ReasoningParserName | None) -> SharedTokenizer:
    return SharedTokenizer(TokenizerProcess(BUNDLED, tool_parser=tool_parser, reasoning_parser=reasoning_parser))


def sharing_tokenizer(endpoint: Endpoint, config: ServeConfig, folder: Path) -> Endpoint:
    """Let an endpoint of the bundled model use the shared process; return it."""
    if folder == BUNDLED:
        endpoint.tokenizer = _tokenizer(config.tool_call_parser, config.reasoning_parser)  # type: ignore[assignment]
    return endpoint
