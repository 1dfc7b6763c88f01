"""Tools of a request, and the caller's choice among them, in the form of OpenAI's chat API.

In:    `tools`, `tool_choice`, `parallel_tool_calls`, and their older forms `functions` and `function_call`.
Out:   the functions that an answer may or must call, and the conversation with them for a chat template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mars_ray.chat.call_format import AnswerFormat
from mars_ray.chat.conversation import Conversation, PlainMessage, template_conversation
from mars_ray.chat.request_body import TOOLS_MAX, Items, RequestBody
from mars_ray.chat.tools import FunctionDefinition, Functions, Tools, check_functions, template_tools
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError
from mars_ray.openai_api.request_limits import RequestLimits


class FunctionChoice(RequestBody):
    """The name of a function to call."""

    name: str


class NamedToolChoice(RequestBody):
    """A `tool_choice` that names the function to call, or an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(RequestBody):
    """The functions that an answer may call, or with `required` must call; the prompt describes all."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedToolChoice], Field(min_length=1, max_length=TOOLS_MAX)]


class AllowedToolsChoice(RequestBody):
    """A `tool_choice` that limits the functions to some of `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_of(field: str, *words: str) -> BeforeValidator:
    """Return a validator that names the words of a choice, because pydantic would name its last type alone."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict) and value not in words:
            raise ValueError(f"{field} must be {', '.join(words)} or an object that names a function")
        return value

    return BeforeValidator(check)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice,
    _choice_of("tool_choice", "none", "auto", "required"),
]
LegacyChoice = Annotated[Literal["none", "auto"] | FunctionChoice, _choice_of("function_call", "none", "auto")]


class ToolFields(RequestBody):
    """The fields of a chat request that concern tools."""

    tools: Tools = Field([])
    tool_choice: ToolChoice | None = None
    """None means `auto`."""
    parallel_tool_calls: bool = True
    functions: Functions = Field([])
    """Older form of `tools`."""
    function_call: LegacyChoice | None = None
    """Older form of `tool_choice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The functions of a request, whichever form it used, and whether one must be called."""

    functions: tuple[FunctionDefinition, ...]
    """Functions that the prompt describes."""
    callable: tuple[FunctionDefinition, ...]
    """Functions that the answer may call: all, or those that `tool_choice` names."""
    required: bool
    """Whether the answer must be a call."""
    parallel: bool
    """Whether an answer may hold several calls."""
    legacy: bool
    """Whether the request used `functions`, so that the answer has a `function_call`."""

    @property
    def param(self) -> str:
        """Name of the request's field that holds the functions."""
        return "functions" if self.legacy else "tools"


def check_choice_without_tools(choice: object) -> None:
    """Raise `RequestError` if a choice asks for a tool, although there are none."""
    if choice not in (None, "none", "auto"):
        raise RequestError("the choice of a tool needs tools; give tools.", param="tool_choice")


def tools_of(body: ToolFields, limits: RequestLimits) -> OfferedTools | None:
    """Return the tools of a request; None if it has none or the answer may call none. Raises `RequestError`."""
    tools, tool_choice, functions, function_call = body.tools, body.tool_choice, body.functions, body.function_call
    if (tools or tool_choice) and (functions or function_call):
        raise RequestError("give tools and tool_choice, or functions and function_call, not both.", param="functions")
    legacy = bool(functions)
    param = "functions" if legacy else "tools"
    named = functions or [tool.function for tool in tools]
    choice = function_call if legacy else tool_choice
    if len(named) > limits.tools:
        raise RequestError(
            f"{param} holds {len(named)} functions; this server takes at most {limits.tools}.", param=param
        )
    check_functions(named, param)
    wanted = _wanted_names(choice or function_call)
    allowed = choice.allowed_tools if isinstance(choice, AllowedToolsChoice) else None
    required = choice == "required" or (allowed.mode == "required" if allowed else bool(wanted))
    if not named and (wanted or required):
        raise RequestError(f"the choice of a tool needs tools; give {param}.", param="tool_choice")
    for unknown in [name for name in wanted if name not in {function.name for function in named}]:
        raise RequestError(
            f"the function {unknown[:NAME_CHARS]!r} is not in {param}; choose one of those.",
            param="function_call" if legacy else "tool_choice",
        )
    if not named or choice == "none":
        return None
    return OfferedTools(
        functions=tuple(named),
        callable=tuple(function for function in named if not wanted or function.name in wanted),
        required=required,
        parallel=body.parallel_tool_calls and not legacy and (allowed is not None or not wanted),
        legacy=legacy,
    )


def _wanted_names(choice: object) -> list[str]:
    """Return the names of the functions that a choice is limited to; none if it is not limited."""
    match choice:
        case AllowedToolsChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case NamedToolChoice():
            return [choice.function.name]
        case FunctionChoice():
            return [choice.name]
    return []


def conversation(messages: Sequence[PlainMessage], offered: OfferedTools | None, model: AnswerFormat) -> Conversation:
    """Return checked messages, with the tools on offer, for the model's chat template. Raises `RequestError`."""
    tools = template_tools(offered.functions) if offered else []
    return template_conversation(messages, tools, model, offered.param if offered else "tools")
