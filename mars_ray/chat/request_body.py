"""The base class of request bodies: only known fields, no type conversions, and cheap refusals.

In:    parsed JSON, of which up to a megabyte may be invalid.
Out:   a request body, or a few errors from pydantic.
Never: creates an error for each of a hundred thousand invalid items, names or texts, or quotes any of them in full.
"""

from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, model_validator

T = TypeVar("T")

# Maximum sizes of a conversation. They bound the time of its checks, during which other callers wait.

MESSAGES_MAX = 4096
"""Maximum messages of one conversation."""

PARTS_MAX = 4096
"""Maximum parts in the content of one message."""

TOOLS_MAX = 1024
"""Maximum tools of one conversation."""

CALLS_MAX = 4096
"""Maximum tool calls in the messages of one conversation."""

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first invalid item, because an error per item would cost seconds and hundreds of
megabytes."""


ModelName = Annotated[str | None, BeforeValidator(lambda name: None if name == "" else name)]
"""Name of the model that answers. None and the empty text, which some clients send for an unset name, mean the main
model."""


class RequestBody(BaseModel, extra="forbid", strict=True, frozen=True):
    """A JSON object with known fields only. Types are not converted: "5" is not a number."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        return one_unknown_field(cls, value)


def one_unknown_field(model: type[BaseModel], value: Any) -> Any:
    """Return an object without all its unknown fields but the first, because pydantic reports an error for each."""
    if not isinstance(value, dict) or len(value) <= len(model.__pydantic_fields__):
        return value
    known_names = {field.alias or name for name, field in model.__pydantic_fields__.items()}
    first = next(name for name in value if name not in known_names)
    return {name: item for name, item in value.items() if name in known_names or name == first}


def tagged_by(name: str) -> BeforeValidator:
    """Return a validator that checks that the field `name`, which selects the type of an object, is text.

    Pydantic would quote an invalid value in full, however long it is.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value.get(name, ""), str):
            raise ValueError(f"{name} must be text, not {shortened(value[name])}")
        return value

    return BeforeValidator(check)
