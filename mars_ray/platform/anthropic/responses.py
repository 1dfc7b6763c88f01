"""Turn chat completions into the messages and stream events of the Messages API.

In:    the chunks of one answer, which the builder of chat completions parts into text, reasoning and calls.
Out:   one message, or the events of a stream, from `message_start` to `message_stop`.
Never: depends on how the answer was cut: the blocks of a stream equal those of the message.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import CompletionUsage
from pydantic import BaseModel

from mars_ray.chat.conversation import read_arguments
from mars_ray.engine.chunk import Chunk
from mars_ray.openai_api.choices import ChoiceFinishReason
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(BaseModel):
    """A text."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """The reasoning before the answer. Its signature is empty, because this server does not check it."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(BaseModel):
    """Tokens of a request and its answer."""

    input_tokens: int
    """Tokens of the prompt that were not in the cache."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    max_tokens: int | None = None
    """Maximum tokens of the answer, if lowered below the value in the request."""


class MessageResponse(BaseModel):
    """Response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream. Its fields depend on its type."""

    type: str
    message: MessageResponse | None = None
    index: int | None = None
    content_block: Content | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None


class MessageResponseBuilder:
    """Builds the message or the events of one answer; see `ResponseBuilder`."""

    def __init__(
        self, chat: ChatResponseBuilder, metadata: ResponseMetadata, stops: Sequence[str], prompt_tokens: int
    ) -> None:
        self._chat = chat
        self._metadata = metadata
        self._stops = stops
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._stop_reason: StopReason | None = None
        self._started = False
        self._kind = ""
        """Type of the block that is open; empty if none is."""
        self._index = -1

    def full(self, answers: Sequence[Chunk], usage: CompletionUsage) -> MessageResponse:
        """Return the complete message."""
        [choice] = self._chat.full(answers, usage).choices
        self._tokens += answers[0].tokens
        message = choice.message
        content: list[Content] = []
        if reasoning := getattr(message, "reasoning_content", None):
            content.append(ThinkingContent(type="thinking", thinking=reasoning, signature=""))
        if message.content:
            content.append(TextContent(type="text", text=message.content))
        for call in message.tool_calls or ():
            if call.type == "function":
                arguments = read_arguments(call.function.arguments) or {}
                content.append(ToolUseContent(type="tool_use", id=call.id, name=call.function.name, input=arguments))
        return self._message(content, _usage(usage), self._reason(choice.finish_reason))

    def chunks(self, part: Chunk) -> Iterator[MessageEvent]:
        """Yield the events of a part of the answer."""
        self._tokens += part.tokens
        if not self._started:
            self._started = True
            usage = MessageUsage(input_tokens=self._prompt_tokens, output_tokens=0)
            yield MessageEvent(type="message_start", message=self._message([], usage, None))
        for chunk in self._chat.chunks(part):
            for choice in chunk.choices:
                yield from self._events(choice.delta)
                if choice.finish_reason:
                    self._stop_reason = self._reason(choice.finish_reason)

    def last_chunks(self, usage: CompletionUsage) -> Iterator[MessageEvent]:
        """Yield the end of the last block, the stop reason with the usage, and the end of the message."""
        yield from self._close()
        stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence(self._stop_reason)}
        yield MessageEvent(type="message_delta", delta=stop, usage=_usage(usage))
        yield MessageEvent(type="message_stop")

    def _events(self, delta: ChoiceDelta) -> Iterator[MessageEvent]:
        if reasoning := getattr(delta, "reasoning_content", None):
            yield from self._open(ThinkingContent(type="thinking", thinking="", signature=""))
            yield self._delta("thinking_delta", thinking=reasoning)
        if delta.content:
            yield from self._open(TextContent(type="text", text=""))
            yield self._delta("text_delta", text=delta.content)
        for call in delta.tool_calls or ():
            if call.id and call.function:
                yield from self._close()
                name = call.function.name or ""
                yield from self._open(ToolUseContent(type="tool_use", id=call.id, name=name, input={}))
            if call.function and call.function.arguments:
                yield self._delta("input_json_delta", partial_json=call.function.arguments)

    def _open(self, block: Content) -> Iterator[MessageEvent]:
        """Begin a block, unless one of its type is open."""
        if self._kind == block.type:
            return
        yield from self._close()
        self._kind = block.type
        self._index += 1
        yield MessageEvent(type="content_block_start", index=self._index, content_block=block)

    def _delta(self, type: str, **text: str) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._index, delta={"type": type, **text})

    def _close(self) -> Iterator[MessageEvent]:
        if self._kind:
            self._kind = ""
            yield MessageEvent(type="content_block_stop", index=self._index)

    def _message(self, content: list[Content], usage: MessageUsage, stop_reason: StopReason | None) -> MessageResponse:
        return MessageResponse(
            id=self._metadata.id,
            type="message",
            role="assistant",
            model=self._metadata.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence(stop_reason),
            usage=usage,
        )

    def _reason(self, reason: ChoiceFinishReason | str) -> StopReason:
        if reason == "tool_calls":
            return "tool_use"
        if reason == "length":
            return "max_tokens"
        return "end_turn" if self._matched() is None else "stop_sequence"

    def _stop_sequence(self, stop_reason: StopReason | None) -> str | None:
        return self._matched() if stop_reason == "stop_sequence" else None

    def _matched(self) -> str | None:
        """Return the stop sequence that ends first in the bytes of the answer, which the engine leaves out of the
        text; None if the answer ended by itself."""
        text = b"".join(map(self._metadata.bytes_of, self._tokens))
        ends = [(at + len(stop.encode()), stop) for stop in self._stops if (at := text.find(stop.encode())) >= 0]
        return min(ends)[1] if ends else None


def _usage(usage: CompletionUsage) -> MessageUsage:
    details = usage.prompt_tokens_details
    cached = (details and details.cached_tokens) or 0
    lowered = getattr(usage, "max_tokens", None)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        **({} if lowered is None else {"max_tokens": lowered}),
    )
