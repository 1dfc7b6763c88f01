"""Turn a request of the Responses API into a chat completion request, so that both take the same path.

In:    a checked body, and the items of the conversation that it continues.
Out:   a chat completion request; errors about it, with the names of the Responses API.
Never: leaves out a field that would change the answer.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal, cast

from mars_ray.chat.messages import (
    AssistantMessage,
    CalledFunction,
    InputMessage,
    Message,
    ToolCall,
    ToolMessage,
    text_of,
)
from mars_ray.chat.tools import FunctionDefinition, FunctionTool
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.protocol import (
    ChatCompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
)
from mars_ray.openai_api.translate import check_translated
from mars_ray.platform.responses.protocol import (
    AllowedFunctions,
    Function,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)

RESPONSES_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "correct tool_call_id": "correct call_id",
    "a message with the role tool and its tool_call_id": "an item of type function_call_output with its call_id",
}
"""Names of fields in the Responses API, by the names in errors about the chat request."""


def responses_error(error: ApiError) -> ApiError:
    """Return an error about the chat request of a response, with the names of the Responses API."""
    name = re.compile("|".join(rf"\b{re.escape(chat)}\b" for chat in RESPONSES_NAMES if chat != "messages"))
    message = name.sub(lambda match: RESPONSES_NAMES[match[0]], error.message)
    param = RESPONSES_NAMES.get(error.param or "", error.param)
    return ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers)


def stream_error(error: ApiError, sequence_number: int) -> dict[str, Any]:
    """Return an error as the last event of a stream. Some clients read its fields, others those of `error`."""
    fields = {name: error.body()["error"][name] for name in ("code", "message", "param")}
    return {"type": "error", "sequence_number": sequence_number, **fields, **error.body()}


def items_of(body: ResponsesRequest) -> Sequence[Item]:
    """Return the items of the input. A text is a message of the user."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_request_of(body: ResponsesRequest, before: Sequence[Item] = ()) -> ChatCompletionRequest:
    """Return the chat completion request that means the same, with the items `before` in front of the input.

    Raises `RequestError` for too many messages.
    """
    items = [*before, *items_of(body)]
    leading = [*takewhile(lambda item: isinstance(item, MessageItem) and item.role in ("system", "developer"), items)]
    messages = _messages(items[len(leading) :])
    # Many chat templates refuse a second message of the system.
    texts = (body.instructions, *(text_of(item.content) for item in leading if isinstance(item, MessageItem)))
    system = "\n\n".join(filter(None, texts))
    if system or not messages:
        messages.insert(0, InputMessage(role="system", content=system))
    check_translated(messages)
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        service_tier=body.service_tier,
        prompt_cache_key=body.prompt_cache_key,
        **body.lookahead,
    )


def _choice(choice: object) -> Any:
    """Return a `tool_choice` in the form of a chat request."""
    match choice:
        case NamedFunction():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedFunctions():
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]},
            }
    return choice


def _messages(items: Sequence[Item]) -> list[Message]:
    """Return the messages that items make up. Reasoning, text and calls of one answer become one message."""
    messages: list[Message] = []
    answer: dict[str, list[str]] = {}
    calls: list[ToolCall] = []

    def end_answer() -> None:
        if answer or calls:
            text = {name: "".join(parts) for name, parts in answer.items()}
            messages.append(AssistantMessage(role="assistant", tool_calls=[*calls], **text))  # type: ignore[arg-type]
        answer.clear()
        calls.clear()

    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if "content" in answer and not calls:
                    end_answer()
                answer.setdefault("content", []).append(text_of(item.content))
            case ReasoningItem():
                end_answer()
                answer["reasoning_content"] = [part.text for part in item.content]
            case FunctionCallItem():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, type="function", function=function))
            case FunctionOutputItem():
                end_answer()
                messages.append(ToolMessage(role="tool", tool_call_id=item.call_id, content=text_of(item.output)))
            case MessageItem():
                end_answer()
                role = cast(Literal["system", "developer", "user"], item.role)  # the case above takes the assistant's
                messages.append(InputMessage(role=role, content=text_of(item.content)))
    end_answer()
    return messages


def _tool(tool: Function) -> FunctionTool:
    fields = tool.model_dump(exclude_unset=True, exclude={"type"})
    return FunctionTool(type="function", function=FunctionDefinition(**fields))


def _format(body: ResponsesRequest) -> ResponseFormat:
    format = body.text.format
    if not isinstance(format, SchemaFormat):
        return format
    return JsonSchemaFormat(type="json_schema", json_schema=format)
