"""Functions that an answer may call, in the form of OpenAI's chat API.

In:    `tools`, or their older form `functions`.
Out:   the definitions of the functions, also in the form that chat templates read.
Never: looks into the schema of a function: the engine's process for grammars does, within limits of time and memory.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mars_ray.chat.client_fields import DEFINITION_FIELDS, SentBack
from mars_ray.chat.request_body import TOOLS_MAX, Items
from mars_ray.errors import RequestError

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
"""OpenAI's API takes 64 characters, Anthropic's 128."""


def refuse_hosted_tool(tool: Any, own: str) -> Any:
    """Return a tool of the type `own`, which the caller runs. Raises `RequestError` for any other type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != own:
        raise RequestError(f"a tool of type {kind[:40]!r} is not supported; give tools of type {own!r}.", param="tools")
    return tool


class FunctionDefinition(SentBack):
    """A function that the model may call."""

    unused = DEFINITION_FIELDS

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None means that there are none."""
    strict: bool | None = None
    """Whether `additionalProperties: false` is added to every object of the parameters that does not set it.

    With `tool_choice: auto`, keywords that no grammar can hold are ignored unless this is true. Otherwise they are
    refused in any case."""


class FunctionTool(SentBack):
    """An entry of `tools`. Data sets also list functions themselves, as the older `functions` does."""

    unused = DEFINITION_FIELDS

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _wrap_function(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "name" not in value or value.get("function") is not None:
            return value
        function = {name: item for name, item in value.items() if name not in ("type", "function")}
        return {"type": value.get("type"), "function": function}


Tools = Annotated[Items[FunctionTool], Field(max_length=TOOLS_MAX)]
Functions = Annotated[Items[FunctionDefinition], Field(max_length=TOOLS_MAX)]


def check_functions(functions: Sequence[FunctionDefinition], param: str) -> None:
    """Raise `RequestError` for functions with the same name, or with arguments that are no object."""
    counts = Counter(function.name for function in functions)
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise RequestError(f"{param} holds {count} functions with the name {name!r}; names must differ.", param=param)
    for function in functions:
        if (function.parameters or {}).get("type", "object") != "object":
            raise RequestError(f"the parameters of {function.name} must be a schema of the type object.", param=param)


def template_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Return functions in the form that chat templates expect."""
    return [
        {"type": "function", "function": function.model_dump(exclude_unset=True, exclude={"strict"})}
        for function in functions
    ]
