"""The base of request bodies: known fields only, no conversions, and refusals that cost little.

In:    parsed JSON, up to a megabyte of it wrong.
Out:   pydantic's errors, a few of them.
Never: makes an error for each of a hundred thousand wrong items, names or texts, or quotes one at length.
"""

from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: an error for each would cost seconds and hundreds of megabytes."""


class RequestBody(BaseModel):
    """A JSON object with known fields only. Types are not converted: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        """Drop all unknown fields but the first, since pydantic makes an error for each."""
        if not isinstance(value, dict) or len(value) <= len(cls.__pydantic_fields__):
            return value
        known = {field.alias or name for name, field in cls.__pydantic_fields__.items()}
        first = next(name for name in value if name not in known)
        return {name: item for name, item in value.items() if name in known or name == first}


def tagged_by(name: str) -> BeforeValidator:
    """Return a check of an object whose kind is told by the field `name`, which pydantic would quote at any length."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value.get(name, ""), str):
            raise ValueError(f"{name} must be text, not {shortened(value[name])}")
        return value

    return BeforeValidator(check)
