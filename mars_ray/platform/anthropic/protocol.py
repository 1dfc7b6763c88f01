"""The bodies of `/v1/messages` and `/v1/messages/count_tokens` as pydantic models.

In:    parsed JSON.
Out:   a checked request, in which every field either takes effect or cannot change the answer.
Never: ignores a field that would change the answer; the error that refuses such a field names it.

Names and meanings are those of Anthropic's API reference, spelt as in the types of the `anthropic` package.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from mars_ray.chat.client_fields import (
    DEFINITION_FIELDS,
    SentBack,
    joined_texts,
)
from mars_ray.chat.request_body import (
    CALLS_MAX,
    MESSAGES_MAX,
    PARTS_MAX,
    TOOLS_MAX,
    Items,
    ModelName,
    RequestBody,
    tagged_by,
)
from mars_ray.chat.tools import FunctionName, refuse_hosted_tool
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.protocol import LookaheadFields, supported_fields

NO_THREADS = "thread_unsupported_request"
"""Code of the error that makes Anthropic's client send all messages again, without a thread."""
IGNORED = frozenset(("cache_control", "diagnostics", "metadata", "service_tier"))
"""Fields that are accepted without effect: they concern the caller's identity, billing or possible savings."""

ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [ALL_THINKING]}),
    "inference_geo": (),
    "mcp_servers": (),
    "speed": ("standard",),
}
"""Fields that this server does not support, with the values that are accepted because they request nothing."""

_BLOCK = {
    "cache_control": "Anthropic's prompt caching",
    "caller": "anthropic.types.ToolUseBlock: the model or its code called",
    "citations": "anthropic.types.TextBlock: places in sources",
    "parsed_output": "anthropic's messages.parse(): the text as an object",
    "toolset_name": "anthropic.types.ToolUseBlock",
}
BLOCK_FIELDS = frozenset(_BLOCK)
"""Fields of a block that clients send back and that have no effect, as in `chat/client_fields`."""

_MESSAGE = {
    "cache_control": "agents that mark a message instead of its last block",
    "container": "anthropic.types.Message: where tools of Anthropic's servers ran",
    "diagnostics": "anthropic.types.Message",
    "id": "anthropic.types.Message",
    "model": "anthropic.types.Message",
    "stop_details": "anthropic.types.Message",
    "stop_reason": "anthropic.types.Message",
    "stop_sequence": "anthropic.types.Message",
    "type": "anthropic.types.Message",
    "usage": "anthropic.types.Message",
}
MESSAGE_FIELDS = frozenset(_MESSAGE)
"""Fields of a message that clients send back and that have no effect."""


class _Body(SentBack):
    """A JSON object in which null and `cache_control` mean the same as leaving the field out."""

    unused = frozenset(("cache_control",))


class _Block(SentBack):
    """A block of a message's content."""

    unused = BLOCK_FIELDS


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str


def _joined(content: Any) -> Any:
    return joined_texts(content, BLOCK_FIELDS)


Text = Annotated[str | Annotated[Items[TextBlock], Field(max_length=PARTS_MAX)], BeforeValidator(_joined)]


class ToolUseBlock(_Block):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool = False


class ThinkingBlock(_Block):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Accepted without effect, because this server does not sign reasoning."""


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type"), tagged_by("type")
]


class ConversationMessage(SentBack):
    """One message of a conversation, written by the caller or taken from an earlier answer."""

    unused = MESSAGE_FIELDS

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | Annotated[Items[Block], Field(min_length=1, max_length=PARTS_MAX)], BeforeValidator(_joined)
    ]

    @model_validator(mode="before")
    @classmethod
    def _take_empty_answer(cls, value: Any) -> Any:
        """Take an answer without blocks, as this server gives it. A message of the user has at least one."""
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("content") == []:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> "ConversationMessage":
        other = {
            "assistant": (ToolResultBlock,),
            "system": (ToolUseBlock, ThinkingBlock, ToolResultBlock),
            "user": (ToolUseBlock, ThinkingBlock),
        }[self.role]
        for block in self.content if isinstance(self.content, list) else ():
            if isinstance(block, other):
                raise ValueError(f"a message with the role {self.role} may not hold a block of type {block.type}")
        return self


def _few_blocks(messages: Any) -> Any:
    """Refuse too many blocks before checking any of them, because each check delays all other callers."""
    if isinstance(messages, list) and len(messages) <= MESSAGES_MAX:
        contents = (_joined(message.get("content")) for message in messages if isinstance(message, dict))
        count = sum(len(content) for content in contents if isinstance(content, list))
        if count > CALLS_MAX:
            raise ValueError(f"messages holds {count} blocks next to plain text; it may have up to {CALLS_MAX}")
    return messages


Messages = Annotated[
    Items[ConversationMessage], Field(min_length=1, max_length=MESSAGES_MAX), BeforeValidator(_few_blocks)
]


class Tool(SentBack):
    """A tool that the caller runs. Tools that Anthropic's servers run are refused by their type."""

    unused = DEFINITION_FIELDS

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted_tools(cls, value: Any) -> Any:
        return refuse_hosted_tool(value, "custom")


class ToolChoice(_Body):
    """The caller's choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool to call, with the type `tool`."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice needs a name with the type 'tool', and takes none with other types")
        return self


class Thinking(_Body):
    """Whether the model reasons before its answer, and the most tokens that it may reason for."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Accepted without effect: reasoning always comes back whole."""


class OutputFormat(_Body):
    """A JSON schema that the answer conforms to."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Body):
    """Format of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Accepted without effect, as `reasoning_effort` of chat requests."""


class CountTokensRequest(RequestBody):
    """Body of `/v1/messages/count_tokens`: the fields that a prompt is made from."""

    model: ModelName = None
    messages: Messages
    system: Text = ""
    tools: Annotated[Items[Tool], Field(max_length=TOOLS_MAX)] = Field([])
    tool_choice: ToolChoice | None = None
    """None means `auto`."""
    thinking: Thinking | None = None
    """None leaves the choice to the model."""
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, value: Any) -> Any:
        """Drop nulls and ignored fields; refuse fields that are not supported."""
        if isinstance(value, dict) and value.get("thread") is not None:
            raise ApiError.bad_request(
                "this server holds no threads; leave thread out and send all messages.", "thread", NO_THREADS
            )
        return supported_fields(value, IGNORED, NEUTRAL)


class MessagesRequest(CountTokensRequest, LookaheadFields):
    """Body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Items[str] = Field([])
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


class TokenCount(BaseModel):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int
