"""The body of `/v1/responses` as pydantic models.

In:    parsed JSON.
Out:   a checked request, in which every field either takes effect or cannot change the answer.
Never: ignores a field that would change the answer; the error that refuses such a field names it.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mars_ray.chat.client_fields import DEFINITION_FIELDS, ITEM_FIELDS, SentBack, kept_fields
from mars_ray.chat.limits import CALLS_MAX, PARTS_MAX, TOOLS_MAX
from mars_ray.chat.messages import TextPart, refusal_as_text
from mars_ray.chat.request_body import Items, ModelName, RequestBody, tagged_by
from mars_ray.chat.tools import FunctionName, refuse_hosted_tool
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.protocol import IGNORED, JsonObjectFormat, ReasoningEffort, TextFormat

RESPONSES_PATH = "/v1/responses"

RESPONSES_IGNORED = (IGNORED - {"metadata", "store"}) | {"stream_options"}
"""Fields that are accepted without effect. The only option of a stream adds padding."""

RESPONSES_NEUTRAL: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
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


class _Item(SentBack):
    """An item of the input. Null, ids and states of earlier items mean the same as leaving them out."""

    unused = ITEM_FIELDS


def _joined(content: Any) -> Any:
    """Return parts of text joined to one text, and any other content as it is.

    Joining avoids a pydantic model per part, because 40,000 models would delay all other callers. Raises an `ApiError`
    for parts of other kinds.
    """
    if not isinstance(content, list) or not 1 <= len(content) <= PARTS_MAX:
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
            raise ApiError.bad_request(f"content of type {kind[:40]!r} is not supported; only text is.", "input")
        if kind is None or not isinstance(part.get("text"), str):
            return content
        if len(part) > 2 and kept_fields(part, ITEM_FIELDS).keys() != {"type", "text"}:
            return content
    return "".join(part["text"] for part in content)


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
    """The result of a call."""

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


def _typed(item: Any) -> Any:
    """Return a message with its type, which clients may leave out or set to null."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    untyped = {name: value for name, value in item.items() if name != "type"}
    return {"type": "message", **untyped} if "role" in item else untyped


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
    tagged_by("type"),
    BeforeValidator(_typed),
]


class Function(SentBack):
    """A function that the model may call. Tools that OpenAI's servers run are refused by their type."""

    unused = DEFINITION_FIELDS

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

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


class SchemaFormat(RequestBody):
    """Format of an answer: JSON that conforms to a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


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
    """Return the field `include`. Raises an `ApiError` for a value that is not supported."""
    for value in include if isinstance(include, list) else ():
        if isinstance(value, str) and value not in INCLUDED:
            raise ApiError.bad_request(
                f"include {value[:80]!r} is not supported by this server; leave it out.",
                "include",
                "unsupported_parameter",
            )
    return include


class ResponsesRequest(RequestBody):
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
        """Drop nulls and ignored fields; refuse fields that are not supported."""
        if not isinstance(value, dict):
            return value
        kept = {name: item for name, item in value.items() if item is not None and name not in RESPONSES_IGNORED}
        if kept.get("input") == []:
            raise ApiError.bad_request("input is empty; give a text or at least one item.", "input")
        for name in RESPONSES_NEUTRAL.keys() & kept.keys():
            if kept.pop(name) not in RESPONSES_NEUTRAL[name]:
                raise ApiError.bad_request(
                    f"{name} is not supported by this server; leave it out.", name, "unsupported_parameter"
                )
        return kept
