"""Turn a request of the Messages API into a chat completion request, so that both take the same path.

In:    a checked body; whether the model reasons.
Out:   a chat completion request.
Never: leaves out a field that would change the answer.
"""

import json
from collections.abc import Iterator
from itertools import groupby, takewhile
from typing import Any

from mars_ray.chat.messages import (
    AssistantMessage,
    CalledFunction,
    InputMessage,
    Message,
    ToolCall,
    ToolMessage,
)
from mars_ray.chat.tools import FunctionDefinition, FunctionTool
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.protocol import (
    ChatCompletionRequest,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    TextFormat,
)
from mars_ray.openai_api.translate import check_translated
from mars_ray.platform.anthropic.protocol import (
    ConversationMessage,
    CountTokensRequest,
    MessagesRequest,
    Text,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)


def chat_request(body: CountTokensRequest, *, reasons: bool) -> ChatCompletionRequest:
    """Return the chat completion request that means the same. Raises an `ApiError`, or `RequestError` for too many
    messages."""
    if body.messages[-1].role == "assistant":
        raise ApiError.bad_request(
            "messages ends with a message from the assistant, which this server does not continue; end with one from "
            "the user.",
            "messages",
        )
    leading = list(takewhile(lambda message: message.role == "system", body.messages))
    if len(leading) == len(body.messages):
        raise ApiError.bad_request("messages has no message from the user; end with one.", "messages")
    system = "\n\n".join(text for text in (_text(body.system), *map(_text_blocks, leading)) if text)
    messages: list[Message] = [InputMessage(role="system", content=system)] if system else []
    parts = (
        part
        for message in body.messages[len(leading) :]
        for part in (_assistant(message) if message.role == "assistant" else _user(message))
    )
    for _, turn in groupby(parts, type):
        messages += _joined([*turn])
    check_translated(messages)
    choice = body.tool_choice or ToolChoice(type="auto")
    request = ChatCompletionRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools],
        tool_choice=_choice(choice) if body.tool_choice else None,  # type: ignore[arg-type]
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        thinking_token_budget=_budget(body, reasons=reasons),
        response_format=_format(body),
        stream_options=StreamOptions(include_usage=True),
    )
    if not isinstance(body, MessagesRequest):
        return request
    return request.model_copy(
        update={
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
        | body.lookahead
    )


def _text(text: Text) -> str:
    return text if isinstance(text, str) else "".join(block.text for block in text)


def _joined(turn: list[AssistantMessage | ToolMessage | str]) -> list[Message]:
    """Return parts of one type as messages. Turns of one role that follow each other are one turn in this API."""
    texts = [part for part in turn if isinstance(part, str)]
    answers = [part for part in turn if isinstance(part, AssistantMessage)]
    if texts:
        return [InputMessage(role="user", content="\n\n".join(texts))]
    if len(answers) > 1:
        contents = [str(answer.content) for answer in answers if answer.content]
        reasons = [answer.reasoning_content for answer in answers if answer.reasoning_content]
        calls = [call for answer in answers for call in answer.tool_calls]
        return [
            AssistantMessage(
                role="assistant",
                content="\n\n".join(contents) or None,
                reasoning_content="".join(reasons) or None,
                tool_calls=calls,
            )
        ]
    return [part for part in turn if not isinstance(part, str)]


def _assistant(message: ConversationMessage) -> Iterator[AssistantMessage]:
    """Yield the message. Its text, its reasoning and its calls are joined, because chat templates hold one of each."""
    if isinstance(message.content, str):
        yield AssistantMessage(role="assistant", content=message.content)
        return
    text = _text_blocks(message)
    thinking = "".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    calls = [
        ToolCall(
            id=block.id,
            type="function",
            function=CalledFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
        )
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    yield AssistantMessage(role="assistant", content=text or None, reasoning_content=thinking or None, tool_calls=calls)


def _user(message: ConversationMessage) -> Iterator[ToolMessage | str]:
    """Yield the results in a message, then its text.

    A message of the system in mid-conversation stays at its place as text of the user, because many chat templates
    refuse a system message that is not the first. At the beginning it would change the prompt of every turn.
    """
    for block in message.content if isinstance(message.content, list) else ():
        if isinstance(block, ToolResultBlock):
            content = ("Error: " if block.is_error else "") + _text(block.content)
            yield ToolMessage(role="tool", tool_call_id=block.tool_use_id, content=content)
    text = _text_blocks(message)
    if text or isinstance(message.content, str):
        yield text


def _text_blocks(message: ConversationMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def _tool(tool: Tool) -> FunctionTool:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {} if tool.description is None else {"description": tool.description}
    function |= {} if tool.strict is None else {"strict": tool.strict}
    return FunctionTool(type="function", function=FunctionDefinition(**function))


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}


def _budget(body: CountTokensRequest, *, reasons: bool) -> int | None:
    """Return the maximum tokens of reasoning. None leaves the length to the model."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return None
    if body.thinking.type == "disabled":
        return 0 if reasons else None
    if not reasons:
        raise ApiError.bad_request("thinking needs a model that reasons; leave it out for this model.", "thinking")
    if body.thinking.budget_tokens is None:
        raise ApiError.bad_request("thinking of type 'enabled' needs budget_tokens.", "thinking")
    return body.thinking.budget_tokens


def _format(body: CountTokensRequest) -> ResponseFormat:
    if (format := body.output_config.format) is None:
        return TextFormat(type="text")
    return JsonSchemaFormat(
        type="json_schema", json_schema=JsonSchema.model_validate({"name": "output", "schema": format.json_schema})
    )
