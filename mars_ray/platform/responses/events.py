"""Turn chat completions into the objects and stream events of the Responses API.

In:    the chunks of one answer, which the builder of chat completions parts into text, reasoning and calls.
Out:   one response, or the events of a stream, from `response.created` to `response.completed`.
Never: depends on how the answer was cut: the items of a stream equal those of the response.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import CompletionUsage
from pydantic import BaseModel

from mars_ray.engine.chunk import Chunk
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.platform.responses.protocol import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete"]


class OutputPart(BaseModel):
    """A text of the answer or of its reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    """Always empty, because this server cites nothing. Reasoning has none."""


class OutputItem(BaseModel):
    """A message, the reasoning before it, or a call. The fields depend on the type."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputPart] = []
    summary: list[Any] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ResponseObject(BaseModel):
    """Response of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    """Whether the response is stored."""
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: dict[str, Any] | None


class ResponseEvent(BaseModel):
    """An event of a stream. Its fields depend on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    item: OutputItem | None = None
    part: OutputPart | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    logprobs: list[Any] = []


class ResponseObjectBuilder:
    """Builds the response or the events of one answer; see `ResponseBuilder`."""

    def __init__(self, chat: ChatResponseBuilder, metadata: ResponseMetadata, body: ResponsesRequest) -> None:
        self._chat = chat
        self._metadata = metadata
        self._body = body
        self._items: list[OutputItem] = []
        self._events = 0
        self._open = False
        """Whether the last item is still being written."""
        self._status: Status = "in_progress"

    def full(self, answers: Sequence[Chunk], usage: CompletionUsage) -> ResponseObject:
        """Return the complete response."""
        for answer in answers:
            list(self.chunks(answer))
        list(self._close())
        return self._response(usage)

    def chunks(self, part: Chunk) -> Iterator[ResponseEvent]:
        """Yield the events of a part of the answer."""
        if not self._events:
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))
        for chunk in self._chat.chunks(part):
            for choice in chunk.choices:
                yield from self._delta(choice.delta)
                if choice.finish_reason:
                    self._status = "incomplete" if choice.finish_reason == "length" else "completed"

    def last_chunks(self, usage: CompletionUsage) -> Iterator[ResponseEvent]:
        """Yield the end of the last item and the complete response."""
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._response(usage))

    def _delta(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        if reasoning := getattr(delta, "reasoning_content", None):
            yield from self._write("reasoning", reasoning)
        if delta.content:
            yield from self._write("message", delta.content)
        for call in delta.tool_calls or ():
            if call.id and call.function:
                yield from self._close()
                fields = {"call_id": call.id, "name": call.function.name or "", "arguments": ""}
                yield from self._add("function_call", **fields)
            if call.function and call.function.arguments:
                self._items[-1].arguments += call.function.arguments
                yield self._place("response.function_call_arguments.delta", delta=call.function.arguments)

    def _write(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[ResponseEvent]:
        """Add text to the item that is being written. An item of another kind is closed, and a new one begins."""
        part = "output_text" if kind == "message" else "reasoning_text"
        if not self._open or self._items[-1].type != kind:
            yield from self._close()
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._add(kind, **own, content=[])
            annotations: dict[str, Any] = {"annotations": []} if kind == "message" else {}
            begun = OutputPart(type=part, text="", **annotations)
            yield self._place("response.content_part.added", content_index=0, part=begun.model_copy())
            self._items[-1].content.append(begun)
        self._items[-1].content[0].text += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._place(f"response.{part}.delta", content_index=0, delta=text, **logprobs)

    def _add(self, kind: Literal["message", "reasoning", "function_call"], **fields: Any) -> Iterator[ResponseEvent]:
        id = f"{'fc' if kind == 'function_call' else kind[:3]}_{self._metadata.id}_{len(self._items)}"
        item = OutputItem(type=kind, id=id, status="in_progress", **fields)
        self._items.append(item)
        self._open = True
        added = item.model_copy(deep=True)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=added)

    def _close(self) -> Iterator[ResponseEvent]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if item.type == "function_call":
            yield self._place("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            [part] = item.content
            logprobs: dict[str, Any] = {"logprobs": []} if item.type == "message" else {}
            yield self._place(f"response.{part.type}.done", content_index=0, text=part.text, **logprobs)
            yield self._place("response.content_part.done", content_index=0, part=part)
        item.status = "incomplete" if self._status == "incomplete" else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, type: str, **fields: Any) -> ResponseEvent:
        """Return an event about the item that is being written."""
        return self._event(type, item_id=self._items[-1].id, output_index=len(self._items) - 1, **fields)

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        self._events += 1
        return ResponseEvent(type=type, sequence_number=self._events - 1, **fields)

    def _response(self, usage: CompletionUsage | None) -> ResponseObject:
        body = self._body
        incomplete = self._status == "incomplete"
        choice = body.tool_choice or "auto"
        return ResponseObject(
            id=self._metadata.id,
            object="response",
            created_at=self._metadata.created,
            status=self._status,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if incomplete else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._metadata.model,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            store=body.store,
            temperature=body.temperature,
            text={"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools],
            top_p=body.top_p,
            truncation="disabled",
            usage=_usage(usage) if usage else None,
        )


def _usage(usage: CompletionUsage) -> dict[str, Any]:
    details = usage.prompt_tokens_details
    cached = (details and details.cached_tokens) or 0
    lowered = getattr(usage, "max_tokens", None)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
        **({} if lowered is None else {"max_output_tokens": lowered}),
    }
