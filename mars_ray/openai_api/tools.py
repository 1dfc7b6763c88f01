"""Tools of a request, and the caller's choice among them, in the form of OpenAI's chat API.

In:    `tools`, `tool_choice`, `parallel_tool_calls`, and their older forms `functions` and `function_call`.
Out:   the functions that an answer may or must call.
Never: looks into the schema of a function: the engine's process for grammars does, within limits of time and memory.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.call_format import AnswerFormat, CallFormat
from mars_ray.openai_api.request_body import Items, RequestBody
from mars_ray.openai_api.request_limits import TOOLS_MAX

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


def refuse_hosted_tool(tool: Any, own: str) -> Any:
    """Return a tool of the type `own`, which the caller runs. Raises an `ApiError` for any other type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != own:
        raise ApiError.bad_request(
            f"a tool of type {kind[:40]!r} is not supported; give tools of type {own!r}.", "tools"
        )
    return tool


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None means that there are none."""
    strict: bool | None = None
    """With `tool_choice: auto`, keywords that no grammar can hold are ignored unless this is true. Otherwise they are
    refused in any case."""


class FunctionTool(RequestBody):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


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


Tools = Annotated[Items[FunctionTool], Field(max_length=TOOLS_MAX)]
Functions = Annotated[Items[FunctionDefinition], Field(max_length=TOOLS_MAX)]


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

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the functions in the form that chat templates expect."""
        return [
            {"type": "function", "function": function.model_dump(exclude_unset=True, exclude={"strict"})}
            for function in self.functions
        ]


def offered_tools(
    *,
    tools: list[FunctionTool],
    tool_choice: ToolChoice | None,
    parallel: bool,
    functions: list[FunctionDefinition],
    function_call: LegacyChoice | None,
    tools_max: int,
) -> OfferedTools | None:
    """Return the tools of a request; None if it has none or the answer may call none. Raises an `ApiError`."""
    if (tools or tool_choice) and (functions or function_call):
        raise ApiError.bad_request("give tools and tool_choice, or functions and function_call, not both.", "functions")
    legacy = bool(functions)
    param = "functions" if legacy else "tools"
    named = functions or [tool.function for tool in tools]
    choice = function_call if legacy else tool_choice
    if len(named) > tools_max:
        raise ApiError.bad_request(
            f"{param} holds {len(named)} functions; this server takes at most {tools_max}.", param
        )
    name, count = max(Counter(function.name for function in named).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ApiError.bad_request(f"{param} holds {count} functions with the name {name!r}; names must differ.", param)
    for function in named:
        if (function.parameters or {}).get("type", "object") != "object":
            raise ApiError.bad_request(f"the parameters of {function.name} must be a schema of the type object.", param)
    wanted = _wanted_names(choice or function_call)
    allowed = choice.allowed_tools if isinstance(choice, AllowedToolsChoice) else None
    required = choice == "required" or (allowed.mode == "required" if allowed else bool(wanted))
    if not named and (wanted or required):
        raise ApiError.bad_request(f"the choice of a tool needs tools; give {param}.", "tool_choice")
    for unknown in [name for name in wanted if name not in {function.name for function in named}]:
        raise ApiError.bad_request(
            f"the function {unknown[:80]!r} is not in {param}; choose one of those.",
            "function_call" if legacy else "tool_choice",
        )
    if not named or choice == "none":
        return None
    return OfferedTools(
        functions=tuple(named),
        callable=tuple(function for function in named if not wanted or function.name in wanted),
        required=required,
        parallel=parallel and not legacy and (allowed is not None or not wanted),
        legacy=legacy,
    )


def known_format(model: AnswerFormat, param: str) -> CallFormat:
    """Return the format of the model's calls. Raises an `ApiError` that says why a model has none."""
    if model.calls is not None:
        return model.calls
    reason = (
        "writes tool calls in a format that this server does not know"
        if model.template_takes_tools
        else "knows no tools"
    )
    raise ApiError.bad_request(
        f"the chat template of this model {reason}. Leave {param} out, or set tool_call_parser in the server's "
        "configuration.",
        param,
        "unsupported_parameter",
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
