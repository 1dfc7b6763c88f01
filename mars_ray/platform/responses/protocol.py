"""The body of `/v1/responses` as pydantic models.

In:    parsed JSON.
Out:   a checked request, in which every field either takes effect or cannot change the answer.
Never: ignores a field that would change the answer; the error that refuses such a field names it.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mars_ray.chat.client_fields import EVERYWHERE, SentBack, joined_texts
from mars_ray.chat.messages import TextPart, refusal_as_text
from mars_ray.chat.request_body import CALLS_MAX, PARTS_MAX, TOOLS_MAX, Items, ModelName, RequestBody, tagged_by
from mars_ray.chat.tools import FunctionDefinition, refuse_hosted_tool
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError
from mars_ray.openai_api.protocol import (
    IGNORED,
    JsonObjectFormat,
    JsonSchema,
    LookaheadFields,
    ReasoningEffort,
    TextFormat,
    supported_fields,
)

RESPONSES_PATH = "/v1/responses"

RESPONSES_IGNORED = (IGNORED - {"metadata", "store"}) | {"max_tool_calls", "stream_options"}
"""Fields that are accepted without effect. `max_tool_calls` counts calls of tools that OpenAI's servers run; the
only option of a stream adds padding."""

RESPONSES_NEUTRAL: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Unsupported fields, with the values that are accepted because they request nothing. Null is always accepted."""

INCLUDED = frozenset(
    (
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    )
)
"""Values of `include` that are accepted without effect. Reasoning comes back in the clear, so callers can send it again
without its encrypted form. The other values are about items that no response of this server has."""

_ITEM = EVERYWHERE | {
    "annotations": "openai.types.responses.ResponseOutputText: places in the text that cite a source",
    "caller": "openai.types.responses.ResponseFunctionToolCall: the model or its program called",
    "created_by": "the Responses API: the part of an agent that made the item",
    "encrypted_content": "openai.types.responses.ResponseReasoningItem: the reasoning for OpenAI's servers alone",
    "id": "the Responses API: id of the item",
    "logprobs": "openai.types.responses.ResponseOutputText",
    "parsed": "openai's responses.parse(): the text as an object",
    "parsed_arguments": "openai's responses.parse(): the arguments as an object",
    "phase": "the Responses API: whether a message is commentary or the final answer",
    "prompt_cache_breakpoint": "openai.types.responses.ResponseInputTextParam",
    "status": "the Responses API: completed, incomplete",
}
ITEM_FIELDS = frozenset(_ITEM)
"""Fields of an item, or of a part of its content, that clients send back and that have no effect, as in
`chat/client_fields`."""


class _Item(SentBack):
    """An item of the input. Null, ids and states of earlier items mean the same as leaving them out."""

    unused = ITEM_FIELDS


def _joined(content: Any) -> Any:
    return joined_texts(content, ITEM_FIELDS, ("input_text", "output_text", "text"), "input")


Text = Annotated[str | Annotated[Items[TextPart], Field(min_length=1, max_length=PARTS_MAX)], BeforeValidator(_joined)]


def _empty_as_text(content: Any) -> Any:
    return "" if content == [] else content


class MessageItem(_Item):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _read_answer(cls, value: Any) -> Any:
        """Take what an answer may have: refusals, and no content at all."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        parts = value.get("content")
        # A longer list is refused by its length, so its parts need no work.
        if not isinstance(parts, list) or len(parts) > PARTS_MAX:
            return value
        return {**value, "content": _empty_as_text([refusal_as_text(part) for part in parts])}


class FunctionCallItem(_Item):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(_Item):
    """The result of a call. `call_id` names the function, so its name has no effect."""

    unused = ITEM_FIELDS | {"name", "namespace"}

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Text, BeforeValidator(_empty_as_text)]


class ReasoningText(_Item):
    """A text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning of an earlier answer. Its summary, which OpenAI's servers write for readers, has no effect."""

    unused = ITEM_FIELDS | {"summary"}

    type: Literal["reasoning"]
    content: Annotated[Items[ReasoningText], Field(max_length=1)] = Field([])


class ItemReference(_Item):
    """The id of an item of a stored response, in place of the item."""

    unused = ITEM_FIELDS - {"id"}

    type: Literal["item_reference"]
    id: str


def _typed(item: Any) -> Any:
    """Return a message or a reference with its type, which clients may leave out or set to null."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    untyped = {name: value for name, value in item.items() if name != "type"}
    if "role" in item:
        return {"type": "message", **untyped}
    return {"type": "item_reference", **untyped} if untyped.keys() == {"id"} else untyped


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference,
    Field(discriminator="type"),
    tagged_by("type"),
    BeforeValidator(_typed),
]


class Function(FunctionDefinition):
    """A function that the model may call. Tools that OpenAI's servers run are refused by their type."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted_tools(cls, value: Any) -> Any:
        return refuse_hosted_tool(value, "function")


class NamedFunction(RequestBody):
    """A `tool_choice` that names the function to call, or an entry of `allowed_tools`."""

    type: Literal["function"]
    name: str


class AllowedFunctions(RequestBody):
    """A `tool_choice` that limits the functions to some of `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedFunction], Field(min_length=1, max_length=TOOLS_MAX)]


class SchemaFormat(JsonSchema):
    """Format of an answer: JSON that conforms to a schema."""

    type: Literal["json_schema"]


class TextOptions(RequestBody):
    """Format of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type"), tagged_by("type")] = (
        TextFormat(type="text")
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect, as in chat completions: a style that only models trained for it follow."""


class ReasoningOptions(RequestBody):
    """Options of reasoning. They have no effect, like `reasoning_effort` of chat requests. There are no summaries."""

    context: Literal["auto", "current_turn", "all_turns"] | None = None
    effort: ReasoningEffort | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


def _supported(include: Any) -> Any:
    """Return the field `include`. Raises `RequestError` for a value that is not supported."""
    for value in include if isinstance(include, list) else ():
        if isinstance(value, str) and value not in INCLUDED:
            raise RequestError(
                f"include {value[:NAME_CHARS]!r} is not supported by this server; leave it out.",
                param="include",
                code="unsupported_parameter",
            )
    return include


class ResponsesRequest(LookaheadFields):
    """Body of `/v1/responses`."""

    model: ModelName = None
    include: Annotated[Items[str], Field(max_length=len(INCLUDED)), BeforeValidator(_supported)] = Field([])
    input: str | Annotated[Items[Item], Field(min_length=1, max_length=CALLS_MAX)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Returned with the response."""
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    """Stored response whose conversation the input continues."""
    reasoning: ReasoningOptions | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    store: bool = True
    """Whether the finished response is stored for later requests."""
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: TextOptions = TextOptions()
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    """None means `auto`."""
    tools: Annotated[Items[Function], Field(max_length=TOOLS_MAX)] = Field([])
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("input") == []:
            raise RequestError("input is empty; give a text or at least one item.", param="input")
        return supported_fields(value, RESPONSES_IGNORED, RESPONSES_NEUTRAL)
