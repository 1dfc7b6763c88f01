"""The model's tokenizer and chat template, in a separate process that can be killed.

In:    a model folder; texts, messages or token ids.
Out:   ids or text; a typed error for input that the template or the tokenizer rejects.
Never: blocks the event loop; waits for a prompt longer than `WALL_SECONDS`.

A sandbox prevents a chat template from doing harm, but not from running for ever (CVE-2026-115911), and a thread cannot
be stopped. So a process renders one prompt at a time. If a prompt takes too long, the process is killed and restarted.
The limit counts processor time, so that a busy machine does not refuse ordinary prompts.
API keys take turns, so that a caller waits for at most one prompt from every other key.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from mars_ray.chat.call_format import (
    NO_TOOLS,
    Marker,
    ReasoningParserName,
    ToolParserName,
    answer_format,
)
from mars_ray.engine.process.json_process import JsonProcess
from mars_ray.errors import ModelError, RequestError, UnavailableError
from mars_ray.openai_api.infill import InfillMarkers
from mars_ray.serve.http.tokenizer_worker import CPU_SECONDS

WALL_SECONDS = 60.0
"""Maximum elapsed seconds of one prompt, which only a process that hangs or does not run reaches."""


class Turns:
    """A fair lock for one event loop: keys take turns, and callers of one key are served in order."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._of_key = WeakValueDictionary[str, asyncio.Lock]()
        """Locks of the keys that hold or await a turn. Each has at most one caller in the queue of all keys."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for the turn of `key`, and hold it within the block."""
        own = self._of_key.setdefault(key, asyncio.Lock())
        async with own, self._all:
            yield


class RenderedPrompt(NamedTuple):
    """The prompt of a conversation."""

    tokens: list[int]
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning, so that the answer continues it."""


class TokenizerProcess:
    """The tokenizer of the model in `folder`. Call `start` first, and use it within one event loop.

    The other methods raise `RequestError` for a prompt that cannot be rendered, tokenised or decoded, and
    `UnavailableError` if the process hangs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tool_parser: ToolParserName | None = None,
        reasoning_parser: ReasoningParserName | None = None,
    ) -> None:
        self._folder = folder
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self.answer_format = NO_TOOLS
        """Notation of tool calls and reasoning, known once the process has started."""
        self.infill: InfillMarkers | None = None
        """Markers for filling in the middle, once the process has started; None if the model has none."""
        self._turns = Turns()
        self._worker: JsonProcess | None = None

    async def start(self) -> None:
        """Start the process before the first prompt. Raises `ModelError` if the folder has no usable tokenizer."""
        async with self._turns.turn(""):
            await self._started()

    async def encode(self, texts: Sequence[str], key: str = "") -> list[list[int]]:
        """Wait for the turn of the caller `key`, then return the ids of each text."""
        prompts: list[list[int]] = (await self._ask(key, {"texts": list(texts)}))["prompts"]
        return prompts

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], key: str = "", tools: Sequence[Mapping[str, Any]] = ()
    ) -> RenderedPrompt:
        """Return a conversation up to the beginning of the assistant's answer."""
        reply = await self._ask(key, {"messages": list(messages), "tools": list(tools)})
        return RenderedPrompt(reply["prompts"][0], reply["in_reasoning"])

    async def decode(self, tokens: Sequence[int], key: str = "") -> str:
        """Return the text of ids, including special tokens."""
        text: str = (await self._ask(key, {"tokens": list(tokens)}))["text"]
        return text

    async def close(self) -> None:
        """Kill the process."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            await worker.close()

    async def _ask(self, key: str, task: dict[str, Any]) -> dict[str, Any]:
        # Shield the task: when a caller leaves, its answer must still be read from the pipe, because the other callers
        # use the same process.
        answering = asyncio.create_task(self._answer(key, task))
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        reply = await asyncio.shield(answering)
        if "error" in reply:
            raise RequestError(reply["error"])
        return reply

    async def _answer(self, key: str, task: dict[str, Any]) -> dict[str, Any]:
        async with self._turns.turn(key):
            try:
                worker = await self._started()
            except ModelError as error:
                raise UnavailableError("the tokenizer cannot be started again now. Try again later.") from error
            try:
                async with asyncio.timeout(WALL_SECONDS):
                    worker.send(task)
                    await worker.drain()
                    return await worker.receive()
            except TimeoutError:
                await self.close()
                raise UnavailableError(f"the tokenizer did not answer within {WALL_SECONDS:g} s. Try again.") from None
            except (ConnectionError, ValueError):
                await self.close()
                if worker.process.returncode == -signal.SIGPROF:
                    reason = f"the prompts took more than {CPU_SECONDS:g} s of processor time; send less text."
                else:
                    reason = "the tokenizer process died on this prompt; shorten it."
                raise RequestError(reason) from None

    async def _started(self) -> JsonProcess:
        if self._worker is None or self._worker.ended:
            try:
                worker, ready = await JsonProcess.start(
                    "mars_ray.serve.http.tokenizer_worker",
                    str(self._folder),
                    env={"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"},
                )
            except (TimeoutError, ConnectionError):
                raise ModelError(f"{self._folder}: the tokenizer did not start; see the lines above.") from None
            if "error" in ready:
                await worker.close()
                raise ModelError(ready["error"])
            markers = {text: Marker(*marker) for text, marker in ready["markers"].items()}
            self.answer_format = answer_format(ready["template"], markers, self._tool_parser, self._reasoning_parser)
            self.infill = ready["infill"] and tuple(ready["infill"])
            self._worker = worker
        return self._worker
